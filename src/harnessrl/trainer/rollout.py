"""A rollout as the trainer takes it in: how it ended, what it earned, and its calls with whole prompts.

A missing or unusable reward is the agent's failure, never a silent zero or a dropped sample (invariant 14).
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from harnessrl.client import full_prompts
from harnessrl.schemas import Call, Event, FailureKind, Rollout, State

__all__ = ["FinishedRollout", "deleted_rollout", "finished_rollout"]


@dataclass(frozen=True)
class FinishedRollout:
    rollout_id: str
    group_id: str
    state: State
    failure_kind: FailureKind | None
    """None: the rollout succeeded and has a reward."""
    error_message: str | None
    reward: float | None
    """The last finite reward of the whole rollout; None where only calls were rewarded, or nothing."""
    rewards_by_call: dict[str, float]
    """Last reward of each call that was rewarded by itself, by call id."""
    calls: list[Call]
    """In the order of their start."""
    prompts: dict[str, np.ndarray]
    """Prompt ids of each call, int32, by call id."""

    def outcome(self, failure_reward: float) -> float:
        """`failure_reward` if the rollout failed, else its reward, else the sum of its calls' rewards."""
        if self.failure_kind:
            return failure_reward
        return sum(self.rewards_by_call.values()) if self.reward is None else self.reward

    @property
    def sampled_tokens(self) -> int:
        return sum(len(call.sampled_ids) for call in self.calls)


def finished_rollout(rollout: Rollout, events: list[Event], calls: list[Call]) -> FinishedRollout:
    """Put together what the gateway knows of a rollout's last attempt.

    `events` in insertion order. Who may reward is the gateway's to decide, when an event arrives: each `reward`
    event that it stored counts. One whose data names a `call_id` (or a `turn`: the call's index) belongs to
    that call, any other to the rollout.
    """
    unique = {call.call_id: call for call in calls}
    ordered = sorted(unique.values(), key=lambda call: (call.index, call.started_at, call.call_id))
    by_turn = {call.index: call.call_id for call in ordered}
    of_rollout: float | None = None
    of_calls: dict[str, float] = {}
    unusable: list[Any] = []
    for event in events:
        if event.event_type != "reward":
            continue
        value = _finite(event.data.get("value"))
        call_id = event.data.get("call_id") or by_turn.get(event.data.get("turn", -1))
        if value is None:
            unusable.append(event.data.get("value"))
        elif call_id is None:
            of_rollout = value
        else:
            of_calls[call_id] = value

    failure, message = rollout.status.failure_kind, rollout.status.error_message
    if rollout.status.state == "failed":
        failure = failure or ("agent" if ordered else "infra")
    elif of_rollout is None and not of_calls:
        failure = "agent"
        message = f"reward is not a finite number: {unusable[-1]!r}" if unusable else "no reward was posted"
    return FinishedRollout(
        rollout_id=rollout.rollout_id,
        group_id=rollout.metadata.group_id or rollout.rollout_id,
        state=rollout.status.state,
        failure_kind=failure,
        error_message=message,
        reward=of_rollout,
        rewards_by_call=of_calls,
        calls=ordered,
        prompts=full_prompts(ordered),
    )


def deleted_rollout(rollout_id: str, group_id: str) -> FinishedRollout:
    """What is left of a rollout that somebody deleted while it was waited for: its group goes on without it."""
    return FinishedRollout(
        rollout_id=rollout_id,
        group_id=group_id,
        state="failed",
        failure_kind="infra",
        error_message="the rollout was deleted",
        reward=None,
        rewards_by_call={},
        calls=[],
        prompts={},
    )


def _finite(value: Any) -> float | None:
    is_number = isinstance(value, int | float)
    return float(value) if is_number and math.isfinite(value) else None
