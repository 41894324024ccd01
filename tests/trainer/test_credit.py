import pytest
from made import call, rollout

from harnessrl.trainer.algorithm import AlgorithmConfig
from harnessrl.trainer.credit import assign_credit
from harnessrl.trainer.rollout import FinishedRollout
from harnessrl.trainer.trajectory import build_trajectory

CALLS = [call(0, [1], [2]), call(1, [1, 2, 3], [4]), call(2, [1, 2, 3, 4, 5], [6])]
PARTS = [{"value": 0.5, "call_id": "c0"}, {"value": 0.25, "call_id": "c1"}]


def credit(made: FinishedRollout, **config):
    return assign_credit(build_trajectory(made), AlgorithmConfig(**config))


def test_uniform_gives_every_call_the_rollouts_reward():
    given = credit(rollout(CALLS, 0.75))
    assert given.returns_K.tolist() == [0.75] * 3 and given.weights_K.tolist() == [1] * 3


def test_discounted_weighs_a_call_by_the_number_of_later_ones():
    given = credit(rollout(CALLS, 1.0), credit="discounted", gamma=0.5)
    assert given.returns_K.tolist() == [1, 1, 1]
    assert given.weights_K.tolist() == [0.25, 0.5, 1]


def test_per_call_sums_what_comes_after():
    # rewards 0.5, 0.25, 0 + 1.0 for the rollout: 1 → 0.25 + 0.5·1 = 0.75 → 0.5 + 0.5·0.75 = 0.875
    given = credit(rollout(CALLS, 1.0, events=PARTS), credit="per_call", gamma=0.5)
    assert given.returns_K.tolist() == [0.875, 0.75, 1.0]


def test_per_call_without_a_reward_of_the_rollout_adds_none():
    assert credit(rollout(CALLS, None, events=PARTS), credit="per_call").returns_K.tolist() == [0.75, 0.25, 0]


def test_a_failed_rollout_earns_the_failure_reward():
    failed = rollout(CALLS, 1.0, state="failed", events=PARTS)
    assert credit(failed, failure_reward=-1).returns_K.tolist() == [-1] * 3
    assert credit(failed, failure_reward=-1, credit="per_call").returns_K.tolist() == [-0.25, -0.75, -1]


def last_only(made: FinishedRollout) -> dict[str, float]:
    return {c.call_id: 0.0 for c in made.calls[:-1]}


def test_a_function_of_the_users():
    assert credit(rollout(CALLS, 1.0), credit="test_credit:last_only").returns_K.tolist() == [0, 0, 1]


def test_only_trained_calls_get_credit():
    calls = [CALLS[0], call(1, [1, 2, 3], [4], trainable=False), CALLS[2]]
    assert credit(rollout(calls, 1.0)).calls_K.tolist() == [0, 2]


def test_an_unknown_name_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match="written package"):
        AlgorithmConfig(credit="discount")
