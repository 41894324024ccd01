"""Kill -9 in the middle of a run, of each component and of all at once; then resume."""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from harnessrl.cli.services import YOUNG_SECONDS

ROOT = Path(__file__).parent.parent
TINY = ROOT / "tests" / "assets" / "tiny"
QUICKSTART = ROOT / "examples" / "quickstart" / "config.yaml"
UPDATES = 6

pytestmark = pytest.mark.slow


def start(tmp_path: Path, updates: int = UPDATES) -> subprocess.Popen[bytes]:
    settings = {
        "model.path": TINY,
        "runs_dir": tmp_path,
        "name": "run",
        "train.updates": updates,
        "train.checkpoint_every": 2,
        "collect.groups_in_flight": 8,
        "collect.groups_per_update": 4,
        "collect.group_size": 2,
        "data.eval": "",
        "agent.max_attempts": 10,
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    return subprocess.Popen(
        [sys.executable, "-m", "harnessrl", "train", str(QUICKSTART), *overrides],
        stderr=(tmp_path / "train.log").open("ab"),
    )


def resume(tmp_path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "harnessrl", "train", "--resume", str(tmp_path / "run")],
        stderr=(tmp_path / "train.log").open("ab"),
    )


def kill(tmp_path: Path, who: str, trainer: subprocess.Popen[bytes]) -> None:
    """A service is killed when it is old enough to be started again."""
    if who in ("trainer", "all"):
        trainer.kill()
        trainer.wait()
    for service in ("gateway", "controller"):
        if who in (service, "all"):
            process = running(tmp_path / "run" / f"{service}.json")
            time.sleep(max(0, process.create_time() + YOUNG_SECONDS + 1 - time.time()))
            process.kill()


def running(known: Path) -> psutil.Process:
    """The process that `known` names: of a run that is being resumed, the new one."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess):
            return psutil.Process(json.loads(known.read_text())["pid"])
        time.sleep(0.1)
    raise AssertionError(f"no process runs that {known} names")


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_for(tmp_path: Path, trainer: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < deadline, (tmp_path / "train.log").read_text()[-2000:]
        assert trainer.poll() is None, (tmp_path / "train.log").read_text()[-2000:]
        time.sleep(0.05)


def wait_for_update(tmp_path: Path, trainer: subprocess.Popen[bytes], number: int) -> None:
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(tmp_path, trainer, lambda: any(row["update"] >= number for row in rows(metrics)))


def final_lineage(tmp_path: Path) -> list[dict]:
    """The groups of the updates that made the final weights: of each update, those of the last lineage."""
    groups = rows(tmp_path / "run" / "groups.jsonl")
    last = {row["update"]: row["lineage"] for row in groups}
    return [row for row in groups if row["lineage"] == last[row["update"]]]


def test_a_run_survives_kills_at_random_moments(tmp_path: Path) -> None:
    """HARNESSRL_KILLS of each component and of all at once, in random order."""
    rng, kills = random.Random(1), int(os.environ.get("HARNESSRL_KILLS", "1"))
    victims = ["trainer", "gateway", "controller", "all"] * kills
    rng.shuffle(victims)
    updates = 8 + 6 * len(victims)
    trainer = start(tmp_path, updates)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(tmp_path, trainer, lambda: len(rows(metrics)) >= 2)
    for who in victims:
        time.sleep(rng.uniform(0, 4))
        kill(tmp_path, who, trainer)
        done = len(rows(metrics))
        if who in ("trainer", "all"):
            trainer = resume(tmp_path)
        wait_for(tmp_path, trainer, lambda done=done: len(rows(metrics)) > done)
    assert trainer.wait(900) == 0, (tmp_path / "train.log").read_text()[-3000:]
    assert_each_group_was_trained_once(tmp_path, updates)


def assert_each_group_was_trained_once(tmp_path: Path, updates: int) -> None:
    trained = Counter(row["group_id"] for row in final_lineage(tmp_path))
    assert len(trained) == updates * 4
    assert set(trained.values()) == {1}
    versions = [
        row["policy/version"] for row in rows(tmp_path / "run" / "metrics.jsonl") if "policy/version" in row
    ]
    assert len(set(versions)) == len(versions)
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]


@pytest.mark.parametrize("who", ["trainer", "all"])
def test_a_killed_run_resumes_and_trains_each_group_once(tmp_path: Path, who: str) -> None:
    trainer = start(tmp_path)
    wait_for_update(tmp_path, trainer, 3)
    time.sleep(random.Random(who).random() * 2)
    kill(tmp_path, who, trainer)
    again = resume(tmp_path)
    assert again.wait(180) == 0, (tmp_path / "train.log").read_text()[-3000:]
    assert_each_group_was_trained_once(tmp_path, UPDATES)


@pytest.mark.parametrize("who", ["gateway", "controller"])
def test_a_killed_service_is_started_again_and_the_run_goes_on(tmp_path: Path, who: str) -> None:
    trainer = start(tmp_path, 2 * UPDATES)
    wait_for_update(tmp_path, trainer, 3)
    kill(tmp_path, who, trainer)
    assert trainer.wait(180) == 0, (tmp_path / "train.log").read_text()[-3000:]
    assert f"the {who} has ended" in (tmp_path / "train.log").read_text()
    assert_each_group_was_trained_once(tmp_path, 2 * UPDATES)
