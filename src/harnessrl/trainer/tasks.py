"""Tasks: read from JSONL, Parquet, CSV or a folder of `datasets`, dealt in a shuffled order that a seed fixes."""

import csv
import json
import random
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harnessrl.schemas import Json

__all__ = ["TaskDealer", "read_tasks"]


def read_tasks(path: Path) -> list[Json]:
    """One task a line or row; ValueError names the file, and the line that is wrong.

    The name's ending says the format: `.parquet`, `.csv` (with a header; all values are text), a folder that
    `datasets` saved, or else JSONL.
    """
    reader = _read_saved if path.is_dir() else {".parquet": _read_parquet, ".csv": _read_csv}.get(path.suffix)
    try:
        tasks = [_checked(task, f"{path}, {where}") for where, task in (reader or _read_jsonl)(path)]
    except OSError as error:
        raise ValueError(f"cannot read the tasks {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"the tasks {path} are not UTF-8 text") from None
    if not tasks:
        raise ValueError(f"there are no tasks in {path}")
    return tasks


def _read_jsonl(path: Path) -> Iterable[tuple[str, Any]]:
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield f"line {number}", json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno})") from None


def _read_csv(path: Path) -> Iterable[tuple[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        for row in rows:
            if None in row or None in row.values():
                raise ValueError(f"{path}, line {rows.line_num}: not as many fields as the header has")
            yield f"line {rows.line_num}", row


def _read_parquet(path: Path) -> Iterable[tuple[str, Any]]:
    _need("pyarrow", path)
    from pyarrow import ArrowInvalid, parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except ArrowInvalid as error:
        raise ValueError(f"{path} is no Parquet file: {error}") from None
    return ((f"row {number}", row) for number, row in enumerate(rows, 1))


def _read_saved(folder: Path) -> Iterable[tuple[str, Any]]:
    _need("datasets", folder)
    from datasets import DatasetDict, load_from_disk

    try:
        saved = load_from_disk(str(folder))
    except FileNotFoundError:
        raise ValueError(f"the folder {folder} holds no dataset that `Dataset.save_to_disk` wrote") from None
    if isinstance(saved, DatasetDict):
        splits = ", ".join(str(folder / str(name)) for name in saved)
        raise ValueError(f"the folder {folder} holds several datasets; name one of them: {splits}")
    return ((f"row {number}", row) for number, row in enumerate(saved.to_list(), 1))


def _need(package: str, path: Path) -> None:
    if find_spec(package) is None:
        raise ValueError(f"reading {path} needs {package}: pip install 'harnessrl[data]'")


def _checked(task: Any, where: str) -> Json:
    """A task travels as JSON, so that it is an object of what JSON knows."""
    if not isinstance(task, dict):
        raise ValueError(f"{where}: a task is a JSON object, this is {type(task).__name__}")
    for name, value in task.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise ValueError(f"{where}: {name!r} is {value!r}, which JSON has no word for") from None
    return task


class TaskDealer:
    """Deals tasks for ever, in a fresh shuffle each epoch; `position` is all there is to resume from."""

    def __init__(self, tasks: list[Json], seed: int, position: int = 0):
        self._tasks, self._seed, self.position = tasks, seed, position
        self._epoch, self._order = -1, list[int]()

    def __iter__(self) -> Iterator[Json]:
        return self

    def __next__(self) -> Json:
        epoch, index = divmod(self.position, len(self._tasks))
        if epoch != self._epoch:
            everyone = range(len(self._tasks))
            self._epoch, self._order = epoch, random.Random(f"{self._seed}/{epoch}").sample(everyone, len(everyone))
        self.position += 1
        return self._tasks[self._order[index]]
