"""Sampling: token ids and the log-probabilities of the very distribution that they were drawn from."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How to sample one request. `top_p`, `top_k` and `min_p` are for evaluation: training wants them off."""

    max_tokens: int
    temperature: float = 1.0
    """0 takes the most likely token; its log-probability is then that at temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: off."""
    min_p: float = 0.0
    stop_token_ids: frozenset[int] = frozenset()
    """A sampled one ends the answer and is its last token."""
    seed: int | None = None
    """The same seed and prompt give the same answer; None takes the engine's."""

    @property
    def truncates(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


def sample(
    logits_BV: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Draw one token a row by inverting its cumulative distribution at the row's uniform number in [0, 1).

    Returns ids and natural log-probabilities, after temperature and truncation.
    Raises FloatingPointError if the logits are not finite.
    """
    logits_BV = logits_BV.float()
    if any(s.temperature not in (0, 1) for s in samplings):
        logits_BV = logits_BV / logits_BV.new_tensor([s.temperature or 1.0 for s in samplings])[:, None]
    logprobs_BV = logits_BV.log_softmax(-1)
    for row, sampling in enumerate(samplings):
        if sampling.truncates:
            logprobs_BV[row] = truncate(logprobs_BV[row], sampling)
    cumulative_BV = logprobs_BV.exp().cumsum(-1)
    total_B1 = cumulative_BV[:, -1:]
    if not bool(torch.isfinite(total_B1).all()):
        raise FloatingPointError("The model's logits are not finite: its weights have diverged.")
    # Strictly below the total, or rounding could choose a token of probability 0.
    drawn_B1 = total_B1.new_tensor(uniforms)[:, None] * total_B1
    drawn_B1 = torch.minimum(drawn_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1)))
    ids_B1 = torch.searchsorted(cumulative_BV, drawn_B1, right=True)
    if any(s.temperature == 0 for s in samplings):
        greedy_B1 = torch.tensor([[s.temperature == 0] for s in samplings], device=ids_B1.device)
        ids_B1 = torch.where(greedy_B1, logprobs_BV.argmax(-1, keepdim=True), ids_B1)
    return ids_B1[:, 0].tolist(), logprobs_BV.gather(1, ids_B1)[:, 0].tolist()


def truncate(logprobs_V: Tensor, sampling: Sampling) -> Tensor:
    """Keep the tokens that top_k, then top_p, then min_p leave, and normalise again."""
    sorted_V, order_V = logprobs_V.sort(descending=True)
    keep_V = torch.ones_like(sorted_V, dtype=torch.bool)
    if sampling.top_k > 0:
        keep_V[sampling.top_k :] = False
    kept_V = sorted_V.masked_fill(~keep_V, -torch.inf).softmax(-1)
    keep_V &= kept_V.cumsum(-1) - kept_V < sampling.top_p
    keep_V &= sorted_V.exp() >= sampling.min_p * sorted_V[0].exp()
    result_V = torch.full_like(logprobs_V, -torch.inf)
    result_V[order_V[keep_V]] = sorted_V[keep_V]
    return result_V.log_softmax(-1)
