"""What `runs ls` and `runs compare` read of runs' folders; a crashed and a resumed run among them."""

import json
from pathlib import Path

import pytest

from harnessrl.cli.runs import compare, ls, read_run
from harnessrl.cli.sparkline import sparkline
from harnessrl.config import load_config
from harnessrl.trainer.run import Run


def make_run(folder: Path, name: str, *overrides: str, evaluated: bool = True, finished: bool = True) -> Path:
    run = Run.create(load_config(None, [f"runs_dir={folder}", f"name={name}", "train.updates=2", *overrides]))
    if evaluated:
        run.log(0, {"reward/eval": 0.25})
    for update, reward in ((1, 0.5), (2, 0.1), (2, 0.75)):  # update 2 was trained again after a resumption
        run.log(update, {"reward/train": reward})
    if evaluated:
        run.log(2, {"reward/eval": 0.875})
    run.finish({"seconds_total": 12.5})
    if not finished:
        (run.folder / "result.json").unlink()
    return run.folder


def test_ls_tells_what_came_of_each_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, "one")
    with (make_run(tmp_path, "crashed", evaluated=False, finished=False) / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"update": 3, "rew')
    ls(tmp_path, as_json=True)
    one, crashed = json.loads(capsys.readouterr().out)
    assert (one["state"], one["updates"], one["reward_before"], one["reward_after"]) == ("finished", 2, 0.25, 0.875)
    assert (one["rewards"], one["seconds"]) == ([0.5, 0.75], 12.5)
    assert (crashed["state"], crashed["reward_before"], crashed["reward_after"]) == ("stopped", 0.5, 0.75)
    ls(tmp_path)
    assert "0.250 → 0.875  ▁█" in capsys.readouterr().out


def test_a_run_in_training_is_said_to_be(tmp_path: Path) -> None:
    run = Run.create(load_config(None, [f"runs_dir={tmp_path}"]))
    assert read_run(run.folder).state == "training"
    run.finish({})
    assert read_run(run.folder).state == "finished"


def test_compare_shows_the_settings_that_differ_and_no_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [
        make_run(tmp_path, "a", "optim.lr=1e-5", "gateway.key=secret-a"),
        make_run(tmp_path, "b", "optim.lr=2e-5", "gateway.key=secret-b", "seed=1"),
    ]
    compare(folders, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["differences"] == {"seed": [0, 1], "optim.lr": [1e-5, 2e-5]}
    compare(folders)
    shown = capsys.readouterr().out
    assert "0.250 → 0.875" in shown and "2e-05" in shown and "secret" not in shown


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no run"):
        read_run(tmp_path)


def test_a_sparkline_is_no_wider_than_asked_and_keeps_the_shape() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline(list(range(100)), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.5, 0.5]) == "▁▁" and sparkline([]) == ""
