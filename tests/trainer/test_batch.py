import numpy as np
import pytest
from made import call, rollout

from harnessrl.trainer.algorithm import AlgorithmConfig
from harnessrl.trainer.batch import Group, build_update, plan_micro_batches


def answer(tokens: int, reward: float | None, rollout_id: str, **fields):
    return rollout([call(0, [1, 2], [3] * tokens)], reward, rollout_id, **fields)


def fragments(lengths: list[int], reward: float, rollout_id: str):
    """A rollout whose calls share nothing: one row each."""
    calls = [call(i, [10 + i], [3] * n) for i, n in enumerate(lengths)]
    return rollout(calls, reward, rollout_id)


# Rollout a: one row of 4 tokens, reward 1. Rollout b: rows of 1, 2 and 3 tokens, reward 0.
UNEVEN = Group("g", [answer(4, 1.0, "a"), fragments([1, 2, 3], 0.0, "b")])


def weights(group: Group, **config) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"a": [], "b": []}
    for row in build_update([group], AlgorithmConfig(**config), seed=0).rows:
        found[row.rollout_id] += row.weights_T[row.mask_T].tolist()
    return found


def test_rollout_mean_gives_each_rollout_the_same_however_it_is_split():
    # N = 2: 1 / (2·4) for a's four tokens, 1 / (2·6) for b's six.
    found = weights(UNEVEN)
    assert found["a"] == pytest.approx([1 / 8] * 4) and found["b"] == pytest.approx([1 / 12] * 6)


def test_token_mean():
    found = weights(UNEVEN, aggregation="token_mean")
    assert found["a"] == pytest.approx([1 / 10] * 4) and found["b"] == pytest.approx([1 / 10] * 6)


def test_rollout_sum_over_a_constant():
    found = weights(UNEVEN, aggregation="rollout_sum", length_constant=50)
    assert found["a"] == pytest.approx([1 / 100] * 4) and found["b"] == pytest.approx([1 / 100] * 6)
    with pytest.raises(ValueError, match="length_constant"):
        AlgorithmConfig(aggregation="rollout_sum")


def test_row_mean_depends_on_fragmentation():
    # Four rows: 1 / (4·4), then 1 / (4·1), 1 / (4·2) twice, 1 / (4·3) three times.
    found = weights(UNEVEN, aggregation="row_mean")
    assert found["a"] == pytest.approx([1 / 16] * 4)
    assert found["b"] == pytest.approx([1 / 4, 1 / 8, 1 / 8, 1 / 12, 1 / 12, 1 / 12])


def test_advantages_belong_to_the_rollout_whatever_becomes_of_its_rows():
    # b's tokens are too long to train, but it stays in the baseline: a's advantage is 1 - 0.5, and N is 2.
    group = Group("g", [answer(4, 1.0, "a"), answer(40, 0.0, "b")])
    update = build_update([group], AlgorithmConfig(advantage="dr_grpo"), seed=0, max_tokens=10)
    (row,) = update.rows
    assert row.advantages_T[row.mask_T].tolist() == [0.5] * 4
    assert row.advantages_T[~row.mask_T].tolist() == [0] * 2
    assert row.weights_T[row.mask_T].tolist() == pytest.approx([1 / 8] * 4)
    assert update.dropped == {"too_long": 40}


def test_an_agents_failure_stays_in_the_baseline_and_infrastructures_does_not():
    agents = answer(2, None, "b", state="failed", failure_kind="agent")
    infras = answer(3, None, "c", state="failed", failure_kind="infra")
    group = Group("g", [answer(4, 1.0, "a"), agents, infras])
    update = build_update([group], AlgorithmConfig(advantage="dr_grpo", failure_reward=-1), seed=0)
    assert [row.advantages_T[-1] for row in update.rows] == [1, -1]
    assert update.steps[0].rollouts == 2
    assert update.dropped == {"infra_failure": 3}
    assert update.metrics["rollouts_agent_failed"] == 1 and update.metrics["rollouts_infra_failed"] == 1


def test_a_group_without_spread_is_skipped_but_counts():
    even = Group("even", [answer(3, 1.0, "c"), answer(3, 1.0, "d")])
    spread = Group("spread", [answer(4, 1.0, "a"), answer(4, 0.0, "b")])
    update = build_update([even, spread], AlgorithmConfig(), seed=0)
    assert [row.rollout_id for row in update.rows] == ["a", "b"]
    assert update.rows[0].weights_T[-1] == pytest.approx(1 / 16)
    assert update.dropped == {"no_spread": 6}
    assert update.metrics["groups_without_spread"] == 1
    kept = build_update([even, spread], AlgorithmConfig(no_spread="keep"), seed=0)
    assert len(kept.rows) == 4 and not kept.dropped


def test_an_unusable_rollout_trains_nothing_but_counts():
    lost = rollout([call(0, [1], [2, 3], capture_failed=True)], 0.0, "b")
    update = build_update([Group("g", [answer(4, 1.0, "a"), lost])], AlgorithmConfig(advantage="rloo"), seed=0)
    assert [row.rollout_id for row in update.rows] == ["a"]
    assert update.rows[0].advantages_T[-1] == 1
    assert update.dropped == {"incomplete": 2} and update.metrics["rollouts_unusable"] == 1


def test_groups_are_divided_by_id_and_seed_only():
    groups = [
        Group(f"g{i}", [answer(4, 1.0, f"a{i}", group_id=f"g{i}"), answer(4, 0.0, f"b{i}", group_id=f"g{i}")])
        for i in range(7)
    ]
    config = AlgorithmConfig(steps_per_update=3)
    update = build_update(groups, config, seed=5)
    assert sorted(len(step.group_ids) for step in update.steps) == [2, 2, 3]
    assert [step.rollouts for step in update.steps] == [2 * len(step.group_ids) for step in update.steps]
    for step in update.steps:
        assert {row.group_id for row in step.rows} == set(step.group_ids)
    again = build_update(groups[::-1], config, seed=5)
    assert [step.group_ids for step in again.steps] == [step.group_ids for step in update.steps]
    assert len(build_update(groups[:2], config, seed=5).steps) == 2


def test_discounted_credit_scales_the_advantage():
    long = rollout([call(0, [1], [2]), call(1, [1, 2, 3], [4])], 1.0, "a")
    config = AlgorithmConfig(advantage="rloo", credit="discounted", gamma=0.5)
    row = build_update([Group("g", [long, answer(1, 0.0, "b")])], config, seed=0).rows[0]
    assert row.advantages_T.tolist() == [0, 0.5, 0, 1]


def test_micro_batches_are_balanced_and_each_row_is_in_one():
    rng = np.random.default_rng(0)
    lengths = rng.integers(10, 900, 200).tolist()
    plan = plan_micro_batches(lengths, 2048, ranks=4)
    assert sorted(i for rank in plan for micro in rank for i in micro) == list(range(200))
    assert len({len(rank) for rank in plan}) == 1
    totals = [sum(lengths[i] for i in micro) for rank in plan for micro in rank]
    assert max(totals) <= 2048
    by_rank = [sum(lengths[i] for micro in rank for i in micro) for rank in plan]
    assert max(by_rank) - min(by_rank) < 0.02 * sum(by_rank) / 4
    assert len(totals) <= 1.1 * sum(lengths) / 2048 + 4


def test_a_row_over_the_budget_is_alone_and_ranks_without_rows_get_empty_batches():
    assert plan_micro_batches([5000, 10, 10], 100) == [[[0], [1, 2]]]
    assert plan_micro_batches([10], 100, ranks=3) == [[[0]], [[]], [[]]]
    assert plan_micro_batches([], 100) == [[[]]]
