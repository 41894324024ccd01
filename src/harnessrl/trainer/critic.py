"""Advantages from a critic: GAE along the tokens of a rollout's calls, in the order of the calls.

What a harness puts between two calls costs no step: the last token of a call is followed by the first of the next,
whichever rows they are in.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from harnessrl.trainer.rows import Row

__all__ = ["critic_advantages", "gae"]


def gae(rewards_N: np.ndarray, values_N: np.ndarray, gamma: float, gae_lambda: float) -> np.ndarray:
    """Advantages of one rollout's tokens, float64 (arXiv 1506.02438).

    `values_N`: of the state before each token; `rewards_N`: what comes with it. After the last one it is 0.
    """
    advantages_N = np.zeros(len(rewards_N), dtype=np.float64)
    later, next_value = 0.0, 0.0
    for t in range(len(rewards_N) - 1, -1, -1):
        surprise = rewards_N[t] + gamma * next_value - values_N[t]
        later = advantages_N[t] = surprise + gamma * gae_lambda * later
        next_value = values_N[t]
    return advantages_N


def critic_advantages(
    rows: Sequence[Row], values_R: Sequence[np.ndarray], gamma: float, gae_lambda: float
) -> list[np.ndarray]:
    """Fill in the rows' advantages; returns what the critic should have said of each row's trained tokens.

    `values_R`: the critic's values, before the update, of each row's trained tokens. All rows of a rollout must be
    given together.
    """
    rows_of: dict[str, list[int]] = defaultdict(list)
    for r, row in enumerate(rows):
        rows_of[row.rollout_id].append(r)
    returns_R = [np.zeros(0)] * len(rows)
    for members in rows_of.values():
        masks = [rows[r].mask_T for r in members]
        calls_N = np.concatenate([rows[r].calls_T[mask] for r, mask in zip(members, masks, strict=True)])
        rewards_N = np.concatenate([rows[r].rewards_T[mask] for r, mask in zip(members, masks, strict=True)])
        values_N = np.concatenate([values_R[r] for r in members])
        order = np.argsort(calls_N, kind="stable")
        advantages_N = np.empty(len(order))
        advantages_N[order] = gae(rewards_N[order], values_N[order], gamma, gae_lambda)
        start = 0
        for r, mask in zip(members, masks, strict=True):
            end = start + int(mask.sum())
            rows[r].advantages_T[mask] = advantages_N[start:end]
            returns_R[r] = advantages_N[start:end] + values_N[start:end]
            start = end
    return returns_R
