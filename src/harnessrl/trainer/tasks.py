"""Tasks: read from JSONL, dealt in a shuffled order that a seed fixes."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from harnessrl.schemas import Json

__all__ = ["TaskDealer", "read_tasks"]


def read_tasks(path: Path) -> list[Json]:
    """One JSON object a line; ValueError names the file and the line that is not."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ValueError(f"cannot read the tasks {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"the tasks {path} are not UTF-8 text") from None
    tasks: list[Json] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            task = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno})") from None
        if not isinstance(task, dict):
            raise ValueError(f"{path}, line {number}: a task is a JSON object, this is {type(task).__name__}")
        tasks.append(task)
    if not tasks:
        raise ValueError(f"there are no tasks in {path}")
    return tasks


class TaskDealer:
    """Deals tasks for ever, in a fresh shuffle each epoch; `position` is all there is to resume from."""

    def __init__(self, tasks: list[Json], seed: int, position: int = 0):
        self._tasks, self._seed, self.position = tasks, seed, position

    def __iter__(self) -> Iterator[Json]:
        return self

    def __next__(self) -> Json:
        epoch, index = divmod(self.position, len(self._tasks))
        order = random.Random(f"{self._seed}/{epoch}").sample(range(len(self._tasks)), len(self._tasks))
        self.position += 1
        return self._tasks[order[index]]
