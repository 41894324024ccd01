"""What `harnessrl train` shows: one line per update; on a terminal also two bars, of the run and of its phase."""

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from harnessrl.cli.sparkline import sparkline
from harnessrl.trainer.rollout import FinishedRollout

__all__ = ["View"]

COLUMNS = (
    ("reward/train", "reward {:.3f}"),
    ("reward/eval", "held-out reward {:.3f}"),
    ("policy/entropy", "entropy {:.2f}"),
    ("policy/gap_fresh", "gap {:.1e}"),
    ("optim/grad_norm", "grad {:.2f}"),
)


class View:
    """Implements the trainer's `Progress`; a context manager."""

    def __init__(self, updates: int, console: Console | None = None):
        self._console = console or Console(stderr=True)
        self._updates = updates
        self._rewards: list[float] = []
        """Of the updates of this process: a resumed run has done others before."""
        self._began: float | None = None
        self._bars = Progress(
            TextColumn("{task.description:<9}"), BarColumn(16), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"), console=self._console, transient=True,
            disable=not self._console.is_terminal,
        )  # fmt: skip
        self._run = self._bars.add_task("updates", total=updates, note="", visible=updates > 0)
        self._phase = self._bars.add_task("start", total=None, note="")

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def phase(self, name: str, rollouts: int) -> None:
        if name == "collect" and self._began is None:
            self._began = time.monotonic()
        self._bars.remove_task(self._phase)  # `reset` would keep the total of a phase that has one
        self._phase = self._bars.add_task(name, total=rollouts or None, note="")

    def rollout(self, rollout: FinishedRollout) -> None:
        self._bars.advance(self._phase)

    def update(self, number: int, metrics: dict[str, float]) -> None:
        if "reward/train" in metrics:
            self._rewards.append(metrics["reward/train"])
            note = f"{sparkline(self._rewards, 16)} {self._rewards[-1]:.2f}  {self._left(number)}"
            self._bars.update(self._run, completed=number, note=note)
        shown = [text.format(metrics[name]) for name, text in COLUMNS if name in metrics]
        if seconds := sum(value for name, value in metrics.items() if name.startswith("time/")):
            shown.append(f"{seconds:.1f} s")
        self._console.print(
            f"update {number:>4}/{self._updates}  " + "  ".join(shown), highlight=False, soft_wrap=True
        )

    def warn(self, message: str) -> None:
        self._console.print(Text.assemble(("warning: ", "yellow"), message), soft_wrap=True)

    def _left(self, number: int) -> str:
        assert self._began is not None
        left = (time.monotonic() - self._began) / len(self._rewards) * (self._updates - number)
        return f"{left:.0f} s left" if left < 100 else f"{left / 60:.0f} min left"
