"""What `harnessrl train` shows: a progress bar and one line per update; off a terminal, plain lines only."""

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from harnessrl.trainer.rollout import FinishedRollout

__all__ = ["View"]

COLUMNS = (
    ("reward/train", "reward {:.3f}"),
    ("reward/eval", "held-out reward {:.3f}"),
    ("policy/entropy", "entropy {:.2f}"),
    ("policy/gap_fresh", "gap {:.1e}"),
    ("optim/grad_norm", "grad {:.2f}"),
    ("time/collect", "collect {:.1f} s"),
    ("time/update", "update {:.1f} s"),
)


class View:
    """Implements the trainer's `Progress`; a context manager."""

    def __init__(self, updates: int, console: Console | None = None):
        self._console = console or Console(stderr=True)
        self._updates, self._done, self._began = updates, 0, time.monotonic()
        self._seen = 0
        """Updates of this process: a resumed run has done others before."""
        self._bar = Progress(
            TextColumn("{task.description:<9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"), console=self._console, transient=True,
            disable=not self._console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("start", total=None, note="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def phase(self, name: str, rollouts: int) -> None:
        self._bar.reset(self._task, description=name, total=rollouts or None, note=self._eta())

    def rollout(self, rollout: FinishedRollout) -> None:
        self._bar.advance(self._task)

    def update(self, number: int, metrics: dict[str, float]) -> None:
        if "reward/train" in metrics:
            self._done, self._seen = number, self._seen + 1
        shown = [text.format(metrics[name]) for name, text in COLUMNS if name in metrics]
        self._console.print(
            f"update {number:>4}/{self._updates}  " + "  ".join(shown), highlight=False, soft_wrap=True
        )

    def warn(self, message: str) -> None:
        self._console.print(Text.assemble(("warning: ", "yellow"), message), soft_wrap=True)

    def _eta(self) -> str:
        if not self._seen:
            return ""
        left = (time.monotonic() - self._began) / self._seen * (self._updates - self._done)
        return f"about {left / 60:.0f} min left"
