"""This machine: interpreter, packages, devices, room."""

import shutil
import socket
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from harnessrl.config import Config

GB = 1e9
_PYPROJECT = Path(__file__).parents[4] / "pyproject.toml"


def python(config: Config) -> str:
    """An older one than 3.11 does not get so far: pip refuses it."""
    return f"{sys.version.split()[0]}, {sys.executable}"


def packages(config: Config) -> str:
    """Those of the extras that the configuration needs, in the versions that we take."""
    extras = needed_extras(config)
    wrong = []
    count = 0
    for requirement in requirements(extras):
        count += 1
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, we take {requirement.specifier}")
    named = f"harnessrl[{','.join(extras)}]"
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}: pip install '{named}'")
    return f"{count} of {named}"


def needed_extras(config: Config) -> list[str]:
    extras = ["train", *config.train.trackers]
    if config.agent.k8s:
        extras.append("k8s")
    if config.backend == "verl":
        extras.append("verl")
    return extras


def requirements(extras: list[str]) -> Iterator[Requirement]:
    """Of the installed package, or of the sources that this runs from."""
    try:
        asked = [Requirement(text) for text in metadata.requires("harnessrl") or []]
    except metadata.PackageNotFoundError:
        project = tomllib.loads(_PYPROJECT.read_text())["project"]
        groups = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
        asked = [Requirement(text) for group in groups for text in group]
    for one in asked:
        marker = one.marker
        wanted = marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))
        if wanted and one.name != "harnessrl":
            yield one


def gpus(config: Config) -> str:
    from harnessrl.engine import devices

    found, wanted, built = devices.gpus(), wanted_gpus(config), devices.cuda_version() or "none"
    if not found and config.model.device.startswith("cuda"):
        raise ValueError(
            f"model.device is {config.model.device}, but torch (built for CUDA {built}) finds no GPU: see "
            "nvidia-smi, or install torch with CUDA"
        )
    if found and wanted > len(found):
        raise ValueError(f"verl wants {wanted} GPUs here, there are {len(found)}: set verl.trainer.n_gpus_per_node")
    if not found:
        return "none: everything runs on the CPU"
    return f"{len(found)} × {', '.join(sorted(set(found)))}, CUDA {built}"


def wanted_gpus(config: Config) -> int:
    if config.backend != "verl":
        return 1
    trainer = config.verl.get("trainer")
    nested = trainer.get("n_gpus_per_node") if isinstance(trainer, dict) else None
    return nested or config.verl.get("trainer.n_gpus_per_node") or 1


def nccl(config: Config) -> str | None:
    """Where several GPUs work together."""
    if wanted_gpus(config) < 2:
        return None
    from harnessrl.engine import devices

    if not devices.gpus():
        return None
    if (version := devices.nccl_version()) is None:
        raise ValueError("this torch has no NCCL: install a build with CUDA")
    apart = devices.without_peer()
    return version + (f"; GPUs {apart} reach GPU 0 through the host only" if apart else "")


def disk(config: Config) -> str:
    from harnessrl.trainer.sizes import sizes

    folder = Path(config.runs_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    needed = 1 * GB
    if known := sizes(config):
        # Weights and AdamW's two moments; the last ones, the best one, and the one being written.
        needed += (config.train.keep_last + 2) * 3 * known.weights
    if free < needed:
        raise ValueError(
            f"{free / GB:.1f} GB free in {folder}, checkpoints and rollouts may take {needed / GB:.1f} GB: make "
            "room, or set runs_dir or a smaller train.keep_last"
        )
    return f"{free / GB:.0f} GB free in {folder}, checkpoints and rollouts take about {needed / GB:.1f} GB"


def memory(config: Config) -> str | None:
    from harnessrl.engine import devices
    from harnessrl.trainer.sizes import sizes

    known = sizes(config)
    if known is None:
        return None
    import psutil

    room, where = float(psutil.virtual_memory().available), "memory"
    if devices.gpus() and config.model.device != "cpu":
        room, where = float(devices.free_bytes()), "GPU memory"
    shards = wanted_gpus(config)
    needed = (known.weights + known.gradients + known.optimizer + known.reference) / shards
    needed += known.cache + known.activations
    each = ", ".join(f"{name} {size / GB:.1f}" for name, size in asdict(known).items() if size)
    parts = f"about {needed / GB:.1f} GB{f' on each of {shards} GPUs' if shards > 1 else ''} ({each})"
    if needed > room:
        raise ValueError(
            f"{parts}, but {room / GB:.1f} GB of {where} are free: lower engine.max_batch, engine.max_len or "
            "train.micro_batch_tokens, set model.lora_rank, or take a smaller model"
        )
    return f"{parts}, {room / GB:.0f} GB of {where} free"


def ports(config: Config) -> str | None:
    if config.gateway.url or not config.gateway.port:
        return None
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", config.gateway.port))
        except OSError:
            raise ValueError(
                f"gateway.port {config.gateway.port} is taken: end what uses it, or set gateway.port=0"
            ) from None
    return f"{config.gateway.port} is free"
