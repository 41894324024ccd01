"""How much better than its group a rollout did: one estimate per rollout, before anything is dropped (invariant 6).

Baselines count each rollout once, however many calls it made: a rollout's return is the mean of its calls'
returns. With uniform credit that is its reward, and the estimators are the published ones.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

__all__ = ["group_advantages"]

Estimator = Literal["grpo", "dr_grpo", "rloo", "reinforce"]

STD_EPSILON = 1e-6
NO_SPREAD = 1e-9


def group_advantages(returns_NK: Sequence[np.ndarray], estimator: Estimator) -> list[np.ndarray]:
    """Advantage of each call of each rollout of one group.

    returns_NK: for each of the group's N rollouts the returns of its calls, float64, at least one (a rollout
    without calls gives its outcome as the only one).

    With R_i the mean of rollout i's returns: GRPO (arXiv 2402.03300) subtracts mean(R) and divides by the sample
    standard deviation + 1e-6; Dr. GRPO (arXiv 2503.20783) doesn't divide; RLOO (arXiv 2402.14740) subtracts the
    mean of the other rollouts' R; REINFORCE subtracts nothing. A group whose returns are all equal (one of a
    single rollout too) has advantage 0, except for REINFORCE.
    """
    if estimator == "reinforce":
        return [returns_K.copy() for returns_K in returns_NK]
    means_N = np.array([returns_K.mean() for returns_K in returns_NK])
    n, mean = len(means_N), means_N.mean()
    if spread(returns_NK) == 0 or n == 1:
        return [np.zeros_like(returns_K) for returns_K in returns_NK]
    if estimator == "rloo":
        others_N = (means_N.sum() - means_N) / (n - 1)
        return [returns_K - other for returns_K, other in zip(returns_NK, others_N, strict=True)]
    centered = [returns_K - mean for returns_K in returns_NK]
    if estimator == "dr_grpo":
        return centered
    variance = sum(float(np.mean(c**2)) for c in centered) / (n - 1)
    return [c / (np.sqrt(variance) + STD_EPSILON) for c in centered]


def spread(returns_NK: Sequence[np.ndarray]) -> float:
    """Largest less smallest return; exactly 0 where they differ by rounding only."""
    low, high = min(r.min() for r in returns_NK), max(r.max() for r in returns_NK)
    return 0.0 if high - low <= NO_SPREAD * max(1.0, abs(low), abs(high)) else float(high - low)
