"""Learning from which rollouts of a group were best: imitation (SFT, rejection sampling) and DPO.

Both are advantages on the ordinary rows. DPO's gradient at a token depends on its pair only through one number, so
that it is computed once per step from log-probabilities of the current weights, and then a pair may be spread over
any rows, micro-batches and ranks.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from harnessrl.trainer.advantage import spread
from harnessrl.trainer.rows import Row

__all__ = ["chosen_and_rejected", "dpo_advantages"]


def chosen_and_rejected(outcomes_N: np.ndarray, pair: bool) -> np.ndarray:
    """1 for each best rollout of a group; with `pair`, 1 for the first best and -1 for the first worst; else 0.

    Where all are equal, none is chosen.
    """
    signs_N = np.zeros(len(outcomes_N))
    if spread([outcomes_N]) == 0:
        return signs_N
    if pair:
        signs_N[outcomes_N.argmax()] = 1
        signs_N[outcomes_N.argmin()] = -1
        return signs_N
    signs_N[outcomes_N == outcomes_N.max()] = 1
    return signs_N


def dpo_advantages(
    rows: Sequence[Row], logprobs_N: np.ndarray, ref_logprobs_N: np.ndarray, beta: float
) -> dict[str, float]:
    """Set the advantages of a step's rows to those with which -advantage · log-probability has DPO's gradient.

    `logprobs_N` are of the weights at the step's start, `ref_logprobs_N` of the reference model, both in the order
    of `trained_tokens(rows)`. DPO (arXiv 2305.18290) minimises -log σ(m) with the margin
    m = β Σ (log-probability - reference), summed over the chosen rollout's tokens less those of the rejected one;
    its gradient in a log-probability is ∓β σ(-m). Returns the mean loss, margin and share of positive margins.
    """
    margins: dict[str, float] = defaultdict(float)
    start = 0
    for row in rows:
        end = start + row.trained_tokens
        sign = np.sign(row.advantages_T[row.mask_T][0])
        margins[row.group_id] += float(beta * sign * np.sum(logprobs_N[start:end] - ref_logprobs_N[start:end]))
        start = end
    for row in rows:
        strength = beta / (1 + np.exp(margins[row.group_id]))
        row.advantages_T[row.mask_T] = strength * np.sign(row.advantages_T[row.mask_T])
    m = np.array(list(margins.values()))
    return {
        "dpo_loss": float(np.logaddexp(0, -m).mean()),
        "dpo_margin": float(m.mean()),
        "dpo_accuracy": float((m > 0).mean()),
    }
