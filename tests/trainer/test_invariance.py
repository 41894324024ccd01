"""What must not matter doesn't: fragmentation, micro-batches, padding, order, ranks (invariants 2, 6 and 7)."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made import rollout
from random_rollouts import IDS, random_calls, random_groups
from tiny_llama import gradient, plain_logprobs, tiny_llama

from harnessrl.trainer.algorithm import AlgorithmConfig
from harnessrl.trainer.batch import Group, build_update, fill_weights, plan_micro_batches
from harnessrl.trainer.loss import policy_loss
from harnessrl.trainer.rows import Row, make_rows, trained_tokens
from harnessrl.trainer.trajectory import build_trajectory

seeds = st.integers(0, 2**32 - 1)
MODEL = tiny_llama()

CONFIGS = [
    AlgorithmConfig(),
    AlgorithmConfig(loss="gspo", clip_low=0.01, clip_high=0.01, importance="call_truncate"),
    AlgorithmConfig(loss="cispo", aggregation="token_mean", importance="call_mask", importance_cap=8),
    AlgorithmConfig(loss="reinforce", aggregation="rollout_sum", length_constant=16, importance="token_mask"),
]


def loss_of(logprobs: torch.Tensor, rows: Sequence[Row], config: AlgorithmConfig) -> torch.Tensor:
    """With proximal log-probabilities some way off, as after other steps, and a KL and an entropy term."""
    tokens = trained_tokens(rows)
    proximal = logprobs.detach() + 0.3 * torch.sin(7 * logprobs.detach())
    reference = logprobs.detach() + 0.2 * torch.cos(5 * logprobs.detach())
    config = config.model_copy(update={"kl_coef": 0.1, "entropy_coef": 0.1})
    fields = (tokens.logprobs_N, tokens.advantages_N, tokens.weights_N, tokens.calls_N)
    sampled, advantages, weights, calls = (torch.tensor(v) for v in fields)
    return policy_loss(logprobs, proximal, sampled, advantages, weights, calls, config, -logprobs, reference)[0]


def loss_and_gradient(rows: Sequence[Row], config: AlgorithmConfig) -> tuple[float, torch.Tensor]:
    loss = loss_of(plain_logprobs(MODEL, rows), rows, config)
    return loss.item(), gradient(MODEL, loss)


def assert_same(a: tuple[float, torch.Tensor], b: tuple[float, torch.Tensor]) -> None:
    assert a[0] == pytest.approx(b[0], abs=1e-5)
    torch.testing.assert_close(a[1], b[1], atol=1e-5, rtol=1e-4)


def step_rows(rng: np.random.Generator, config: AlgorithmConfig) -> list[Row]:
    """All rows of a step: no group is skipped, since the tests give weights anew."""
    config = config.model_copy(update={"no_spread": "keep"})
    return build_update(random_groups(rng, 2, 3, spoil=False), config, seed=0).rows


def in_pieces(row: Row, rng: np.random.Generator) -> list[Row]:
    """The same training in several rows: each repeats the context and trains some of the calls."""
    calls = np.unique(row.calls_T[row.mask_T])
    owner = dict(zip(calls.tolist(), rng.integers(3, size=len(calls)).tolist(), strict=True))
    pieces = []
    for piece in sorted(set(owner.values())):
        mask_T = row.mask_T & np.isin(row.calls_T, [c for c in calls.tolist() if owner[c] == piece])
        end = int(np.flatnonzero(mask_T)[-1]) + 1
        by_token = [f.name for f in dataclasses.fields(row) if f.name.endswith("_T")]
        arrays = {name: getattr(row, name)[:end].copy() for name in by_token}
        pieces.append(dataclasses.replace(row, **arrays | {"mask_T": mask_T[:end]}))
        pieces[-1].weights_T[:] = 0
    return pieces


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.loss}-{c.aggregation}")
@settings(max_examples=10, deadline=None)
@given(seed=seeds)
def test_fragmentation_changes_neither_loss_nor_gradient(config: AlgorithmConfig, seed: int):
    rng = np.random.default_rng(seed)
    rows = step_rows(rng, config)
    pieces = [piece for row in rows for piece in in_pieces(row, rng)]
    fill_weights(pieces, rollouts=6, config=config)
    assert_same(loss_and_gradient(rows, config), loss_and_gradient(pieces, config))


def test_row_mean_is_what_fragmentation_changes():
    config = AlgorithmConfig(aggregation="row_mean")
    rng = np.random.default_rng(1)
    rows = step_rows(rng, config)
    pieces = [piece for row in rows for piece in in_pieces(row, rng)]
    assert len(pieces) > len(rows)
    fill_weights(pieces, rollouts=6, config=config)
    assert abs(loss_and_gradient(rows, config)[0] - loss_and_gradient(pieces, config)[0]) > 1e-3


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.loss}-{c.aggregation}")
@settings(max_examples=10, deadline=None)
@given(seed=seeds, budget=st.integers(12, 200), ranks=st.integers(1, 3))
def test_micro_batches_and_ranks_change_nothing(config: AlgorithmConfig, seed: int, budget: int, ranks: int):
    rows = step_rows(np.random.default_rng(seed), config)
    losses, total = 0.0, torch.zeros(())
    for rank in plan_micro_batches([len(row) for row in rows], budget, ranks):
        for micro in filter(None, rank):
            loss, grad = loss_and_gradient([rows[i] for i in micro], config)
            losses, total = losses + loss, total + grad
    assert_same((losses, total), loss_and_gradient(rows, config))


@settings(max_examples=10, deadline=None)
@given(seed=seeds)
def test_padding_changes_nothing(seed: int):
    rows = step_rows(np.random.default_rng(seed), CONFIGS[0])
    tokens = trained_tokens(rows)
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    attended = torch.zeros(len(rows), longest, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row.ids_T)
        attended[i, : len(row)] = 1
    logits = MODEL(input_ids=ids, attention_mask=attended).logits
    assert logits is not None
    logits = logits[torch.tensor(tokens.rows_N), torch.tensor(tokens.positions_N) - 1]
    logits = logits / torch.tensor(tokens.temperatures_N)[:, None]
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(tokens.ids_N).long()[:, None])[:, 0]
    loss = loss_of(logprobs, rows, CONFIGS[0])
    assert_same((loss.item(), gradient(MODEL, loss)), loss_and_gradient(rows, CONFIGS[0]))


def as_set(rows: Sequence[Row]) -> list[tuple[object, ...]]:
    return sorted(
        (
            row.rollout_id,
            row.ids_T.tobytes(),
            row.mask_T.tobytes(),
            row.advantages_T.tobytes(),
            row.weights_T.tobytes(),
        )
        for row in rows
    )


@settings(max_examples=50, deadline=None)
@given(seed=seeds, steps=st.integers(1, 3), loss=st.sampled_from(["clip", "sft", "dpo"]))
def test_the_order_of_groups_rollouts_and_calls_changes_nothing(seed: int, steps: int, loss):
    rng = np.random.default_rng(seed)
    groups = random_groups(rng, 4, 3)
    config = AlgorithmConfig(steps_per_update=steps, loss=loss)
    shuffled = [
        Group(group.group_id, [reordered(group.rollouts[i], rng) for i in rng.permutation(len(group.rollouts))])
        for group in (groups[i] for i in rng.permutation(len(groups)))
    ]
    update, other = build_update(groups, config, seed=1), build_update(shuffled, config, seed=1)
    assert [as_set(step.rows) for step in update.steps] == [as_set(step.rows) for step in other.steps]
    assert update.dropped == other.dropped and update.metrics == pytest.approx(other.metrics)


def reordered(made, rng: np.random.Generator):
    calls = [made.calls[i] for i in rng.permutation(len(made.calls))]
    return dataclasses.replace(
        rollout(calls, made.reward, made.rollout_id, made.group_id, state=made.state),
        failure_kind=made.failure_kind,
    )


@settings(max_examples=200, deadline=None)
@given(seed=seeds, calls=st.integers(1, 12), limit=st.none() | st.integers(2, 20), cut=st.booleans())
def test_each_delivered_sampled_token_is_trained_once_or_counted(
    seed: int, calls: int, limit: int | None, cut: bool
):
    made = rollout(random_calls(np.random.default_rng(seed), calls, spoil=True))
    trajectory = build_trajectory(made, train_agents=["writer"])
    rows, dropped = make_rows(trajectory, limit, "cut" if cut else "drop")
    trained = [0] * calls
    for row in rows:
        assert limit is None or len(row) <= limit
        assert row.mask_T[-1]
        for i in np.unique(row.calls_T[row.mask_T]).tolist():
            c, span = made.calls[i], np.flatnonzero(row.calls_T == i)
            start = len(made.prompts[c.call_id])
            assert span.tolist() == list(range(start, start + len(c.sampled_ids)))
            assert row.ids_T[:start].tolist() == made.prompts[c.call_id].tolist()
            assert row.ids_T[span].tolist() == c.sampled_ids
            assert row.versions_T[span].tolist() == [v for v, n in c.versions for _ in range(n)]
            assert np.isnan(row.logprobs_T[span]).all() == (c.logprobs is None)
            trained[i] += 1
    contexts = [(*made.prompts[c.call_id].tolist(), *c.sampled_ids) for c in made.calls]
    for i, c in enumerate(made.calls):
        contained = any(
            contexts[i] == tuple(made.prompts[later.call_id].tolist()[: len(contexts[i])])
            for later in made.calls[i + 1 :]
        )
        wanted = c.trainable and c.agent == "writer" and not trajectory.unusable
        fits = limit is None or len(contexts[i]) <= limit
        if wanted and c.delivered and (fits if cut else limit is None):
            assert trained[i] == 1
        if not wanted or not (c.delivered or contained) or not fits:
            assert trained[i] == 0
        assert trained[i] <= 1
    total = sum(len(c.sampled_ids) for c in made.calls)
    assert sum(row.trained_tokens for row in rows) + dropped.total() == total


@settings(max_examples=100, deadline=None)
@given(seed=seeds, limit=st.none() | st.integers(2, 20), skip=st.sampled_from(["skip", "keep"]))
def test_dropped_tokens_are_conserved(seed: int, limit: int | None, skip):
    groups = random_groups(np.random.default_rng(seed), 3, 3)
    update = build_update(groups, AlgorithmConfig(no_spread=skip, steps_per_update=2), seed=0, max_tokens=limit)
    sampled = sum(r.sampled_tokens for group in groups for r in group.rollouts)
    assert sum(row.trained_tokens for row in update.rows) + sum(update.dropped.values()) == sampled
    for step in update.steps:
        of = {r.rollout_id for group in groups if group.group_id in step.group_ids for r in group.rollouts}
        assert {row.rollout_id for row in step.rows} <= of


@settings(max_examples=100, deadline=None)
@given(seed=seeds, calls=st.integers(1, 15))
def test_parents_are_the_longest_contexts(seed: int, calls: int):
    made = rollout(random_calls(np.random.default_rng(seed), calls, spoil=False))
    contexts = [[*made.prompts[c.call_id].tolist(), *c.sampled_ids] for c in made.calls]
    for i, parent in enumerate(build_trajectory(made).parents_C.tolist()):
        prompt = made.prompts[made.calls[i].call_id].tolist()
        fitting = [len(contexts[j]) for j in range(i) if contexts[j] == prompt[: len(contexts[j])]]
        assert (len(contexts[parent]) if parent >= 0 else 0) == max(fitting, default=0)
        assert max(prompt) < IDS
