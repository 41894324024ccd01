"""The GPUs of this machine, as torch sees them."""

import torch

__all__ = ["cuda_version", "free_bytes", "gpus", "nccl_version", "without_peer"]


def gpus() -> list[str]:
    """Their names."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_name(number) for number in range(count)]


def cuda_version() -> str | None:
    """What this torch was built with; None: for the CPU."""
    return torch.version.cuda


def free_bytes() -> int:
    """Of the first GPU."""
    return torch.cuda.mem_get_info(0)[0]


def nccl_version() -> str | None:
    if not torch.distributed.is_nccl_available():
        return None
    from torch.cuda import nccl

    return ".".join(map(str, nccl.version()))


def without_peer() -> list[int]:
    """GPUs that reach the first one through the host only."""
    return [n for n in range(1, torch.cuda.device_count()) if not torch.cuda.can_device_access_peer(0, n)]
