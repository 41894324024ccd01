"""An update's metrics, the same from every backend."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from harnessrl.trainer.health import gap_metrics

__all__ = ["means", "step_metrics"]


def step_metrics(
    means: Mapping[str, float], grad_norm: float, old_N: np.ndarray, sampled_N: np.ndarray, fresh_N: np.ndarray
) -> dict[str, float]:
    """Of one optimizer step: `means` over its trained tokens, and of the gap between the log-probabilities before
    the update and those sampled with what a mean does not say; `fresh_N`: sampled by the weights being trained."""
    gap, fresh = gap_metrics(old_N, sampled_N), gap_metrics(old_N[fresh_N], sampled_N[fresh_N])
    found = dict(means)
    if gap:
        found["gap_p99"] = gap["gap_p99"]
    if fresh:
        found["gap_fresh"] = fresh["gap_mean"]
    optim = {"optim/grad_norm": grad_norm, "optim/skipped": float(not math.isfinite(grad_norm))}
    return {f"policy/{name}": value for name, value in found.items()} | optim


def means(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over an update's optimizer steps."""
    names = {name for part in parts for name in part}
    return {name: sum(part[name] for part in parts if name in part) / len(parts) for name in sorted(names)}
