"""Trackers, the real ones: what they were given is in their files."""

import json
from pathlib import Path

import pytest

from harnessrl.config import Config, load_config
from harnessrl.trainer import trackers
from harnessrl.trainer.run import Run

METRICS = {"reward/train": 0.25, "policy/gap": 1e-7}


def run_with(folder: Path, *names: str) -> Run:
    run = Run.create(Config.model_validate({"runs_dir": str(folder), "train": {"trackers": names}}))
    run.log(1, METRICS)
    run.log(2, METRICS)
    run.finish({})
    return run


def test_metrics_are_in_the_runs_folder_whatever_the_trackers(tmp_path: Path) -> None:
    run = run_with(tmp_path)
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == [1, 2] and METRICS.items() <= lines[0].items()
    assert not (run.folder / "tensorboard").exists() and not (run.folder / "wandb").exists()


def test_tensorboard_reads_them_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = run_with(tmp_path, "tensorboard")
    events = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == METRICS.keys()
    assert [(event.step, event.value) for event in events.Scalars("reward/train")] == [(1, 0.25), (2, 0.25)]


def test_wandb_offline_keeps_them_for_a_later_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = run_with(tmp_path, "wandb")
    (kept,) = run.folder.glob("wandb/offline-run-*/*.wandb")
    assert kept.name == f"run-{run.id}.wandb"
    assert all(name.encode() in kept.read_bytes() for name in [*METRICS, "0.25"])


def test_a_tracker_that_is_not_installed_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"pip install 'harnessrl\[wandb\]'"):
        trackers.check_trackers(["wandb"])
    with pytest.raises(ValueError, match="'tensorboard' or 'wandb'"):
        load_config(None, ["train.trackers=[mlflow]"])
