"""Training rows: one per leaf of a trajectory, with everything that is known of each token.

A token that was sampled in a trained call is trained in exactly one row; in all others it is context. A row ends
with the last token that it trains, and a call is never divided between rows, so that ratios per call are whole.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from harnessrl.trainer.trajectory import Trajectory

__all__ = ["Row", "Tokens", "make_rows", "trained_tokens"]

CONTEXT = -1


@dataclass(slots=True)
class Row:
    """One sequence. Arrays are by token (`_T`); where `mask_T` is false, only `ids_T` has a meaning."""

    rollout_id: str
    group_id: str
    ids_T: np.ndarray
    """int32"""
    mask_T: np.ndarray
    """bool: trained in this row. Never true of the first token, which nothing predicts."""
    logprobs_T: np.ndarray
    """float32, when sampled; NaN where the engine gave none."""
    versions_T: np.ndarray
    """int32: policy version that sampled the token; -1 in context."""
    temperatures_T: np.ndarray
    """float32; 1 in context."""
    calls_T: np.ndarray
    """int32: index into the rollout's calls; -1 in context."""
    rewards_T: np.ndarray
    """float32, filled in by `build_update` for a critic: what comes with the last token of a call."""
    advantages_T: np.ndarray
    """float32, filled in by `build_update`; with a critic by `critic_advantages`, for DPO by `dpo_advantages`."""
    weights_T: np.ndarray
    """float32, filled in by `build_update`: the step's loss is the sum of weight · loss over all its tokens."""
    further: dict[str, np.ndarray] = field(default_factory=dict)
    """Further arrays of the calls, by token, as they came; 0 where a call has none of that name."""

    def __len__(self) -> int:
        return len(self.ids_T)

    @property
    def trained_tokens(self) -> int:
        return int(np.count_nonzero(self.mask_T))


def make_rows(
    trajectory: Trajectory, max_tokens: int | None = None, overflow: Literal["cut", "drop"] = "cut"
) -> tuple[list[Row], Counter[str]]:
    """The rows of a trajectory, and the sampled tokens that are in none of them, by reason.

    A row longer than `max_tokens` is cut behind its last call that fits, or dropped: with those of its calls that
    no other row holds.
    """
    lengths_C = trajectory.lengths_C
    trained_C = trajectory.trained_C.copy()
    too_long_C = lengths_C > (max_tokens or np.inf)
    dropped = Counter(trajectory.dropped)

    def drop(unwanted_C: np.ndarray, reason: str) -> None:
        tokens = sum(len(trajectory.sampled_C[i]) for i in np.flatnonzero(trained_C & unwanted_C))
        if tokens:
            dropped[reason] += tokens
        trained_C[unwanted_C] = False

    drop(np.array([len(prompt) == 0 for prompt in trajectory.prompts_C], dtype=bool), "no_prompt")
    if overflow == "cut":
        drop(too_long_C, "too_long")
    leaves = [leaf for leaf in _leaves(trajectory.parents_C, trained_C) if not too_long_C[leaf]]
    kept_C = np.zeros(len(trained_C), dtype=bool)
    for leaf in leaves:
        kept_C[_path(trajectory.parents_C, leaf)] = True
    drop(~kept_C, "too_long")

    rows = []
    untrained_yet_C = trained_C.copy()
    for leaf in leaves:
        path = [i for i in _path(trajectory.parents_C, leaf) if untrained_yet_C[i]]
        untrained_yet_C[path] = False
        rows.append(_row(trajectory, leaf, path))
    return rows, dropped


def _path(parents_C: np.ndarray, leaf: int) -> list[int]:
    """From the root to `leaf`."""
    path = [leaf]
    while (parent := int(parents_C[path[-1]])) >= 0:
        path.append(parent)
    return path[::-1]


def _leaves(parents_C: np.ndarray, trained_C: np.ndarray) -> list[int]:
    """Trained calls below which nothing is trained, in order. (A parent always comes before its children.)"""
    inner_C = np.zeros(len(parents_C), dtype=bool)
    for i in range(len(parents_C) - 1, -1, -1):
        if parents_C[i] >= 0 and (trained_C[i] or inner_C[i]):
            inner_C[parents_C[i]] = True
    return np.flatnonzero(trained_C & ~inner_C).tolist()


def _row(trajectory: Trajectory, leaf: int, trained: list[int]) -> Row:
    ids_T = np.concatenate([trajectory.prompts_C[leaf], trajectory.sampled_C[leaf]])
    n = len(ids_T)
    row = Row(
        rollout_id=trajectory.rollout.rollout_id,
        group_id=trajectory.rollout.group_id,
        ids_T=ids_T,
        mask_T=np.zeros(n, dtype=bool),
        logprobs_T=np.full(n, np.nan, dtype=np.float32),
        versions_T=np.full(n, CONTEXT, dtype=np.int32),
        temperatures_T=np.ones(n, dtype=np.float32),
        calls_T=np.full(n, CONTEXT, dtype=np.int32),
        rewards_T=np.zeros(n, dtype=np.float32),
        advantages_T=np.zeros(n, dtype=np.float32),
        weights_T=np.zeros(n, dtype=np.float32),
    )
    for i in trained:
        call = trajectory.rollout.calls[i]
        start = len(trajectory.prompts_C[i])
        span = slice(start, start + len(trajectory.sampled_C[i]))
        row.mask_T[span] = True
        row.calls_T[span] = i
        row.temperatures_T[span] = call.temperature
        row.versions_T[span] = np.repeat(*np.array(call.versions, dtype=np.int32).T)
        if call.logprobs is not None:
            logprobs = np.asarray(call.logprobs, dtype=np.float32)
            row.logprobs_T[span] = np.where(np.isfinite(logprobs), logprobs, np.nan)
        for name, values in (call.arrays or {}).items():
            array = np.asarray(values)
            whole = row.further.setdefault(name, np.zeros((n, *array.shape[1:]), dtype=array.dtype))
            whole[span] = array
    return row


@dataclass(frozen=True)
class Tokens:
    """The trained tokens (`_N`) of several rows, row after row: what the losses are computed from."""

    ids_N: np.ndarray
    """int32: the tokens themselves, to be predicted."""
    rows_N: np.ndarray
    """int32: number of the row among those given."""
    positions_N: np.ndarray
    """int32: index in the row; the logits one before predict the token."""
    calls_N: np.ndarray
    """int64: equal within a call of a rollout, different between calls."""
    logprobs_N: np.ndarray
    versions_N: np.ndarray
    temperatures_N: np.ndarray
    advantages_N: np.ndarray
    weights_N: np.ndarray

    def __len__(self) -> int:
        return len(self.ids_N)


def trained_tokens(rows: Sequence[Row]) -> Tokens:
    positions_R = [np.flatnonzero(row.mask_T).astype(np.int32) for row in rows]
    rows_N = np.repeat(np.arange(len(rows), dtype=np.int32), [len(p) for p in positions_R])

    def gather(name: str) -> np.ndarray:
        return np.concatenate([getattr(row, name)[p] for row, p in zip(rows, positions_R, strict=True)])

    return Tokens(
        ids_N=gather("ids_T"),
        rows_N=rows_N,
        positions_N=np.concatenate(positions_R),
        # A call is in one row only, so row and index name it among all rollouts.
        calls_N=(rows_N.astype(np.int64) << 32) + gather("calls_T"),
        logprobs_N=gather("logprobs_T"),
        versions_N=gather("versions_T"),
        temperatures_N=gather("temperatures_T"),
        advantages_N=gather("advantages_T"),
        weights_N=gather("weights_T"),
    )
