import numpy as np
import pytest
from made import call, rollout

from harnessrl.trainer.backends import LINEAGE
from harnessrl.trainer.health import Health, broken_row, gap_metrics, staleness_metrics
from harnessrl.trainer.rows import make_rows, trained_tokens
from harnessrl.trainer.trajectory import build_trajectory


def test_gap():
    # Differences 0.5 and -0.5 (the third is not known); k3: (e^.5 - 1.5 + e^-.5 - 0.5) / 2 = 0.127626
    found = gap_metrics(np.array([-1.0, -1.0, -1.0]), np.array([-1.5, -0.5, np.nan]))
    assert found == pytest.approx({"gap_mean": 0.5, "gap_p99": 0.5, "gap_k3": 0.127626}, abs=1e-6)
    assert gap_metrics(np.array([-1.0]), np.array([np.nan])) == {}


def rows():
    sampled = call(0, [1], [2, 3, 4, 5], versions=[(3, 1), (9, 2), (10, 1)])
    return make_rows(build_trajectory(rollout([sampled])))[0]


def test_staleness_is_by_token():
    found = staleness_metrics(rows(), version=10)
    assert found["staleness/tokens_mean"] == (7 + 1 + 1 + 0) / 4 and found["staleness/tokens_max"] == 7
    assert [found[f"staleness/share_{age}"] for age in ("0", "1", "2", "3", "4+")] == [0.25, 0.5, 0, 0, 0.25]


def test_a_resumed_run_counts_updates_not_lineages():
    assert staleness_metrics(rows(), version=2 * LINEAGE + 10)["staleness/tokens_max"] == 7
    assert staleness_metrics([], version=10) == {}


def test_a_broken_row_is_named():
    tokens = trained_tokens(rows())
    assert broken_row(np.array([-1.0, -2.0, -1.0, -1.0]), tokens, rows()) is None
    told = broken_row(np.array([-1.0, np.nan, -np.inf, -1.0]), tokens, rows())
    assert told is not None and "token 2 of 5 in a row of rollout r (call 0), and of 1 further" in told


@pytest.mark.parametrize(
    ("usual", "sick", "told"),
    [
        ({"policy/gap_fresh": 0.01}, {"policy/gap_fresh": 0.05}, "recomputed, differ by 0.05"),
        ({"policy/entropy": 1.0}, {"policy/entropy": 0.05}, "entropy fell from 1 to 0.05"),
        ({"optim/grad_norm": 0.5}, {"optim/grad_norm": 6.0}, "norm before clipping is 6"),
        ({"optim/grad_norm": 0.5}, {"optim/grad_norm": float("nan")}, "not finite"),
        ({"batch/calls_truncated": 0.1}, {"batch/calls_truncated": 0.6}, "60% of the calls were cut"),
    ],
)
def test_an_alarm_rings_when_something_jumps(usual, sick, told):
    health = Health()
    for _ in range(12):
        assert health.alarms(usual) == []
    (alarm,) = health.alarms(sick)
    assert told in alarm
    assert health.alarms(sick) == []
    assert health.alarms(usual) == []


def test_no_spread_rings_after_five_updates_in_a_row():
    health = Health()
    even = {"batch/groups": 2, "batch/groups_without_spread": 2}
    mixed = {"batch/groups": 2, "batch/groups_without_spread": 1}
    rung = [bool(health.alarms(metrics)) for metrics in [even] * 4 + [mixed] + [even] * 5 + [mixed]]
    assert rung == [False] * 9 + [True] + [False]


def test_a_policy_that_got_better_may_be_sure():
    health = Health()
    assert health.alarms({"policy/entropy": 1.0, "reward/train": 0.3}) == []
    assert health.alarms({"policy/entropy": 0.05, "reward/train": 0.9}) == []
    assert len(health.alarms({"policy/entropy": 0.05, "reward/train": 0.3})) == 1


def test_missing_metrics_ring_nothing():
    assert Health().alarms({}) == []
