"""Rollouts made by hand for the tests of the trainer's mathematics."""

from collections.abc import Sequence
from typing import Any

from harnessrl.schemas import Call, Event, FailureKind, Metadata, Rollout, RolloutConfig, RolloutStatus, State
from harnessrl.trainer.rollout import FinishedRollout, finished_rollout


def call(index: int, prompt: Sequence[int], sampled: Sequence[int], **fields: Any) -> Call:
    given: dict[str, Any] = {
        "call_id": f"c{index}",
        "rollout_id": "r",
        "attempt_id": "0",
        "index": index,
        "mode": "train",
        "model": "policy",
        "dialect": "openai.chat",
        "new_prompt_ids": list(prompt),
        "sampled_ids": list(sampled),
        "logprobs": [-1.0] * len(sampled),
        "versions": [(0, len(sampled))],
        "temperature": 1.0,
        "finish_reason": "stop",
        "delivered": True,
        "trainable": True,
        "continuity": "first",
        "started_at": float(index),
        "latency_ms": 1.0,
    }
    return Call(**given | fields)


def rollout(
    calls: Sequence[Call] = (),
    reward: float | None = 1.0,
    rollout_id: str = "r",
    group_id: str = "g",
    events: Sequence[dict[str, Any]] = (),
    state: State = "succeeded",
    failure_kind: FailureKind | None = None,
) -> FinishedRollout:
    """`events`: data of further reward events, before the one of `reward`."""
    data = [*events, *([] if reward is None else [{"value": reward}])]
    return finished_rollout(
        Rollout(
            rollout_id=rollout_id,
            input={},
            is_train=True,
            config=RolloutConfig(),
            metadata=Metadata(group_id=group_id),
            status=RolloutStatus(state=state, failure_kind=failure_kind, created_at=0, updated_at=0),
        ),
        [Event(event_type="reward", rollout_id=rollout_id, attempt_id="0", timestamp=0, data=d) for d in data],
        list(calls),
    )
