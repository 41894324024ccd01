"""A group's rollouts compared with each other: their rows, with advantages.

Every rollout that the infrastructure did not fail counts, whatever becomes of its rows (invariants 6 and 14).
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from harnessrl.trainer.advantage import group_advantages, spread
from harnessrl.trainer.algorithm import AlgorithmConfig
from harnessrl.trainer.credit import Credit, assign_credit, call_rewards
from harnessrl.trainer.preference import chosen_and_rejected
from harnessrl.trainer.rollout import FinishedRollout
from harnessrl.trainer.rows import CONTEXT, Row, make_rows
from harnessrl.trainer.trajectory import build_trajectory

__all__ = ["ComparedGroup", "Group", "Member", "compare"]


@dataclass(frozen=True)
class Group:
    """The rollouts of one task that are compared with each other."""

    group_id: str
    rollouts: list[FinishedRollout]


@dataclass(frozen=True)
class Member:
    """A rollout that counts in its group, with its rows."""

    rollout: FinishedRollout
    credit: Credit
    rows: list[Row]


@dataclass
class ComparedGroup:
    members: list[Member] = field(default_factory=list)
    skipped: bool = False
    """All advantages are zero, so its rows need no forward pass."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Sampled tokens in no row, by reason."""
    counts: Counter[str] = field(default_factory=Counter)
    """Of what is worth a metric."""

    @property
    def rows(self) -> list[Row]:
        return [row for member in self.members for row in member.rows]


def compare(group: Group, config: AlgorithmConfig, max_tokens: int | None) -> ComparedGroup:
    compared = ComparedGroup()
    for rollout in sorted(group.rollouts, key=lambda r: r.rollout_id):
        _take_in(rollout, compared, config, max_tokens)
    if not compared.members:
        return compared
    returns_NK = [
        m.credit.returns_K if len(m.credit.returns_K) else np.array([m.credit.outcome]) for m in compared.members
    ]
    compared.counts["groups_without_spread"] += spread(returns_NK) == 0
    if config.loss in ("sft", "dpo"):
        _prefer(compared, pair=config.loss == "dpo")
    elif config.advantage == "gae":
        for member in compared.members:
            _fill_rewards(member, config)
    else:
        advantages_NK = group_advantages(returns_NK, config.advantage)
        compared.skipped = config.no_spread == "skip" and not any(a.any() for a in advantages_NK)
        for member, advantages_K in zip(compared.members, advantages_NK, strict=True):
            _fill_advantages(member, advantages_K)
    return compared


def _take_in(
    rollout: FinishedRollout, compared: ComparedGroup, config: AlgorithmConfig, max_tokens: int | None
) -> None:
    counts = compared.counts
    if rollout.failure_kind == "infra":
        compared.dropped["infra_failure"] += rollout.sampled_tokens
        counts["rollouts_infra_failed"] += 1
        return
    trajectory = build_trajectory(rollout, config.train_agents)
    rows, dropped = make_rows(trajectory, max_tokens, config.overflow)
    compared.members.append(Member(rollout, assign_credit(trajectory, config), rows))
    compared.dropped += dropped
    counts["rollouts_agent_failed"] += rollout.failure_kind == "agent"
    counts["rollouts_unusable"] += trajectory.unusable is not None
    counts["rollouts_without_rows"] += not rows
    counts["ambiguous_parents"] += trajectory.ambiguous


def _prefer(compared: ComparedGroup, pair: bool) -> None:
    """Keep the rows of the group's best rollouts, or of its best and its worst, among those that have rows."""
    trained = [member for member in compared.members if member.rows]
    if not trained:
        return
    signs_N = chosen_and_rejected(np.array([member.credit.outcome for member in trained]), pair)
    compared.skipped = not signs_N.any()
    for member, sign in zip(trained, signs_N, strict=True):
        if not compared.skipped and sign == 0:
            compared.dropped["not_chosen"] += sum(row.trained_tokens for row in member.rows)
            member.rows.clear()
        for row in member.rows:
            row.advantages_T[row.mask_T] = sign


def _fill_advantages(member: Member, advantages_K: np.ndarray) -> None:
    if not member.rows:
        return
    by_call = np.zeros(len(member.rollout.calls))
    by_call[member.credit.calls_K] = advantages_K * member.credit.weights_K
    for row in member.rows:
        row.advantages_T[row.mask_T] = by_call[row.calls_T[row.mask_T]]


def _fill_rewards(member: Member, config: AlgorithmConfig) -> None:
    """With the last token of each call in the rows: its reward, and those of the dropped calls after it."""
    kept = np.unique(np.concatenate([np.unique(row.calls_T[row.mask_T]) for row in member.rows] or [[]])).astype(
        int
    )
    if not len(kept):
        return
    calls_K = member.credit.calls_K
    owners_K = np.searchsorted(kept, calls_K, side="right") - 1
    by_call = np.zeros(len(member.rollout.calls))
    np.add.at(by_call, kept[np.maximum(owners_K, 0)], call_rewards(member.rollout, calls_K, config))
    for row in member.rows:
        last_T = row.mask_T & (np.append(row.calls_T[1:], CONTEXT) != row.calls_T)
        row.rewards_T[last_T] = by_call[row.calls_T[last_T]]
