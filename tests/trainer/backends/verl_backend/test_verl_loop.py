"""The quickstart's task on verl: gateway, controller and agents as real processes, stopped and resumed half-way."""

import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest

if importlib.util.find_spec("verl") is None:
    pytest.skip("needs harnessrl[verl]: make test-verl", allow_module_level=True)

from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.verl
ROOT = Path(__file__).parents[4]
TINY = ROOT / "tests" / "assets" / "tiny"
QUICKSTART = ROOT / "examples" / "quickstart" / "config.yaml"
UPDATES = 14


def train(tmp_path: Path, *arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "harnessrl", "train", *map(str, arguments)]
    return subprocess.Popen(command, stderr=(tmp_path / "train.log").open("ab"))


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_collocated_run_learns_stops_in_order_and_resumes(tmp_path: Path) -> None:
    settings = {
        "backend": "verl",
        "model.path": TINY,
        "runs_dir": tmp_path,
        "optim.lr": 5e-4,
        "train.updates": UPDATES,
        "train.checkpoint_every": 2,
        "collect.groups_in_flight": 12,
        "data.eval": "",
    }
    run = tmp_path / "quickstart"
    trainer = train(tmp_path, QUICKSTART, *(f"{name}={value}" for name, value in settings.items()))
    deadline = time.monotonic() + 400
    while len(rows(run / "metrics.jsonl")) < 5:
        assert time.monotonic() < deadline and trainer.poll() is None, (tmp_path / "train.log").read_text()
        time.sleep(0.1)
    below = psutil.Process(trainer.pid).children(recursive=True)
    assert any("ray" in process.name() for process in below)
    trainer.send_signal(signal.SIGTERM)
    assert trainer.wait(60) == 130
    assert not psutil.wait_procs(below, timeout=30)[1]

    assert train(tmp_path, "--resume", run).wait(400) == 0, (tmp_path / "train.log").read_text()
    last = {row["update"]: row for row in rows(run / "metrics.jsonl")}
    assert sorted(last) == list(range(1, UPDATES + 1))
    # About 0.02 an update is usual; the slope's standard error is about 0.006.
    assert np.polyfit(list(last), [row["reward/train"] for row in last.values()], 1)[0] > 0
    assert all(row["policy/gap_fresh"] < 1e-4 for row in last.values() if "policy/gap_fresh" in row)
    assert max(row["staleness/max"] for row in last.values()) >= 1
    groups = {row["update"]: row["lineage"] for row in rows(run / "groups.jsonl")}
    trained = [row for row in rows(run / "groups.jsonl") if row["lineage"] == groups[row["update"]]]
    assert len(trained) == UPDATES * 8 and set(Counter(row["group_id"] for row in trained).values()) == {1}
    result = json.loads((run / "result.json").read_text())
    assert AutoModelForCausalLM.from_pretrained(result["checkpoint"])
