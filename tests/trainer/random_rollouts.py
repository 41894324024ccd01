"""Rollouts of harnesses that do everything that harnesses do, drawn at random."""

from typing import Any

import numpy as np
from made import call, rollout

from harnessrl.schemas import Call
from harnessrl.trainer.batch import Group
from harnessrl.trainer.rollout import FinishedRollout

IDS = 4
"""Few different ids, so that contexts meet by chance."""


def random_calls(rng: np.random.Generator, number: int, spoil: bool) -> list[Call]:
    """Calls that go on from any earlier one, fork, compact, retry and ask twice; with `spoil`, some that are lost,
    cut, untrainable, other agents' or without log-probabilities."""
    calls: list[Call] = []
    prompts: list[list[int]] = []
    contexts: list[list[int]] = []
    for i in range(number):
        tail = rng.integers(IDS, size=rng.integers(1, 4)).tolist()
        move = rng.choice(["continue", "latest", "fresh", "fork", "again"]) if contexts else "fresh"
        earlier = int(rng.integers(len(contexts))) if contexts else 0
        match move:
            case "continue":
                prompt = contexts[earlier] + tail
            case "latest":
                prompt = contexts[-1] + tail
            case "fork":
                prompt = contexts[earlier][: int(rng.integers(len(contexts[earlier])))] + tail
            case "again":
                prompt = prompts[earlier]
            case _:
                prompt = tail
        sampled = rng.integers(IDS, size=rng.integers(1, 5)).tolist()
        calls.append(call(i, prompt, sampled, **_fields(rng, len(sampled), spoil)))
        prompts.append(prompt)
        contexts.append(prompt + sampled)
    return calls


def _fields(rng: np.random.Generator, tokens: int, spoil: bool) -> dict[str, Any]:
    first = int(rng.integers(tokens + 1))
    fields: dict[str, Any] = {
        "logprobs": (-rng.random(tokens) * 3).tolist(),
        "versions": [(v, n) for v, n in ((3, first), (4, tokens - first)) if n],
        "temperature": float(rng.choice([0.7, 1.0])),
        "agent": str(rng.choice(["writer", "checker"])),
    }
    if spoil:
        fields |= {
            "delivered": bool(rng.random() < 0.7),
            "trainable": bool(rng.random() < 0.8),
            "finish_reason": str(rng.choice(["stop", "length"])) if rng.random() < 0.8 else None,
            "capture_failed": bool(rng.random() < 0.03),
        }
        if rng.random() < 0.2:
            fields["logprobs"] = None
    return fields


def random_rollout(rng: np.random.Generator, rollout_id: str, group_id: str, spoil: bool = True) -> FinishedRollout:
    calls = random_calls(rng, int(rng.integers(0 if spoil else 1, 7)), spoil)
    failed = spoil and rng.random() < 0.2
    return rollout(
        calls,
        reward=float(rng.choice([0.0, 0.5, 1.0])),
        rollout_id=rollout_id,
        group_id=group_id,
        state="failed" if failed else "succeeded",
        failure_kind=("agent" if rng.random() < 0.5 else "infra") if failed else None,
    )


def random_groups(rng: np.random.Generator, number: int, size: int, spoil: bool = True) -> list[Group]:
    return [
        Group(f"g{g}", [random_rollout(rng, f"g{g}r{r}", f"g{g}", spoil) for r in range(size)])
        for g in range(number)
    ]
