"""The whole loop on the tiny model: gateway, controller and agents as real processes, real learning."""

import json
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from harnessrl.cli.train import run
from harnessrl.config import load_config

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "examples" / "quickstart" / "config.yaml"
TINY = ROOT / "tests" / "assets" / "tiny"
UPDATES = 12


def train(tmp_path: Path, *overrides: str) -> dict:
    settings = [
        f"model.path={TINY}",
        f"runs_dir={tmp_path}",
        "optim.lr=5e-4",
        "engine.max_batch=16",
        *overrides,
    ]
    return run(load_config(QUICKSTART, settings))


def assert_evaluation_stood_in_nobodys_way(folder: Path) -> None:
    """The first training groups were started beside the first evaluation, and nothing beside the last one."""
    with sqlite3.connect(folder / "rollouts.db") as db:
        trained, *_ = db.execute("SELECT min(created_at), max(created_at) FROM rollouts WHERE is_train")
        evaluated = db.execute(
            "SELECT created_at, updated_at FROM rollouts WHERE NOT is_train ORDER BY id"
        ).fetchall()
    held_out = len(evaluated) // 2
    assert trained[0] < max(end for _, end in evaluated[:held_out])
    assert trained[1] < evaluated[held_out][0]


@pytest.mark.parametrize(
    ("in_flight", "updates"),
    [(8, 2), pytest.param(8, UPDATES, marks=pytest.mark.slow), pytest.param(16, UPDATES, marks=pytest.mark.slow)],
    ids=["short", "synchronous", "collocated"],
)
def test_reward_rises_and_the_run_leaves_what_it_says(
    tmp_path: Path, in_flight: int, updates: int, undocumented: Callable[[Iterable[str]], list[str]]
) -> None:
    result = train(tmp_path, f"train.updates={updates}", f"collect.groups_in_flight={in_flight}")
    folder = tmp_path / "quickstart"
    assert json.loads((folder / "result.json").read_text()) == result
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in metrics if "reward/train" in row]
    assert [row["update"] for row in trained] == list(range(1, updates + 1))
    assert not undocumented({name for row in metrics for name in row} - {"update", "time", "lineage"})
    rewards = [row["reward/train"] for row in trained]
    # About 0.02 an update is usual; the slope's standard error is about 0.006.
    assert updates < UPDATES or np.polyfit(range(UPDATES), rewards, 1)[0] > 0
    if in_flight == 8:
        assert all(row["policy/gap"] < 1e-3 for row in trained if row["batch/rows"])
    else:
        assert max(row["staleness/max"] for row in trained) >= 1
    assert_evaluation_stood_in_nobodys_way(folder)
    assert (folder / "reward.png").stat().st_size > 1000
    assert AutoModelForCausalLM.from_pretrained(result["checkpoint"])
