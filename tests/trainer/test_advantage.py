import numpy as np
import pytest

from harnessrl.trainer.advantage import group_advantages


def group(*returns):
    return [np.atleast_1d(np.array(r, dtype=np.float64)) for r in returns]


def flat(advantages):
    return np.concatenate(advantages).tolist()


def test_grpo():
    # mean 0.5; deviations -0.5 0.5 0.5 -0.5; variance 4·0.25 / 3 = 1/3; std 0.57735; 0.5 / 0.57735 = 0.866025
    assert flat(group_advantages(group(0, 1, 1, 0), "grpo")) == pytest.approx(
        [-0.866025, 0.866025, 0.866025, -0.866025], abs=2e-6
    )


def test_dr_grpo():
    assert flat(group_advantages(group(0, 1, 1, 0), "dr_grpo")) == [-0.5, 0.5, 0.5, -0.5]


def test_rloo():
    # Of rewards 0, 0.5, 1 the others' means are 0.75, 0.5, 0.25.
    assert flat(group_advantages(group(0, 0.5, 1), "rloo")) == [-0.75, 0, 0.75]


def test_reinforce():
    assert flat(group_advantages(group(0, 0.5, 1), "reinforce")) == [0, 0.5, 1]


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_a_rollout_counts_once_however_many_calls_it_made(estimator):
    one = group_advantages(group(0, 1), estimator)
    many = group_advantages(group([0] * 50, [1, 1]), estimator)
    assert many[0].tolist() == pytest.approx([one[0][0]] * 50)
    assert many[1].tolist() == pytest.approx([one[1][0]] * 2)


def test_returns_by_call_are_compared_with_the_groups_mean():
    # Rollout 1: returns 3 and 1, mean 2; rollout 2: 0. Mean of the group 1. Variance ((4 + 0)/2 + 1) / 1 = 3.
    assert flat(group_advantages(group([3, 1], 0), "dr_grpo")) == [2, 0, -1]
    assert flat(group_advantages(group([3, 1], 0), "grpo")) == pytest.approx([2 / 3**0.5, 0, -1 / 3**0.5], abs=2e-6)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_without_spread_there_is_no_advantage(estimator):
    assert flat(group_advantages(group(0.1 + 0.2, 0.3, 0.3), estimator)) == [0, 0, 0]
    assert flat(group_advantages(group(1), estimator)) == [0]
