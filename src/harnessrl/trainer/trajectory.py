"""A rollout's calls as a tree over token ids, and which of them are trained.

A call hangs under the longest earlier context (prompt + sampled ids) that its prompt starts with, whichever call
that was, so that interleaved sub-agents and parallel branches each keep their own path. Every sampled token is
either in a trained call or counted under the reason why not (invariants 2, 3 and 4).
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from harnessrl.schemas import Call
from harnessrl.trainer.rollout import FinishedRollout

__all__ = ["Trajectory", "build_trajectory"]


@dataclass(frozen=True)
class Trajectory:
    """Arrays and lists are by call (`_C`), in the order of `rollout.calls`."""

    rollout: FinishedRollout
    prompts_C: list[np.ndarray]
    """int32"""
    sampled_C: list[np.ndarray]
    """int32"""
    parents_C: np.ndarray
    """int64; the call whose context the prompt starts with, or -1."""
    trained_C: np.ndarray
    """bool"""
    dropped: Counter[str]
    """Sampled tokens that are not trained, by reason."""
    unusable: str | None
    """Why nothing of this rollout can be trained."""
    ambiguous: int
    """Calls with several equal contexts to hang under: a delivered one was taken, else the one that the gateway
    noted, else the latest."""

    @property
    def lengths_C(self) -> np.ndarray:
        """Tokens of each call's context."""
        lengths = [len(p) + len(s) for p, s in zip(self.prompts_C, self.sampled_C, strict=True)]
        return np.array(lengths, dtype=np.int64)


def build_trajectory(rollout: FinishedRollout, train_agents: Collection[str] = ()) -> Trajectory:
    """Find each call's place and whether it is trained, in time near linear in the tokens.

    `train_agents`: names of the agents to train; empty means all.
    """
    calls = rollout.calls
    prompts_C = [rollout.prompts[call.call_id] for call in calls]
    sampled_C = [np.asarray(call.sampled_ids, dtype=np.int32) for call in calls]
    parents_C, ambiguous = _find_parents(calls, prompts_C, sampled_C)
    confirmed = {int(parent) for parent in parents_C}
    last_of_prompt = {prompt.tobytes(): i for i, prompt in _undelivered_twins(calls, prompts_C)}
    unusable = _unusable(calls)
    dropped: Counter[str] = Counter()
    trained_C = np.zeros(len(calls), dtype=bool)
    for i, call in enumerate(calls):
        if len(sampled_C[i]) == 0:
            continue
        received = call.delivered or i in confirmed
        retried = not received and last_of_prompt[prompts_C[i].tobytes()] > i
        reason = "incomplete" if unusable else _untrained(call, received, retried, train_agents)
        if reason:
            dropped[reason] += len(sampled_C[i])
        else:
            trained_C[i] = True
    return Trajectory(rollout, prompts_C, sampled_C, parents_C, trained_C, dropped, unusable, ambiguous)


def _unusable(calls: list[Call]) -> str | None:
    for call in calls:
        sampled = len(call.sampled_ids)
        if call.capture_failed:
            return f"call {call.call_id} ran, but its tokens were not captured"
        if call.logprobs is not None and len(call.logprobs) != sampled:
            return f"call {call.call_id} has {len(call.logprobs)} log-probabilities for {sampled} tokens"
        if sum(tokens for _, tokens in call.versions) != sampled:
            return f"call {call.call_id} has policy versions for other than its {sampled} tokens"
        for name, array in (call.arrays or {}).items():
            if len(array) != sampled:
                return f"call {call.call_id} has {len(array)} values of {name} for {sampled} tokens"
    return None


def _untrained(call: Call, received: bool, retried: bool, train_agents: Collection[str]) -> str | None:
    if call.mode != "train":
        return "evaluation"
    if not call.trainable:
        return call.untrainable_reason or "untrainable"
    if not received:
        return "retry_orphan" if retried else "cut_stream" if call.finish_reason is None else "undelivered"
    if train_agents and call.agent not in train_agents:
        return "other_agent"
    return None


def _undelivered_twins(calls: list[Call], prompts_C: list[np.ndarray]) -> list[tuple[int, np.ndarray]]:
    """Calls, in order, whose prompt is as long as that of a call that was not delivered."""
    lengths = {len(p) for call, p in zip(calls, prompts_C, strict=True) if not call.delivered}
    return [(i, p) for i, p in enumerate(prompts_C) if len(p) in lengths]


def _find_parents(
    calls: list[Call], prompts_C: list[np.ndarray], sampled_C: list[np.ndarray]
) -> tuple[np.ndarray, int]:
    """Parents by call, and how often there was a choice.

    A context is looked up by its length and a hash of it: the sum of ids times one random weight per position,
    modulo 2^64, so that a prompt's running sum gives the hashes of all of its prefixes at once. A match is then
    compared token by token.
    """
    longest = max((len(p) + len(s) for p, s in zip(prompts_C, sampled_C, strict=True)), default=0)
    weights = np.random.default_rng(0).integers(1 << 64, size=longest, dtype=np.uint64)
    lengths_C = np.zeros(len(calls), dtype=np.int64)
    hashes_C = np.zeros(len(calls), dtype=np.uint64)
    parents_C = np.full(len(calls), -1, dtype=np.int64)
    ambiguous = 0
    prefix = np.zeros(longest + 1, dtype=np.uint64)
    for i, (call, prompt, sampled) in enumerate(zip(calls, prompts_C, sampled_C, strict=True)):
        n, end = len(prompt), len(prompt) + len(sampled)
        np.multiply(prompt, weights[:n], out=prefix[1 : n + 1], dtype=np.uint64, casting="unsafe")
        np.cumsum(prefix[1 : n + 1], out=prefix[1 : n + 1])
        fits = (lengths_C[:i] > 0) & (lengths_C[:i] <= n)
        same = fits & (prefix[np.where(fits, lengths_C[:i], 0)] == hashes_C[:i])

        def rank(j: int, call: Call = call) -> tuple[int, bool, bool, int]:
            return int(lengths_C[j]), calls[j].delivered, calls[j].call_id == call.parent, j

        ranked = sorted(np.flatnonzero(same).tolist(), key=rank, reverse=True)
        matching = (j for j in ranked if _starts_with(prompt, prompts_C[j], sampled_C[j]))
        if (best := next(matching, None)) is not None:
            parents_C[i] = best
            ambiguous += int(np.count_nonzero(lengths_C[ranked] == lengths_C[best]) > 1)
        if len(sampled):
            lengths_C[i] = end
            hashes_C[i] = np.sum(sampled.astype(np.uint64) * weights[n:end], initial=prefix[n])
    return parents_C, ambiguous


def _starts_with(prompt: np.ndarray, head: np.ndarray, tail: np.ndarray) -> bool:
    n = len(head)
    return np.array_equal(prompt[:n], head) and np.array_equal(prompt[n : n + len(tail)], tail)
