import json
from itertools import islice
from pathlib import Path

import pytest

from harnessrl.trainer.tasks import TaskDealer, read_tasks


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1}\n{"a": \n', "line 2: not JSON"),
        ('{"a": 1}\n\n[1]\n', "line 3: a task is a JSON object, this is list"),
        ("\n", "no tasks"),
    ],
)
def test_a_broken_task_file_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "tasks.jsonl").write_text(text)
    with pytest.raises(ValueError, match=said):
        read_tasks(tmp_path / "tasks.jsonl")


@pytest.mark.parametrize("character", ["\u2028", "\x85", "é你🎉"])
def test_any_unicode_may_stand_in_a_task(tmp_path: Path, character: str) -> None:
    task = {"a": f"b{character}c"}
    (tmp_path / "tasks.jsonl").write_text(
        f"\ufeff{json.dumps(task, ensure_ascii=False)}\r\n\n{{}}", encoding="utf-8"
    )
    assert read_tasks(tmp_path / "tasks.jsonl") == [task, {}]


def test_a_missing_task_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tasks\.jsonl"):
        read_tasks(tmp_path / "tasks.jsonl")


def test_each_epoch_deals_each_task_once_in_another_order() -> None:
    tasks = [{"i": i} for i in range(20)]
    dealt = [task["i"] for task in islice(TaskDealer(tasks, seed=1), 40)]
    assert sorted(dealt[:20]) == sorted(dealt[20:]) == list(range(20))
    assert dealt[:20] != dealt[20:]


def test_dealing_goes_on_from_a_position() -> None:
    tasks = [{"i": i} for i in range(7)]
    whole = list(islice(TaskDealer(tasks, seed=3), 30))
    assert list(islice(TaskDealer(tasks, seed=3, position=11), 19)) == whole[11:]
