"""Is the training well: numbers to watch, and alarms that say what to do.

The alarms read an update's metrics as the loop logs them.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from harnessrl.trainer.backends import LINEAGE
from harnessrl.trainer.rows import Row, Tokens

__all__ = ["Health", "broken_row", "gap_metrics", "staleness_metrics"]

MEMORY = 10
"""Updates that a jump is measured against."""
GAP_FLOOR = 0.02
GAP_JUMP = 4.0
ENTROPY_COLLAPSE = 0.1
NO_SPREAD_UPDATES = 5
TRUNCATED = 0.5
GRADIENT_JUMP = 10.0
STALENESS_BUCKETS = 4


def gap_metrics(proximal_N: np.ndarray, sampled_N: np.ndarray) -> dict[str, float]:
    """How far the trainer's log-probabilities before the update are from those sampled with: mean and 99th
    percentile of the absolute difference, and k3. Tokens whose sampled one is not known (NaN) don't count."""
    gap_N = (proximal_N - sampled_N)[~np.isnan(sampled_N)].astype(np.float64)
    if not len(gap_N):
        return {}
    return {
        "gap_mean": float(np.abs(gap_N).mean()),
        "gap_p99": float(np.quantile(np.abs(gap_N), 0.99)),
        "gap_k3": float((np.exp(gap_N) - 1 - gap_N).mean()),
    }


def staleness_metrics(rows: Sequence[Row], version: int) -> dict[str, float]:
    """Updates between the policy that sampled a token and `version`, over trained tokens: mean, largest, and the
    shares of 0, 1, 2, 3 and more. What another lineage sampled before a resumption counts by its updates."""
    if not rows:
        return {}
    versions_N = np.concatenate([row.versions_T[row.mask_T] for row in rows])
    ages_N = np.maximum(version % LINEAGE - versions_N % LINEAGE, 0)
    shares = np.bincount(np.clip(ages_N, 0, STALENESS_BUCKETS).astype(int), minlength=STALENESS_BUCKETS + 1)
    names = [str(age) for age in range(STALENESS_BUCKETS)] + [f"{STALENESS_BUCKETS}+"]
    return {"staleness/tokens_mean": float(ages_N.mean()), "staleness/tokens_max": float(ages_N.max())} | {
        f"staleness/share_{name}": float(share / len(ages_N)) for name, share in zip(names, shares, strict=True)
    }


def broken_row(logprobs_N: np.ndarray, tokens: Tokens, rows: Sequence[Row]) -> str | None:
    """Which row has a log-probability that is not a number or infinite, for the log; its update must be skipped."""
    broken = np.flatnonzero(~np.isfinite(logprobs_N))
    if not len(broken):
        return None
    row, position = rows[int(tokens.rows_N[broken[0]])], int(tokens.positions_N[broken[0]])
    return (
        f"log-probability {logprobs_N[broken[0]]} of token {position} of {len(row)} in a row of rollout "
        f"{row.rollout_id} (call {row.calls_T[position]}), and of {len(broken) - 1} further tokens"
    )


class Health:
    """Watches the metrics of one update after the other."""

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=MEMORY)
        self._gradients: deque[float] = deque(maxlen=MEMORY)
        self._first_entropy: float | None = None
        self._first_reward = 0.0
        self._without_spread = 0
        self._ringing: set[str] = set()

    def alarms(self, metrics: Mapping[str, float]) -> list[str]:
        """What went wrong with this update, each with what to do; an alarm that goes on rings only once."""
        found = {
            "gap": self._gap(metrics.get("policy/gap_fresh")),
            "entropy": self._entropy(metrics.get("policy/entropy"), metrics.get("reward/train", 0.0)),
            "spread": self._spread(metrics.get("batch/groups"), metrics.get("batch/groups_without_spread")),
            "gradient": self._gradient(metrics.get("optim/grad_norm")),
            "truncated": _truncated(metrics.get("batch/calls_truncated")),
        }
        ringing = {name: alarm for name, alarm in found.items() if alarm}
        new = [alarm for name, alarm in ringing.items() if name not in self._ringing]
        self._ringing = set(ringing)
        return new

    def _gap(self, gap: float | None) -> str | None:
        if gap is None:
            return None
        usual = float(np.median(self._gaps)) if self._gaps else 0.0
        self._gaps.append(gap)
        if gap <= max(GAP_FLOOR, GAP_JUMP * usual):
            return None
        return (
            f"log-probabilities of the current weights, sampled and recomputed, differ by {gap:.3g} on average "
            f"(before: {usual:.3g}): the engine may hold other weights, an old cache, or another temperature or "
            "precision than the trainer"
        )

    def _entropy(self, entropy: float | None, reward: float) -> str | None:
        """A policy that got better may be sure of itself; one that didn't has stopped looking."""
        if entropy is None:
            return None
        if self._first_entropy is None:
            self._first_entropy, self._first_reward = entropy, reward
        if entropy >= ENTROPY_COLLAPSE * self._first_entropy or reward > self._first_reward:
            return None
        return (
            f"entropy fell from {self._first_entropy:.3g} to {entropy:.3g}: the policy hardly explores; lower the "
            "learning rate, raise clip_high or set entropy_coef"
        )

    def _spread(self, groups: float | None, without: float | None) -> str | None:
        if not groups or without is None:
            return None
        self._without_spread = self._without_spread + 1 if without == groups else 0
        if self._without_spread < NO_SPREAD_UPDATES:
            return None
        return (
            f"all rewards of each group were equal for {self._without_spread} updates: nothing is learned; take "
            "harder or easier tasks, larger groups, or a reward with more steps"
        )

    def _gradient(self, norm: float | None) -> str | None:
        if norm is None:
            return None
        if not math.isfinite(norm):
            return "the gradient is not finite: the step was skipped"
        usual = float(np.median(self._gradients)) if len(self._gradients) == MEMORY else math.inf
        self._gradients.append(norm)
        if norm <= GRADIENT_JUMP * usual:
            return None
        return f"the gradient's norm before clipping is {norm:.3g} (before: {usual:.3g}): lower the learning rate"


def _truncated(share: float | None) -> str | None:
    if share is None or share <= TRUNCATED:
        return None
    return (
        f"{share:.0%} of the calls were cut by their token limit: raise the harness' max_tokens, or the policy is "
        "learning to ramble"
    )
