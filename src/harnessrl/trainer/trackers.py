"""Where a run's metrics go besides its own `metrics.jsonl`: trackers, by name in `train.trackers`.

All of them get the names of docs/metrics.md, over the number of updates.
"""

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from harnessrl.config import Config

__all__ = ["Tracker", "check_trackers", "open_trackers"]


class Tracker(Protocol):
    def log(self, update: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in `runs/NAME/tensorboard`."""

    def __init__(self, folder: Path, run_id: str, config: Config):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(folder / "tensorboard")

    def log(self, update: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, update)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of wandb's, whose variables (WANDB_MODE, WANDB_PROJECT, …) say where it goes. A resumed run goes on."""

    def __init__(self, folder: Path, run_id: str, config: Config):
        import wandb

        try:
            self._run = wandb.init(
                id=run_id,
                name=folder.name,
                dir=folder,
                config=config.model_dump(mode="json"),
                resume="allow",
                settings=wandb.Settings(console="off"),
            )
        except wandb.Error as error:
            raise ValueError(f"wandb: {error}; `wandb login`, or set WANDB_MODE=offline") from None
        # Not wandb's own step, which never goes back: a resumed run trains some updates again.
        self._run.define_metric("*", step_metric="update")

    def log(self, update: int, metrics: dict[str, float]) -> None:
        self._run.log({"update": update, **metrics})

    def close(self) -> None:
        self._run.finish()


_TRACKERS: dict[str, Callable[[Path, str, Config], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}


def check_trackers(names: Iterable[str]) -> None:
    """Raises ValueError, with the remedy, where a package is missing; it is named as its extra is."""
    for name in names:
        if find_spec(name) is None:
            raise ValueError(f"train.trackers: {name} is not installed: pip install 'harnessrl[{name}]'")


def open_trackers(config: Config, folder: Path, run_id: str) -> list[Tracker]:
    """Raises ValueError as `check_trackers`, and where a tracker refuses."""
    check_trackers(config.train.trackers)
    return [_TRACKERS[name](folder, run_id, config) for name in config.train.trackers]
