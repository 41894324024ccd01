"""From groups of rollouts to optimizer steps whose loss is exactly Σ weight · loss over tokens (invariant 7).

Groups are divided into steps by their ids and a seed, before rows exist. Advantages belong to whole groups, weights
to whole steps: what is dropped, cut or skipped afterwards changes neither, and neither do rows, micro-batches,
padding, order or ranks.
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harnessrl.trainer.algorithm import AlgorithmConfig
from harnessrl.trainer.group import Group, compare
from harnessrl.trainer.rows import Row

__all__ = ["Group", "Step", "Update", "build_update", "fill_weights", "plan_micro_batches"]


@dataclass(frozen=True)
class Step:
    """One optimizer step."""

    group_ids: list[str]
    rows: list[Row]
    rollouts: int
    """N_k: its rollouts before anything was dropped, without those that the infrastructure failed."""


@dataclass(frozen=True)
class Update:
    steps: list[Step]
    dropped: dict[str, int]
    """Sampled tokens that are trained in no row, by reason."""
    metrics: dict[str, float]

    @property
    def rows(self) -> list[Row]:
        return [row for step in self.steps for row in step.rows]


def build_update(
    groups: Sequence[Group], config: AlgorithmConfig, seed: int, max_tokens: int | None = None
) -> Update:
    """Everything of an update but the forward pass.

    `max_tokens`: the longest row that the model can take. The order of groups, rollouts and calls changes nothing.
    """
    dropped: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    steps = []
    for part in _divide(groups, config.steps_per_update, seed):
        built = [compare(group, config, max_tokens) for group in part]
        rollouts = sum(len(b.members) for b in built)
        fill_weights([row for b in built for row in b.rows], rollouts, config)
        kept = [row for b in built if not b.skipped for row in b.rows]
        steps.append(Step([group.group_id for group in part], kept, rollouts))
        for b in built:
            dropped += b.dropped
            counts += b.counts
            if b.skipped:
                dropped["no_spread"] += sum(row.trained_tokens for row in b.rows)
    return Update(steps, {k: v for k, v in dropped.items() if v}, _metrics(groups, steps, dropped, counts, config))


def _divide(groups: Sequence[Group], parts: int, seed: int) -> list[list[Group]]:
    """Into at most `parts` parts of nearly equal numbers of groups, by id and seed only."""
    ordered = sorted(groups, key=lambda group: group.group_id)
    shuffled = [ordered[i] for i in np.random.default_rng(seed).permutation(len(ordered))]
    parts = min(parts, len(shuffled))
    return [shuffled[k::parts] for k in range(parts)]


def fill_weights(rows: list[Row], rollouts: int, config: AlgorithmConfig) -> None:
    """What each trained token's loss is multiplied by; `rows` are all of a step's, `rollouts` its N_k.

    DPO's loss is a mean over pairs of sums over tokens, whatever the aggregation.
    """
    pairs = len({row.group_id for row in rows if row.advantages_T.any()})
    tokens_by_rollout: Counter[str] = Counter()
    for row in rows:
        tokens_by_rollout[row.rollout_id] += row.trained_tokens
    for row in rows:
        match "dpo" if config.loss == "dpo" else config.aggregation:
            case "dpo":
                weight = 1 / max(1, pairs)
            case "rollout_mean":
                weight = 1 / (rollouts * tokens_by_rollout[row.rollout_id])
            case "token_mean":
                weight = 1 / tokens_by_rollout.total()
            case "rollout_sum":
                assert config.length_constant is not None
                weight = 1 / (rollouts * config.length_constant)
            case "row_mean":
                weight = 1 / (len(rows) * row.trained_tokens)
        row.weights_T[row.mask_T] = weight


def _metrics(
    groups: Sequence[Group], steps: list[Step], dropped: Counter[str], counts: Counter[str], config: AlgorithmConfig
) -> dict[str, float]:
    compared = [r for group in groups for r in group.rollouts if r.failure_kind != "infra"]
    outcomes = np.array([r.outcome(config.failure_reward) for r in compared])
    rows = [row for step in steps for row in step.rows]
    calls = [call for rollout in compared for call in rollout.calls if call.sampled_ids]
    metrics: dict[str, float] = {
        "reward_mean": float(outcomes.mean()) if len(outcomes) else float("nan"),
        "reward_std": float(outcomes.std()) if len(outcomes) else float("nan"),
        "groups": len(groups),
        "rollouts": len(compared),
        "rows": len(rows),
        "calls": len(calls),
        "calls_truncated": sum(call.finish_reason == "length" for call in calls) / max(1, len(calls)),
        "tokens_per_call": sum(len(call.sampled_ids) for call in calls) / max(1, len(calls)),
        "tokens_prefilled_again": sum(call.prefilled_again for call in calls),
        "tokens_in_rows": sum(len(row) for row in rows),
        "tokens_trained": sum(row.trained_tokens for row in rows),
        "tokens_dropped": dropped.total(),
    }
    for name in (
        "groups_without_spread",
        "rollouts_agent_failed",
        "rollouts_infra_failed",
        "rollouts_unusable",
        "rollouts_without_rows",
        "ambiguous_parents",
    ):
        metrics[name] = counts[name]
    return metrics | {f"dropped/{reason}": tokens for reason, tokens in dropped.items() if tokens}


def plan_micro_batches(lengths: Sequence[int], token_budget: int, ranks: int = 1) -> list[list[list[int]]]:
    """Indices of rows by rank and micro-batch, so that no rank waits long for another.

    Every rank gets the same number of micro-batches (the last may be empty), as few as the budget allows: the
    longest rows first, each into the emptiest micro-batch. One row that alone exceeds the budget is a micro-batch
    of its own.
    """
    loads = [min(length, token_budget) for length in lengths]
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    per_rank = max(1, -(-sum(loads) // (token_budget * ranks)))
    while True:
        bins: list[list[int]] = [[] for _ in range(per_rank * ranks)]
        filled = [(0, b) for b in range(len(bins))]
        for i in order:
            tokens, b = heapq.heappop(filled)
            bins[b].append(i)
            heapq.heappush(filled, (tokens + loads[i], b))
        if all(tokens <= token_budget for tokens, _ in filled):
            return [bins[rank::ranks] for rank in range(ranks)]
        per_rank += 1
