"""Rows that begin alike, computed once: a trie of rows, laid out depth first, with attention along its branches.

A token attends to its ancestors only, and its position is its depth, so that each row's tokens see exactly what
they see in a row of their own: log-probabilities, loss and gradient are those of the plain path.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harnessrl.trainer.rows import Row, Tokens, trained_tokens

__all__ = ["Packed", "pack"]


@dataclass(frozen=True)
class Packed:
    """One sequence of `P` input tokens that stands for several rows. A row's last token is not among them: it
    predicts nothing that is trained."""

    rows: list[Row]
    ids_P: np.ndarray
    """int32"""
    positions_P: np.ndarray
    """int32: index in the row."""
    ends_P: np.ndarray
    """int32: one past the last token below this one. Query q attends to key k where k <= q < ends_P[k]."""
    tokens: Tokens
    """The trained tokens of `rows`."""
    predictors_N: np.ndarray
    """int64: index into `P` of the input whose logits predict each trained token; several may share one."""

    def __len__(self) -> int:
        return len(self.ids_P)

    def mask_PP(self) -> np.ndarray:
        """bool, query by key: true where attended."""
        index_P = np.arange(len(self), dtype=np.int32)
        return (index_P[None, :] <= index_P[:, None]) & (index_P[:, None] < self.ends_P[None, :])


def pack(rows: Sequence[Row], max_tokens: int, share: bool = True) -> list[Packed]:
    """Pack rows of any rollouts and groups into sequences of at most `max_tokens` (a longer row is alone);
    without `share`, prefixes are computed in every row again.

    In lexical order a row shares no more with any earlier one than with the one just before it, so one pass lays
    out the trie, and filling sequences in that order keeps together what belongs together.
    """
    ordered = sorted(rows, key=lambda row: (row.ids_T.astype(">i4").tobytes(), row.rollout_id))
    packs: list[Packed] = []
    members: list[Row] = []
    shared_M: list[int] = []
    tokens = 0
    for row in ordered:
        shared = _common_prefix(members[-1].ids_T[:-1], row.ids_T[:-1]) if members and share else 0
        if members and tokens + len(row) - 1 - shared > max_tokens:
            packs.append(_lay_out(members, shared_M, tokens))
            members, shared_M, tokens, shared = [], [], 0, 0
        members.append(row)
        shared_M.append(shared)
        tokens += len(row) - 1 - shared
    return [*packs, _lay_out(members, shared_M, tokens)] if members else packs


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    return int(different.argmax()) if different.any() else n


def _lay_out(rows: list[Row], shared_M: list[int], total: int) -> Packed:
    """`shared_M`: how many tokens each row shares with the one before it; `total`: what remains of them all."""
    ids_P = np.empty(total, dtype=np.int32)
    positions_P = np.empty(total, dtype=np.int32)
    ends_P = np.empty(total, dtype=np.int32)
    tokens = trained_tokens(rows)
    predictors = []
    path = np.empty(0, dtype=np.int64)
    used = 0
    for row, shared in zip(rows, shared_M, strict=True):
        ends_P[path[shared:]] = used
        n = len(row) - 1
        new = np.arange(used, used + n - shared)
        ids_P[new] = row.ids_T[shared:n]
        positions_P[new] = np.arange(shared, n)
        path = np.concatenate([path[:shared], new])
        used += len(new)
        predictors.append(path[np.flatnonzero(row.mask_T) - 1])
    ends_P[path] = used
    return Packed(rows, ids_P, positions_P, ends_P, tokens, np.concatenate(predictors))
