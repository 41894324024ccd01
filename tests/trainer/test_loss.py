import math

import pytest
import torch

from harnessrl.trainer.algorithm import AlgorithmConfig
from harnessrl.trainer.loss import mean_metrics, policy_loss

LN2 = math.log(2)


def loss(logprobs, advantages, proximal=None, sampled=None, weights=None, calls=None, **config):
    """Value, gradient by token, and metrics."""
    current = torch.tensor(logprobs, requires_grad=True)
    n = len(logprobs)
    reference = config.pop("reference", None)
    entropy = config.pop("entropy", None)
    value, metrics = policy_loss(
        current,
        None if proximal is None else torch.tensor(proximal),
        torch.tensor(sampled if sampled is not None else proximal if proximal is not None else logprobs),
        torch.tensor(advantages),
        torch.tensor(weights or [1.0] * n),
        torch.tensor(calls or [0] * n),
        AlgorithmConfig(**config),
        entropy=None if entropy is None else torch.tensor(entropy),
        ref_logprobs=None if reference is None else torch.tensor(reference),
    )
    value.backward()
    assert current.grad is not None
    return value.item(), current.grad.tolist(), metrics


def test_on_policy_every_loss_has_the_policy_gradient():
    # Ratio 1: the gradient of -A·ratio is -A; weights 0.5 and 0.25.
    for name in ("clip", "cispo", "reinforce"):
        _, gradient, _ = loss([-1.0, -2.0], [2.0, -3.0], weights=[0.5, 0.25], loss=name)
        assert gradient == pytest.approx([-1.0, 0.75]), name


def test_clip_is_asymmetric_and_pessimistic():
    # Ratios 2, 2, 1/2, 1/2 with A = 1, -1, 1, -1 and the range 0.8 … 1.28; the loss is minus the least:
    # min(2, 1.28) = 1.28 | min(-2, -1.28) = -2 | min(0.5, 0.8) = 0.5 | min(-0.5, -0.8) = -0.8.
    old = [-1 - LN2, -1 - LN2, -1 + LN2, -1 + LN2]
    value, gradient, metrics = loss([-1.0] * 4, [1.0, -1.0, 1.0, -1.0], proximal=old)
    assert value == pytest.approx(-1.28 + 2 - 0.5 + 0.8)
    assert gradient == pytest.approx([0, 2, -0.5, 0])
    assert (metrics["clipped_low"], metrics["clipped_high"], metrics["tokens"]) == (1, 1, 4)


def test_dual_clip_bounds_the_loss_of_bad_tokens():
    # Ratio e^2 = 7.39, A = -1: min(-7.39, -1.28) = -7.39, bounded at 3·A = -3.
    value, gradient, metrics = loss([0.0], [-1.0], proximal=[-2.0])
    assert (value, gradient, metrics["clipped_dual"]) == (pytest.approx(3), [0], 1)
    value, gradient, _ = loss([0.0], [-1.0], proximal=[-2.0], dual_clip=None)
    assert value == pytest.approx(math.e**2) and gradient == pytest.approx([math.e**2])


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    # Ratio 2 is bounded at 1.28: gradient -1.28·A, and the value -1.28·A·logp = -1.28·-1.
    value, gradient, _ = loss([-1.0], [1.0], proximal=[-1 - LN2], loss="cispo")
    assert value == pytest.approx(1.28) and gradient == pytest.approx([-1.28])


def test_gspo_takes_the_ratio_of_the_whole_call():
    # Call 0: log-ratios ln2 and -ln2, mean 0, ratio 1. Call 1: ln2 and 3·ln2, mean 2·ln2, ratio 4, clipped at 1.5.
    old = [-1 - LN2, -1 + LN2, -1 - LN2, -1 - 3 * LN2]
    arguments = {"loss": "gspo", "clip_high": 0.5, "calls": [7, 7, 3, 3]}
    value, gradient, metrics = loss([-1.0] * 4, [1.0] * 4, proximal=old, **arguments)
    assert value == pytest.approx(-(1 + 1 + 1.5 + 1.5))
    assert gradient == pytest.approx([-1, -1, 0, 0])
    assert metrics["clipped_high"] == 2


def test_importance_is_truncated_by_token():
    # proximal / sampled = 4 and 1/2: weights min(4, 2) = 2 and 0.5; on-policy otherwise, so gradient -A·weight.
    _, gradient, metrics = loss([-1.0, -1.0], [1.0, 1.0], sampled=[-1 - 2 * LN2, -1 + LN2])
    assert gradient == pytest.approx([-2, -0.5])
    assert metrics["importance_truncated"] == 1
    assert metrics["gap"] == pytest.approx(3 * LN2)
    assert metrics["gap_k3"] == pytest.approx((4 - 1 - 2 * LN2) + (0.5 - 1 + LN2))


def test_importance_is_truncated_by_call():
    # Call 0: 4 · 1/2 = 2, at the cap. Call 1: 4, truncated to 2. Call 2: 1/2.
    sampled = [-1 - 2 * LN2, -1 + LN2, -1 - 2 * LN2, -1 + LN2]
    arguments = {"importance": "call_truncate", "calls": [0, 0, 1, 2]}
    _, gradient, _ = loss([-1.0] * 4, [1.0] * 4, sampled=sampled, importance_cap=2.001, **arguments)
    assert gradient == pytest.approx([-2, -2, -2.001, -0.5])


def test_importance_masks_outside_the_range():
    # 4 and 1/4 are outside 1/2 … 2; 1.5 is inside and weighs 1.5. By call: 4 · 1.5 = 6 masks both.
    sampled = [-1 - 2 * LN2, -1 + 2 * LN2, -1 - math.log(1.5)]
    _, gradient, metrics = loss([-1.0] * 3, [1.0] * 3, sampled=sampled, importance="token_mask")
    assert gradient == pytest.approx([0, 0, -1.5]) and metrics["importance_masked"] == 2
    _, gradient, _ = loss([-1.0] * 3, [1.0] * 3, sampled=sampled, importance="call_mask", calls=[0, 1, 0])
    assert gradient == [0, 0, 0]


def test_tokens_without_sampled_log_probabilities_are_not_corrected_and_the_others_are():
    sampled = [float("nan"), -1 + LN2, -1 + LN2]
    for importance in ("token_truncate", "call_truncate"):
        arguments = {"importance": importance, "calls": [0, 0, 1]}
        _, gradient, metrics = loss([-1.0] * 3, [1.0] * 3, sampled=sampled, **arguments)
        first = -1 if importance == "token_truncate" else -0.5
        assert gradient == pytest.approx([first, -0.5, -0.5])
        assert metrics["without_sampled_logprobs"] == 1


def test_the_two_ratios_multiply():
    # current / proximal = 2, clipped to 1.28 (A > 0); proximal / sampled = 1.5: loss -1.5 · 1.28.
    value, _, _ = loss([-1.0], [1.0], proximal=[-1 - LN2], sampled=[-1 - LN2 - math.log(1.5)])
    assert value == pytest.approx(-1.5 * 1.28)


def test_kl_and_entropy_terms():
    # reference / policy = 2: k3 = 2 - 1 - ln2, its gradient 1 - 2 = -1; weight 0.5, coefficient 0.1. A = 0.
    value, gradient, metrics = loss([-1.0], [0.0], weights=[0.5], kl_coef=0.1, reference=[-1 + LN2])
    assert value == pytest.approx(0.5 * 0.1 * (1 - LN2)) and gradient == pytest.approx([-0.05])
    assert metrics["kl_reference"] == pytest.approx(1 - LN2)
    value, _, metrics = loss([-1.0], [0.0], weights=[0.5], entropy_coef=0.1, entropy=[3.0])
    assert value == pytest.approx(-0.5 * 0.1 * 3) and metrics["entropy"] == 3


def test_bfloat16_rewards_do_not_lose_their_fraction():
    current = torch.tensor([-1.0], dtype=torch.bfloat16, requires_grad=True)
    one = torch.tensor([1.0])
    advantage = torch.tensor([0.001 + 1])
    value, _ = policy_loss(current, None, -one, advantage, one, torch.tensor([0]), AlgorithmConfig())
    assert value.dtype == torch.float32 and value.item() == pytest.approx(-1.001)


def test_metrics_are_means_over_the_tokens_of_all_micro_batches():
    assert mean_metrics([{"tokens": 1, "gap": 3.0}, {"tokens": 3, "gap": 1.0}]) == {"gap": 1.0}
    assert mean_metrics([]) == {}
