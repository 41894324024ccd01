"""Kill -9 in the middle of a run, of each component and of all at once; then resume."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

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
    if who in ("trainer", "all"):
        trainer.kill()
        trainer.wait()
    for service in ("gateway", "controller"):
        if who in (service, "all"):
            pid = json.loads((tmp_path / "run" / f"{service}.json").read_text())["pid"]
            os.kill(pid, signal.SIGKILL)


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_for_update(tmp_path: Path, trainer: subprocess.Popen[bytes], number: int) -> None:
    deadline = time.monotonic() + 120
    while not any(row["update"] >= number for row in rows(tmp_path / "run" / "metrics.jsonl")):
        assert time.monotonic() < deadline, (tmp_path / "train.log").read_text()[-2000:]
        assert trainer.poll() is None, (tmp_path / "train.log").read_text()[-2000:]
        time.sleep(0.05)


def final_lineage(tmp_path: Path) -> list[dict]:
    """The groups of the updates that made the final weights: of each update, those of the last lineage."""
    groups = rows(tmp_path / "run" / "groups.jsonl")
    last = {row["update"]: row["lineage"] for row in groups}
    return [row for row in groups if row["lineage"] == last[row["update"]]]


def test_a_run_survives_kills_at_random_moments(tmp_path: Path) -> None:
    """HARNESSRL_KILLS of them, of one component or of all, each followed by a resumption."""
    rng, kills = random.Random(1), int(os.environ.get("HARNESSRL_KILLS", "3"))
    updates = 8 + 8 * kills
    trainer = start(tmp_path, updates)
    wait_for_update(tmp_path, trainer, 2)
    for _ in range(kills):
        time.sleep(rng.uniform(0, 4))
        assert trainer.poll() is None, "the run ended before the last kill"
        kill(tmp_path, rng.choice(["trainer", "gateway", "controller", "all"]), trainer)
        trainer.kill()
        trainer.wait()
        trainer = resume(tmp_path)
        time.sleep(rng.uniform(6, 12))
    assert trainer.wait(240) == 0, (tmp_path / "train.log").read_text()[-3000:]
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


@pytest.mark.parametrize("who", ["trainer", "gateway", "controller", "all"])
def test_a_killed_run_resumes_and_trains_each_group_once(tmp_path: Path, who: str) -> None:
    trainer = start(tmp_path)
    wait_for_update(tmp_path, trainer, 3)
    time.sleep(random.Random(who).random() * 2)
    kill(tmp_path, who, trainer)
    if who != "trainer" and who != "all":
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    again = resume(tmp_path)
    assert again.wait(180) == 0, (tmp_path / "train.log").read_text()[-3000:]
    assert_each_group_was_trained_once(tmp_path, UPDATES)
