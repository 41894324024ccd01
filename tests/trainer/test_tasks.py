import json
from datetime import datetime
from itertools import islice
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from harnessrl.trainer import tasks
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


TASKS = [{"question": "1+1?", "answer": 2}, {"question": 'é, "你"\n?', "answer": 3}]


def test_the_same_tasks_from_any_format(tmp_path: Path) -> None:
    Dataset.from_list(TASKS).to_parquet(tmp_path / "tasks.parquet")
    Dataset.from_list(TASKS).save_to_disk(tmp_path / "saved")
    Dataset.from_list(TASKS).to_csv(tmp_path / "tasks.csv")
    assert read_tasks(tmp_path / "tasks.parquet") == read_tasks(tmp_path / "saved") == TASKS
    assert read_tasks(tmp_path / "tasks.csv") == [{**task, "answer": str(task["answer"])} for task in TASKS]


def test_what_is_no_dataset_is_said_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "no.parquet").write_text("no")
    (tmp_path / "ragged.csv").write_text("a,b\n1,2\n1\n")
    (tmp_path / "folder").mkdir()
    one = Dataset.from_list(TASKS)
    DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "splits")
    Dataset.from_list([{"when": datetime(2026, 1, 1)}]).to_parquet(tmp_path / "dates.parquet")
    for name, said in (
        ("no.parquet", "is no Parquet file"),
        ("ragged.csv", "line 3: not as many fields"),
        ("folder", "save_to_disk"),
        ("splits", "name one of them: .*splits/train"),
        ("dates.parquet", "row 1: 'when' is datetime"),
    ):
        with pytest.raises(ValueError, match=said):
            read_tasks(tmp_path / name)


def test_a_format_whose_package_is_missing_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "find_spec", lambda _: None)
    for name in ("tasks.parquet", "folder"):
        (tmp_path / "folder").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match=r"pip install 'harnessrl\[data\]'"):
            read_tasks(tmp_path / name)


def test_a_missing_task_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tasks\.jsonl"):
        read_tasks(tmp_path / "tasks.jsonl")


def test_each_epoch_deals_each_task_once_in_another_order() -> None:
    twenty = [{"i": i} for i in range(20)]
    dealt = [task["i"] for task in islice(TaskDealer(twenty, seed=1), 40)]
    assert sorted(dealt[:20]) == sorted(dealt[20:]) == list(range(20))
    assert dealt[:20] != dealt[20:]


def test_dealing_goes_on_from_a_position() -> None:
    seven = [{"i": i} for i in range(7)]
    whole = list(islice(TaskDealer(seven, seed=3), 30))
    assert list(islice(TaskDealer(seven, seed=3, position=11), 19)) == whole[11:]
