from typing import Literal

import pytest

from harnessrl.gateway.store.judge import Evidence, Verdict, judge
from harnessrl.schemas import AttemptEnd

OK, CRASH = AttemptEnd(ok=True), AttemptEnd(ok=False, error_message="exit code 1")
SPAWN = AttemptEnd(ok=False, error_message="no such image", failure_kind="infra")
TIMEOUT = AttemptEnd(ok=False, error_message="timed out", failure_kind="agent")
NEVER = "the harness never called the model"
NO_REWARD = "the harness ended without posting a reward"
NO_EVALUATION = "the evaluation command posted no reward"
NO_ANSWER = "the last model call got no answer, and no reward was posted"


def seen(
    last_call: Literal["none", "answered", "failed"] = "answered",
    rewarded: bool = False,
    reward_from: Literal["agent", "evaluator"] = "agent",
    evaluated: bool = False,
    tries_left: int = 0,
) -> Evidence:
    return Evidence(last_call, rewarded, reward_from, evaluated, tries_left)


@pytest.mark.parametrize(
    ("end", "evidence", "verdict"),
    [
        (OK, seen(rewarded=True), Verdict("succeeded")),
        (OK, seen("none", rewarded=True), Verdict("succeeded")),
        (OK, seen(), Verdict("failed", "agent", NO_REWARD)),
        (OK, seen(tries_left=2), Verdict("failed", "agent", NO_REWARD)),
        (OK, seen("none"), Verdict("failed", "infra", NEVER)),
        (OK, seen("none", tries_left=1), Verdict("queuing", None, NEVER)),
        (OK, seen("failed"), Verdict("failed", "infra", NO_ANSWER)),
        (OK, seen(reward_from="evaluator"), Verdict("succeeded")),
        (OK, seen(reward_from="evaluator", evaluated=True), Verdict("failed", "infra", NO_EVALUATION)),
        (OK, seen(reward_from="evaluator", evaluated=True, rewarded=True), Verdict("succeeded")),
        (CRASH, seen(), Verdict("failed", "agent", "exit code 1")),
        (CRASH, seen(rewarded=True), Verdict("failed", "agent", "exit code 1")),
        (CRASH, seen(tries_left=1), Verdict("failed", "agent", "exit code 1")),
        (CRASH, seen("none"), Verdict("failed", "infra", "exit code 1")),
        (CRASH, seen("failed", tries_left=1), Verdict("queuing", None, "exit code 1")),
        (SPAWN, seen(tries_left=1), Verdict("queuing", None, "no such image")),
        (SPAWN, seen(), Verdict("failed", "infra", "no such image")),
        (TIMEOUT, seen("none", tries_left=1), Verdict("failed", "agent", "timed out")),
        (AttemptEnd(ok=False), seen(), Verdict("failed", "agent", "the attempt failed")),
    ],
)
def test_what_an_end_means(end: AttemptEnd, evidence: Evidence, verdict: Verdict):
    assert judge(end, evidence) == verdict
