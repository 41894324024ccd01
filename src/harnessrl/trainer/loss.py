"""Losses over flat vectors of trained tokens (`_N`), in fp32.

Two ratios, never mixed up (invariant 8): the clip acts on current / proximal, the policy before the update's first
step; the correction for off-policy sampling multiplies the token's loss by a bounded proximal / sampled, which has
no gradient. Ratios of sequences are taken per call. Every loss is Σ weight · loss: the weights carry all averaging,
so that the losses of micro-batches and ranks add up to the step's.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from harnessrl.trainer.algorithm import AlgorithmConfig

__all__ = ["mean_metrics", "policy_loss", "value_loss"]

TOKENS = "tokens"


def policy_loss(
    logprobs: Tensor,
    proximal: Tensor | None,
    sampled: Tensor,
    advantages: Tensor,
    weights: Tensor,
    call_ids: Tensor,
    config: AlgorithmConfig,
    entropy: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Loss of a micro-batch to call `backward` on, and its metrics as sums over tokens (see `mean_metrics`).

    All are vectors by trained token. `logprobs` carry the gradient and, like `proximal` and `ref_logprobs`, are of
    the distribution sampled from, temperature included. `proximal`: of the policy before the update, None in its
    first step, where they are the same. `sampled`: NaN where the engine gave none; such a token is not corrected,
    and counted. `call_ids`: equal within a call, different between calls; a call is never divided between
    micro-batches. `entropy`: of the distribution at the token.

    PPO's clip (arXiv 1707.06347) with the dual clip (1912.09729) and clip-higher (2503.14476), GSPO (2507.18071),
    CISPO (2506.13585), truncated importance sampling as in IMPALA (1802.01561).
    """
    logprobs = _exact(logprobs)
    old = logprobs.detach() if proximal is None else _exact(proximal).detach()
    call_ids = torch.unique(call_ids, return_inverse=True)[1]
    correction, metrics = _importance(old, sampled, call_ids, config)
    tokens, clipped = _token_losses(logprobs, old, _exact(advantages), call_ids, config)
    losses = correction * tokens
    log_ratio = (logprobs - old).detach()
    metrics |= clipped | {
        "ratio": log_ratio.exp().sum().item(),
        "kl_proximal": (log_ratio.exp() - 1 - log_ratio).sum().item(),
    }
    if ref_logprobs is not None:
        kl = k3(logprobs, _exact(ref_logprobs))
        losses = losses + config.kl_coef * kl
        metrics["kl_reference"] = kl.detach().sum().item()
    if entropy is not None:
        losses = losses - config.entropy_coef * _exact(entropy)
        metrics["entropy"] = _exact(entropy).detach().sum().item()
    return (_exact(weights) * losses).sum(), {TOKENS: float(len(logprobs))} | metrics


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, clip: float | None
) -> tuple[Tensor, dict[str, float]]:
    """The critic's: half the squared error, or the worse one of moving freely and of moving by `clip` at most from
    the values before the update. Vectors by trained token; metrics as sums."""
    values, old_values, returns = _exact(values), _exact(old_values).detach(), _exact(returns)
    losses = (values - returns) ** 2
    if clip is not None:
        losses = torch.maximum(losses, (old_values + (values - old_values).clamp(-clip, clip) - returns) ** 2)
    metrics = {TOKENS: float(len(values)), "value": values.detach().sum().item(), "return": returns.sum().item()}
    return (_exact(weights) * losses).sum() / 2, metrics


def _exact(values: Tensor) -> Tensor:
    """In fp32 at least."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """KL(policy ‖ reference) by token, from tokens of the policy: r - 1 - log r with r = reference / policy, which
    is unbiased and never negative (Schulman, "Approximating KL divergence")."""
    log_ratio = ref_logprobs - logprobs
    return log_ratio.exp() - 1 - log_ratio


def _token_losses(
    logprobs: Tensor, old: Tensor, advantages: Tensor, call_ids: Tensor, config: AlgorithmConfig
) -> tuple[Tensor, dict[str, float]]:
    if config.loss in ("reinforce", "sft", "dpo"):
        return -advantages * logprobs, {}
    log_ratio = logprobs - old
    if config.loss == "gspo":
        log_ratio = _call_mean(log_ratio, call_ids)
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    clipped = {
        "clipped_low": ((ratio < 1 - config.clip_low) & (advantages < 0)).sum().item(),
        "clipped_high": ((ratio > 1 + config.clip_high) & (advantages > 0)).sum().item(),
    }
    if config.loss == "cispo":
        return -bounded.detach() * advantages * logprobs, clipped
    gains = torch.minimum(ratio * advantages, bounded * advantages)
    if config.dual_clip is not None:
        floor = config.dual_clip * advantages
        clipped["clipped_dual"] = ((gains < floor) & (advantages < 0)).sum().item()
        gains = torch.where(advantages < 0, torch.maximum(gains, floor), gains)
    return -gains, clipped


def _importance(
    old: Tensor, sampled: Tensor, call_ids: Tensor, config: AlgorithmConfig
) -> tuple[Tensor, dict[str, float]]:
    """Bounded proximal / sampled by token, 1 where it is not known; and the gap between the two as metrics."""
    sampled = _exact(sampled)
    known = ~torch.isnan(sampled)
    gap = torch.where(known, old - sampled, 0.0)
    metrics = {
        "without_sampled_logprobs": (~known).sum().item(),
        "gap": gap.abs().sum().item(),
        "gap_k3": (gap.exp() - 1 - gap).sum().item(),
    }
    if config.importance == "none" or config.loss in ("sft", "dpo"):
        return torch.ones_like(old), metrics
    ratio = (_call_sum(gap, call_ids) if config.importance.startswith("call") else gap).exp()
    cap = config.importance_cap
    if config.importance.endswith("mask"):
        inside = (ratio >= 1 / cap) & (ratio <= cap)
        return torch.where(inside, ratio, 0.0), metrics | {"importance_masked": (~inside).sum().item()}
    return ratio.clamp(max=cap), metrics | {"importance_truncated": (ratio > cap).sum().item()}


def _call_sum(values: Tensor, call_ids: Tensor) -> Tensor:
    """Each token's call's sum."""
    return values.new_zeros(len(values)).index_add(0, call_ids, values)[call_ids]


def _call_mean(values: Tensor, call_ids: Tensor) -> Tensor:
    return _call_sum(values, call_ids) / _call_sum(torch.ones_like(values), call_ids)


def mean_metrics(sums: Iterable[dict[str, float]]) -> dict[str, float]:
    """Means over all tokens from the sums that micro-batches and ranks gave."""
    total: dict[str, float] = {}
    for metrics in sums:
        for name, value in metrics.items():
            total[name] = total.get(name, 0.0) + value
    tokens = total.pop(TOKENS, 0.0)
    return {name: value / tokens for name, value in total.items()} if tokens else {}
