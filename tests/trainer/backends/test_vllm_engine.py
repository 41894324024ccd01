"""The torch backend with a real vLLM (for CPUs): after each hand-over the engine samples from the new weights."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from on_policy import TINY, config, rows, update_of

from harnessrl.cli.train import run
from harnessrl.config import load_config
from harnessrl.trainer.backends.torch import TorchBackend

pytestmark = pytest.mark.vllm
QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart" / "config.yaml"


@pytest.mark.parametrize(
    ("lora_rank", "sleep"), [(0, False), (4, False), (0, True)], ids=["all weights", "lora", "sleeping"]
)
def test_after_each_hand_over_engine_and_trainer_agree(
    vllm_url: str, tmp_path: Path, lora_rank: int, sleep: bool
) -> None:
    engine = {"kind": "vllm", "url": vllm_url, "weights_dir": str(tmp_path), "sleep": sleep}
    backend = TorchBackend(config(engine=engine, model={"path": TINY, "lora_rank": lora_rank}))
    first = rows(backend)
    for number in range(5):
        metrics = backend.update(update_of(rows(backend)))
        print(
            f"hand-over {number}: gap {metrics['policy/gap']:.1e}, 99th percentile {metrics['policy/gap_p99']:.1e}"
        )
        assert metrics["policy/gap_p99"] < 1e-3
    # What the first weights sampled is unlikely under the fifth: they did change.
    assert backend.update(update_of(first))["policy/gap"] > 1e-2
    assert not list(tmp_path.iterdir()), "the weights only pass through the folder"


def test_a_collocated_run_learns(tmp_path: Path, vllm_settings: dict) -> None:
    settings = [f"engine.{name}={json.dumps(value)}" for name, value in vllm_settings.items()]
    settings += [f"model.path={TINY}", f"runs_dir={tmp_path}", "optim.lr=5e-4", "engine.max_batch=16"]
    updates = 12
    run(load_config(QUICKSTART, [*settings, f"train.updates={updates}", "collect.groups_in_flight=16"]))
    metrics = [json.loads(line) for line in (tmp_path / "quickstart" / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in metrics if "reward/train" in row]
    for row in trained:
        print(f"update {row['update']}: reward {row['reward/train']:.3f}, gap {row['policy/gap_fresh']:.1e}")
    # Only tokens of the current version can agree: others were sampled under older weights.
    assert all(row["policy/gap_fresh"] < 1e-3 for row in trained)
    assert np.polyfit(range(updates), [row["reward/train"] for row in trained], 1)[0] > 0
    assert max(row["staleness/max"] for row in trained) >= 1


def test_an_engine_that_is_killed_ends_the_run_and_says_so(tmp_path: Path, vllm_settings: dict) -> None:
    process = started(tmp_path, vllm_settings)
    known = tmp_path / "quickstart" / "engine.json"
    while not (tmp_path / "quickstart" / "controller.json").exists():
        assert process.poll() is None, "the run did not start"
        time.sleep(0.2)
    os.kill(json.loads(known.read_text())["pid"], signal.SIGKILL)
    said = process.communicate(timeout=120)[1].decode()
    assert process.returncode == 1 and "Traceback" not in said
    assert "engine" in said.strip().splitlines()[-1], said
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
    orphans = [p for p in psutil.process_iter(["name"]) if "VLLM::" in p.info["name"] and p.ppid() == 1]
    assert all(p.status() == psutil.STATUS_ZOMBIE for p in orphans)  # not every init collects its dead at once


def test_an_engine_that_does_not_start_says_why(tmp_path: Path, vllm_settings: dict) -> None:
    said = started(tmp_path, {**vllm_settings, "max_len": 100_000}).communicate(timeout=300)[1].decode()
    assert "Traceback" not in said
    assert "the engine did not start" in said and "max_model_len (100000) is greater than" in said


def started(tmp_path: Path, engine: dict) -> subprocess.Popen[bytes]:
    settings = [f"engine.{name}={json.dumps(value)}" for name, value in engine.items()]
    command = [sys.executable, "-m", "harnessrl", "train", str(QUICKSTART), f"model.path={TINY}", *settings]
    return subprocess.Popen([*command, f"runs_dir={tmp_path}"], stderr=subprocess.PIPE)
