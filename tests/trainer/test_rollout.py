import json

import pytest
from made import call, rollout


def test_the_last_finite_reward_counts():
    assert rollout(events=[{"value": 0.25}, {"value": None}], reward=0.75).reward == 0.75
    assert rollout(events=[{"value": 0.25}, {"value": float("nan")}], reward=None).reward == 0.25


def test_no_reward_is_the_agents_failure():
    failed = rollout(reward=None)
    assert (failed.failure_kind, failed.error_message) == ("agent", "no reward was posted")
    assert failed.outcome(failure_reward=-1) == -1


@pytest.mark.parametrize("value", [float("nan"), json.loads("Infinity"), None, "1", [1]])
def test_an_unusable_reward_is_the_agents_failure_and_says_so(value: object):
    failed = rollout(events=[{"value": value}], reward=None)
    assert failed.failure_kind == "agent"
    assert failed.error_message == f"reward is not a finite number: {value!r}"


def test_rewards_of_calls_by_id_or_turn_are_not_the_rollouts():
    calls = [call(0, [1], [2]), call(1, [1, 2, 3], [4])]
    events = [{"value": 0.1, "call_id": "c0"}, {"value": 0.2, "turn": 1}]
    assert rollout(calls, reward=1.0, events=events).rewards_by_call == {"c0": 0.1, "c1": 0.2}
    only_calls = rollout(calls, reward=None, events=events)
    assert only_calls.failure_kind is None
    assert only_calls.reward is None
    assert only_calls.outcome(failure_reward=0) == pytest.approx(0.3)


def test_a_failure_without_owner_is_the_agents_if_it_called_the_model():
    assert rollout([call(0, [1], [2])], state="failed").failure_kind == "agent"
    assert rollout([], state="failed").failure_kind == "infra"
    assert rollout([call(0, [1], [2])], state="failed", failure_kind="infra").failure_kind == "infra"


def test_calls_are_ordered_by_start_and_kept_once():
    first, second = call(0, [1], [2]), call(1, [1, 2, 3], [4], parent="c0", shared=2, new_prompt_ids=[3])
    made = rollout([second, first, second])
    assert [c.call_id for c in made.calls] == ["c0", "c1"]
    assert made.prompts["c1"].tolist() == [1, 2, 3]
