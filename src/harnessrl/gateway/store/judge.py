"""What the end of an attempt means for its rollout: one rule, as a pure function (invariant 14)."""

from typing import Literal, NamedTuple

from harnessrl.schemas import AttemptEnd, FailureKind, State

__all__ = ["Evidence", "Verdict", "judge"]


class Evidence(NamedTuple):
    """What the gateway knows of the attempt."""

    last_call: Literal["none", "answered", "failed"]
    """`failed`: the engine or the gateway gave no answer (status 500 and above)."""
    rewarded: bool
    reward_from: Literal["agent", "evaluator"]
    evaluated: bool
    """The config has an evaluation command, which ran within the attempt."""
    tries_left: int


class Verdict(NamedTuple):
    state: State
    failure_kind: FailureKind | None = None
    error_message: str | None = None


def judge(end: AttemptEnd, seen: Evidence) -> Verdict:
    """The rollout's next state: `queuing` where the infrastructure failed and tries are left."""
    if end.ok and (seen.rewarded or (seen.reward_from == "evaluator" and not seen.evaluated)):
        return Verdict("succeeded")
    owner: FailureKind = "agent" if seen.last_call == "answered" else "infra"
    if not end.ok:
        kind, message = end.failure_kind or owner, end.error_message or "the attempt failed"
    elif seen.last_call == "none":
        kind, message = "infra", "the harness never called the model"
    elif seen.last_call == "failed":
        kind, message = "infra", "the last model call got no answer, and no reward was posted"
    elif seen.evaluated:
        kind, message = "infra", "the evaluation command posted no reward"
    else:
        kind, message = "agent", "the harness ended without posting a reward"
    if kind == "infra" and seen.tries_left > 0:
        return Verdict("queuing", None, message)
    return Verdict("failed", kind, message)
