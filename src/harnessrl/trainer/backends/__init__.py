"""A backend runs the forward and the backward pass and hands the weights over; the mathematics is not its own."""

from pathlib import Path
from typing import Protocol

from harnessrl.config import Config
from harnessrl.schemas import Endpoint
from harnessrl.trainer.batch import Update

__all__ = ["LINEAGE", "Backend", "open_backend"]

LINEAGE = 1_000_000
"""A policy version is lineage x this + number of updates, so that a resumed run reuses none."""


class Backend(Protocol):
    version: int
    """Optimizer updates that the current weights have seen."""

    def endpoints(self) -> list[Endpoint]:
        """Where the current weights are served, with `version`; register them after each update."""
        ...

    def update(self, update: Update) -> dict[str, float]:
        """One update: the optimizer steps of `update`, then publish the weights as `version` + 1.

        Blocking. Returns metrics, named as in docs/metrics.md.
        """
        ...

    def stop(self) -> None:
        """Make a running update end soon, by raising InterruptedError in its thread."""
        ...

    def save(self, folder: Path) -> None:
        """Write the weights (Hugging Face format), tokenizer, renderer and optimizer state to `folder`."""
        ...

    def close(self) -> None: ...


def open_backend(config: Config, checkpoint: Path | None = None, lineage: int = 0) -> Backend:
    """The one that `config.backend` names, serving its weights; `checkpoint`: go on from it, as resumption number
    `lineage`."""
    if config.backend == "verl":
        from harnessrl.trainer.backends.verl.backend import VerlBackend

        return VerlBackend(config, checkpoint, lineage)
    from harnessrl.trainer.backends.torch import TorchBackend

    return TorchBackend(config, checkpoint, lineage)
