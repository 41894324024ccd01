"""Our losses beside TRL's, where TRL is installed (1.16 was; `pip install trl`): value and gradient on one batch.

Single-turn rows, where both mean the same: TRL averages over the rows of a micro-batch and takes GSPO's ratio over
a row, and here every row is one call and one rollout.
"""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from made import call, rollout

from harnessrl.trainer.advantage import group_advantages
from harnessrl.trainer.algorithm import AlgorithmConfig
from harnessrl.trainer.batch import Group, build_update
from harnessrl.trainer.loss import policy_loss
from harnessrl.trainer.rows import trained_tokens

trl_grpo = pytest.importorskip("trl.trainer.grpo_trainer", exc_type=ImportError)

LENGTHS = [[3, 5, 2, 7], [1, 4, 4, 6]]
REWARDS = [[0.0, 1.0, 0.25, 0.0], [1.0, 1.0, 0.0, 0.5]]
LONGEST = 8

CASES = {
    "grpo": (AlgorithmConfig(), {"loss_type": "grpo"}),
    "grpo, kl, bounded": (
        AlgorithmConfig(kl_coef=0.1, dual_clip=1.5),
        {"loss_type": "grpo", "beta": 0.1, "delta": 1.5},
    ),
    "dapo": (AlgorithmConfig(aggregation="token_mean"), {"loss_type": "dapo"}),
    "dr_grpo": (AlgorithmConfig(aggregation="rollout_sum", length_constant=LONGEST), {"loss_type": "dr_grpo"}),
    "gspo": (AlgorithmConfig(loss="gspo"), {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    # TRL's epsilon_high is the largest weight itself here, and it has no smallest.
    "cispo": (
        AlgorithmConfig(loss="cispo", aggregation="token_mean", clip_low=1, clip_high=0.1),
        {"loss_type": "cispo", "epsilon_high": 1.1},
    ),
}


def groups() -> list[Group]:
    return [
        Group(f"g{g}", [rollout([call(0, [1], [2] * n)], r, f"g{g}r{i}") for i, (n, r) in enumerate(members)])
        for g, members in enumerate(zip(*pair, strict=True) for pair in zip(LENGTHS, REWARDS, strict=True))
    ]


def trls(options: dict, logprobs_BT, old_BT, ref_BT, mask_BT, advantages_B) -> torch.Tensor:
    """TRL's loss with its model call replaced by given log-probabilities."""
    args = SimpleNamespace(delta=options.get("delta"), use_bias_correction_kl=False, steps_per_generation=1)
    accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x)
    stub = SimpleNamespace(
        args=args,
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        loss_type=options["loss_type"],
        importance_sampling_level=options.get("importance_sampling_level", "token"),
        beta=options.get("beta", 0.0),
        epsilon_low=0.2,
        epsilon_high=options.get("epsilon_high", 0.28),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        max_completion_length=LONGEST,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs_BT, torch.zeros_like(logprobs_BT), None),
    )
    ids_BT = torch.zeros_like(mask_BT)
    inputs = {
        "prompt_ids": ids_BT[:, :1],
        "prompt_mask": mask_BT[:, :1],
        "completion_ids": ids_BT,
        "completion_mask": mask_BT,
        "advantages": advantages_B,
        "old_per_token_logps": old_BT,
        "ref_per_token_logps": ref_BT,
        "num_items_in_batch": mask_BT.sum(),
    }
    return trl_grpo.GRPOTrainer._compute_loss(stub, None, inputs)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient(name: str):
    config, options = CASES[name]
    rows = build_update(groups(), config, seed=0).rows
    tokens = trained_tokens(rows)
    at = (torch.tensor(tokens.rows_N).long(), torch.tensor(tokens.positions_N).long() - 1)
    mask_BT = torch.zeros(len(rows), LONGEST, dtype=torch.int64)
    mask_BT[at] = 1
    torch.manual_seed(0)
    old_BT, logprobs_BT = -torch.rand(len(rows), LONGEST), -torch.rand(len(rows), LONGEST)
    ref_BT = -torch.rand(len(rows), LONGEST)
    theirs_BT, ours_BT = (logprobs_BT.clone().requires_grad_() for _ in range(2))

    advantages_B = torch.tensor([float(row.advantages_T[row.mask_T][0]) for row in rows])
    wanted = trls(options, theirs_BT, old_BT, ref_BT, mask_BT, advantages_B)
    advantages, weights, calls = (torch.tensor(v) for v in (tokens.advantages_N, tokens.weights_N, tokens.calls_N))
    found, _ = policy_loss(
        ours_BT[at], old_BT[at], old_BT[at], advantages, weights, calls, config, ref_logprobs=ref_BT[at]
    )
    wanted.backward()
    found.backward()
    assert found.item() == pytest.approx(wanted.item(), abs=1e-6)
    torch.testing.assert_close(ours_BT.grad, theirs_BT.grad, atol=1e-6, rtol=1e-5)


def test_grpos_advantage_is_trls_but_for_its_epsilon():
    # TRL adds 1e-4 to the standard deviation, we 1e-6.
    rewards = torch.tensor(REWARDS)
    wanted = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    found = [group_advantages([np.array([r]) for r in group], "grpo") for group in REWARDS]
    np.testing.assert_allclose(np.array(found)[..., 0], wanted.numpy(), rtol=5e-4)
