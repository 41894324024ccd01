import numpy as np
import pytest
import torch
from made import call, rollout

from harnessrl.trainer.algorithm import AlgorithmConfig
from harnessrl.trainer.batch import Group, build_update
from harnessrl.trainer.critic import critic_advantages, gae
from harnessrl.trainer.loss import value_loss


def test_gae_by_hand():
    # values 1 2 3, reward 4 at the end, gamma = lambda = 1/2 (so gamma·lambda = 1/4)
    # δ2 = 4 - 3 = 1; δ1 = 0.5·3 - 2 = -0.5; δ0 = 0.5·2 - 1 = 0
    # A2 = 1; A1 = -0.5 + 0.25·1 = -0.25; A0 = 0 + 0.25·-0.25 = -0.0625
    advantages = gae(np.array([0, 0, 4.0]), np.array([1, 2, 3.0]), 0.5, 0.5)
    assert advantages.tolist() == [-0.0625, -0.25, 1]


def test_lambda_1_is_the_return_less_the_value():
    rng = np.random.default_rng(0)
    rewards, values = rng.random(20), rng.random(20)
    np.testing.assert_allclose(gae(rewards, values, 1.0, 1.0), rewards[::-1].cumsum()[::-1] - values)


CONFIG = AlgorithmConfig(advantage="gae")
PARTS = [{"value": 0.5, "call_id": "c0"}, {"value": 0.25, "call_id": "c2"}]


def rows_of(calls, config=CONFIG, **limits):
    made = rollout(calls, 1.0, events=PARTS)
    return build_update([Group("g", [made])], config, seed=0, **limits).rows


def test_a_rollout_runs_on_from_call_to_call_across_rows():
    # Two agents take turns: row 1 holds c0 and c2, row 2 holds c1. In the order of calls: c0 | c1 | c2, values 0:
    # with gamma = lambda = 1 the advantage is what is still to come: c0 0.5 + 0.25 + 1, c1 1.25, c2 1.25.
    rows = rows_of([call(0, [1], [2, 2]), call(1, [9], [3]), call(2, [1, 2, 2, 4], [5])])
    assert [row.calls_T[row.mask_T].tolist() for row in rows] == [[1], [0, 0, 2]]
    assert [row.rewards_T[row.mask_T].tolist() for row in rows] == [[0], [0, 0.5, 1.25]]
    returns = critic_advantages(rows, [np.zeros(1), np.zeros(3)], 1.0, 1.0)
    assert rows[0].advantages_T[rows[0].mask_T].tolist() == [1.25]
    assert rows[1].advantages_T[rows[1].mask_T].tolist() == [1.75, 1.75, 1.25]
    assert [r.tolist() for r in returns] == [[1.25], [1.75, 1.75, 1.25]]


def test_what_dropped_calls_earned_comes_with_the_call_before():
    (row,) = rows_of([call(0, [1], [2, 2]), call(2, [1, 2, 2, 4], [5] * 20)], max_tokens=10)
    assert row.rewards_T.tolist() == [0, 0, 0.5 + 0.25 + 1]


def test_value_loss():
    # (1 - 3)² / 2 · 0.5 + (2 - 2)² = 1; clipped: the first may only move from 0 to 0.5: (0.5 - 3)² / 2 · 0.5
    values, old = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([0.0, 2.0])
    returns, weights = torch.tensor([3.0, 2.0]), torch.tensor([0.5, 0.5])
    loss, metrics = value_loss(values, old, returns, weights, None)
    loss.backward()
    assert loss.item() == 1 and values.grad is not None and values.grad.tolist() == [-1, 0]
    assert metrics == {"tokens": 2, "value": 3, "return": 5}
    assert value_loss(values, old, returns, weights, 0.5)[0].item() == pytest.approx(2.5**2 / 4)
