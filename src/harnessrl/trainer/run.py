"""A run's folder `runs/NAME`: configuration, metrics, checkpoints, result, reward curve."""

import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Self, TextIO

from harnessrl.config import Config, load_config, to_yaml
from harnessrl.schemas import Json
from harnessrl.trainer.collect import CollectedGroup
from harnessrl.trainer.trackers import open_trackers

__all__ = ["Run", "is_training", "read_metrics", "series"]

METRICS = "metrics.jsonl"


class Run:
    """Use `Run.create` or `Run.resume`."""

    def __init__(self, folder: Path, config: Config, run_id: str, lineage: int):
        self._lock = _locked(folder)
        self.folder, self.config = folder, config
        self.id = run_id
        """Names this run's rollouts at the gateway, which other runs may share."""
        self.lineage = lineage
        """How often the run was resumed; part of every policy version, so that a rollback reuses none."""
        (folder / "run.json").write_text(json.dumps({"id": run_id, "lineage": lineage}) + "\n")
        self.history = read_metrics(folder)
        self._metrics = (folder / METRICS).open("a", buffering=1)
        self._trackers = open_trackers(config, folder, run_id)

    @classmethod
    def create(cls, config: Config) -> Self:
        folder = _fresh(Path(config.runs_dir), config.name)
        (folder / "config.yaml").write_text(to_yaml(config))
        return cls(folder, config, f"{config.name}-{secrets.token_hex(4)}", 0)

    @classmethod
    def resume(cls, folder: Path) -> Self:
        """Go on with an earlier run; ValueError if there is none, or no checkpoint of it."""
        try:
            known = json.loads((folder / "run.json").read_text())
        except FileNotFoundError:
            raise ValueError(f"{folder} is no run that could be resumed: it holds no run.json") from None
        run = cls(folder, load_config(folder / "config.yaml"), known["id"], known["lineage"] + 1)
        if run.checkpoint is None:
            raise ValueError(f"{folder} holds no whole checkpoint to resume from; set train.checkpoint_every")
        return run

    @property
    def checkpoint(self) -> Path | None:
        """The newest whole one."""
        return max((self.folder / "checkpoints").glob("update-*"), default=None)

    def log(self, update: int, metrics: dict[str, float]) -> None:
        row = {"update": update, "time": round(time.time(), 3), "lineage": self.lineage, **metrics}
        self.history.append(row)
        self._metrics.write(json.dumps(row) + "\n")
        for tracker in self._trackers:
            tracker.log(update, metrics)

    def log_groups(self, update: int, groups: Sequence[CollectedGroup]) -> None:
        """What an update was made of, in `groups.jsonl`."""
        with (self.folder / "groups.jsonl").open("a") as file:
            for group in groups:
                row = {
                    "update": update,
                    "lineage": self.lineage,
                    "group_id": group.group_id,
                    "started": group.started,
                    "rewards": [rollout.reward for rollout in group.rollouts],
                }
                file.write(json.dumps(row) + "\n")

    def save_checkpoint(self, update: int, save: Callable[[Path], None], best: bool) -> Path:
        """Write a checkpoint whole or not at all; raises OSError (a full disk, say) with nothing half there.

        `best`: keep it, as `checkpoints/best`, until a better one comes.
        """
        final = self.folder / "checkpoints" / f"update-{update:06d}"
        partial = final.with_name(f".{final.name}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            save(partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        if best:
            link = final.with_name(".best")
            link.unlink(missing_ok=True)
            link.symlink_to(final.name)
            os.replace(link, final.with_name("best"))
        kept = final.with_name("best").resolve()
        for old in sorted(final.parent.glob("update-*"))[: -self.config.train.keep_last]:
            if old.resolve() != kept:
                shutil.rmtree(old)
        return final

    def finish(self, result: Json) -> None:
        self._metrics.close()
        for tracker in self._trackers:
            tracker.close()
        self._lock.close()
        (self.folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")
        self._draw()

    def _draw(self) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7, 4))
        for name, style in (("reward/train", "-"), ("reward/eval", "o--")):
            if points := series(self.history, name):
                axes.plot(list(points), list(points.values()), style, label=name.removeprefix("reward/"))
        axes.set(xlabel="update", ylabel="mean reward", title=self.folder.name)
        axes.grid(alpha=0.3)
        if axes.has_data():
            axes.legend()
        figure.tight_layout()
        figure.savefig(self.folder / "reward.png", dpi=120)
        pyplot.close(figure)


def _fresh(runs: Path, name: str) -> Path:
    """`runs/name`, or the first free `runs/name-N`."""
    for number in range(1, 10_000):
        folder = runs / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise ValueError(f"runs_dir: cannot make the folder {folder} ({error.strerror})") from None
    raise ValueError(f"{runs} holds too many runs named {name}; remove some or give another name=…")


def _locked(folder: Path) -> TextIO:
    """A file whose lock lasts as long as this process; ValueError if another one trains in `folder`."""
    lock = (folder / "run.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ValueError(f"{folder} is being trained by another process: end that one first") from None
    return lock


def is_training(folder: Path) -> bool:
    """Whether a process trains in `folder`."""
    try:
        _locked(folder).close()
    except ValueError:
        return True
    return False


def read_metrics(folder: Path) -> list[Json]:
    """The rows of a run's `metrics.jsonl`, without a last line that a crash cut short."""
    path, rows = folder / METRICS, []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def series(rows: Iterable[Json], name: str) -> dict[int, float]:
    """A metric by number of updates; of an update that a resumption trained again, the last."""
    return {row["update"]: row[name] for row in rows if name in row}
