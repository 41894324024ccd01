"""Our advantages and losses beside verl's `core_algos`, value and gradient, where both mean the same: every rollout
is one call in one row.

Where we differ: verl averages over the rows of a micro-batch, so that a rollout of four rows counts four times; it
takes GSPO's ratio over a row instead of a call; a group of one has its score for an advantage instead of 0; GAE's
advantages are whitened over the batch; log-ratios are bounded by ±20 (k3 by ±10).
"""

import importlib.util

import numpy as np
import pytest
import torch

if importlib.util.find_spec("verl") is None:
    pytest.skip("needs harnessrl[verl]: make test-verl", allow_module_level=True)

from verl.trainer.ppo import core_algos  # noqa: E402
from verl.workers.config import FSDPActorConfig  # noqa: E402

from harnessrl.trainer.advantage import group_advantages  # noqa: E402
from harnessrl.trainer.algorithm import AlgorithmConfig  # noqa: E402
from harnessrl.trainer.critic import gae  # noqa: E402
from harnessrl.trainer.loss import k3, policy_loss  # noqa: E402

pytestmark = pytest.mark.verl

LENGTHS = [3, 5, 2, 7]
LONGEST = 8
MASK_BT = torch.arange(LONGEST)[None] < torch.tensor(LENGTHS)[:, None]

CASES = {
    "clip, rollout mean": ("vanilla", "seq-mean-token-mean", AlgorithmConfig()),
    "clip, token mean": ("vanilla", "token-mean", AlgorithmConfig(aggregation="token_mean")),
    "clip, dual 1.5": ("vanilla", "seq-mean-token-mean", AlgorithmConfig(dual_clip=1.5)),
    "clip, rollout sum": (
        "vanilla",
        "seq-mean-token-sum-norm",
        AlgorithmConfig(aggregation="rollout_sum", length_constant=LONGEST),
    ),
    # By token, a correction would scale its own token's gradient there, and here that of the whole call.
    "gspo": (
        "gspo",
        "seq-mean-token-mean",
        AlgorithmConfig(loss="gspo", dual_clip=None, importance="call_truncate"),
    ),
    "cispo": ("cispo", "seq-mean-token-mean", AlgorithmConfig(loss="cispo")),
}


def weights_BT(config: AlgorithmConfig) -> torch.Tensor:
    per_row = {
        "rollout_mean": [1 / (len(LENGTHS) * n) for n in LENGTHS],
        "token_mean": [1 / sum(LENGTHS)] * len(LENGTHS),
        "rollout_sum": [1 / (len(LENGTHS) * LONGEST)] * len(LENGTHS),
    }[config.aggregation]
    return torch.tensor(per_row)[:, None].expand(MASK_BT.shape)


@pytest.mark.parametrize("name", CASES)
def test_losses(name: str) -> None:
    verls, aggregation, config = CASES[name]
    torch.manual_seed(0)
    # Wide enough for every bound to be met.
    old_BT, advantages_B = -torch.rand(MASK_BT.shape), torch.tensor([1.0, -2.0, 0.5, -1.0])
    new_BT = (old_BT + torch.randn(MASK_BT.shape) * 0.7).requires_grad_()
    sampled_BT = old_BT + 0.6 * torch.randn(MASK_BT.shape)
    gap_BT = old_BT - sampled_BT
    if config.importance == "call_truncate":
        gap_BT = (gap_BT * MASK_BT).sum(1, keepdim=True).expand(MASK_BT.shape)
    importance_BT = gap_BT.exp().clamp(max=config.importance_cap)
    advantages_BT = advantages_B[:, None].expand(MASK_BT.shape)
    actor = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_mini_batch_size=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=config.clip_low,
        clip_ratio_high=config.clip_high,
        clip_ratio_c=config.dual_clip or 3.0,
    )
    theirs, _ = core_algos.get_policy_loss_fn(verls)(
        old_BT, new_BT, advantages_BT, MASK_BT.float(), aggregation, actor, importance_BT
    )
    (their_gradient,) = torch.autograd.grad(theirs, new_BT)
    calls_BT = torch.arange(len(LENGTHS))[:, None].expand(MASK_BT.shape)
    new, old, sampled, advantages, weights, calls = (
        t[MASK_BT] for t in (new_BT, old_BT, sampled_BT, advantages_BT, weights_BT(config), calls_BT)
    )
    ours, _ = policy_loss(new, old, sampled, advantages, weights, calls, config)
    (our_gradient,) = torch.autograd.grad(ours, new_BT)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(our_gradient, their_gradient)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_group_advantages(estimator) -> None:
    rewards = [[0.0, 1.0, 0.25, 0.5], [1.0, 1.0, 0.0]]
    scores = torch.zeros(7, 3)
    scores[:, -1] = torch.tensor(sum(rewards, []))
    arguments = (scores, torch.ones(7, 3), np.array([0] * 4 + [1] * 3))
    if estimator == "rloo":
        theirs, _ = core_algos.compute_rloo_outcome_advantage(*arguments)
    else:
        theirs, _ = core_algos.compute_grpo_outcome_advantage(
            *arguments, norm_adv_by_std_in_grpo=estimator == "grpo"
        )
    ours = [a for group in rewards for a in group_advantages([np.array([r]) for r in group], estimator)]
    np.testing.assert_allclose(np.concatenate(ours), theirs[:, 0], rtol=1e-5, atol=1e-6)


def test_gae_over_what_the_harness_put_in_between() -> None:
    rng = np.random.default_rng(0)
    mask_T = np.array([1, 1, 0, 0, 1, 1, 1, 0, 1], dtype=bool)
    rewards_T, values_T = np.where(mask_T, rng.random(9), 0), rng.random(9)
    tensors = (torch.tensor(array[None], dtype=torch.float64) for array in (rewards_T, values_T, mask_T))
    _, returns = core_algos.compute_gae_advantage_return(*tensors, gamma=0.9, lam=0.8)
    ours_N = gae(rewards_T[mask_T], values_T[mask_T], 0.9, 0.8) + values_T[mask_T]
    np.testing.assert_allclose(ours_N, returns[0].numpy()[mask_T])


def test_kl() -> None:
    torch.manual_seed(0)
    logprobs, reference = -torch.rand(20), -torch.rand(20)
    # verl asks for a FloatTensor, which no torch function promises to return.
    theirs = core_algos.kl_penalty_forward(logprobs, reference, "k3")  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(k3(logprobs, reference), theirs)
