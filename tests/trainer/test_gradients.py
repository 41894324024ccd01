"""Each loss' gradient against finite differences, on a model of two layers, all of it in fp64."""

import numpy as np
import pytest
import torch
from random_rollouts import IDS, random_groups
from tiny_llama import gradient

from harnessrl.trainer.algorithm import AlgorithmConfig
from harnessrl.trainer.batch import build_update
from harnessrl.trainer.loss import policy_loss, value_loss
from harnessrl.trainer.rows import Row, trained_tokens

STEP = 1e-6


class TwoLayers(torch.nn.Module):
    """Sees the mean of the ids so far and the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(IDS, 6, dtype=torch.float64)
        self.inner = torch.nn.Linear(12, 16, dtype=torch.float64)
        self.outer = torch.nn.Linear(16, IDS, dtype=torch.float64)

    def forward(self, rows: list[Row]) -> torch.Tensor:
        """Log-probabilities of the trained tokens."""
        found = []
        for row in rows:
            tokens = trained_tokens([row])
            seen = self.embed(torch.tensor(row.ids_T))
            mean = seen.cumsum(0) / torch.arange(1, len(row) + 1)[:, None]
            logits = self.outer(self.inner(torch.cat([seen, mean], 1)).tanh())[tokens.positions_N - 1]
            found.append(logits.log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens.ids_N)])
        return torch.cat(found)


CONFIGS = [
    AlgorithmConfig(no_spread="keep", kl_coef=0.1, entropy_coef=0.05),
    AlgorithmConfig(no_spread="keep", dual_clip=None, importance="token_mask"),
    AlgorithmConfig(no_spread="keep", loss="gspo", clip_low=0.05, clip_high=0.05, importance="call_truncate"),
    AlgorithmConfig(no_spread="keep", loss="reinforce", importance="call_mask", importance_cap=5),
    AlgorithmConfig(no_spread="keep", loss="cispo", importance="none"),
    AlgorithmConfig(loss="sft"),
]


def moved(model: torch.nn.Module, direction: torch.Tensor, by: float) -> None:
    start = 0
    with torch.no_grad():
        for p in model.parameters():
            p += by * direction[start : start + p.numel()].view_as(p)
            start += p.numel()


def difference(model: torch.nn.Module, objective, direction: torch.Tensor) -> float:
    moved(model, direction, STEP)
    above = objective().item()
    moved(model, direction, -2 * STEP)
    below = objective().item()
    moved(model, direction, STEP)
    return (above - below) / (2 * STEP)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.loss)
def test_gradient(config: AlgorithmConfig):
    rows = build_update(random_groups(np.random.default_rng(3), 2, 3, spoil=False), config, seed=0).rows
    tokens = trained_tokens(rows)
    model = TwoLayers()
    start = model(rows).detach()
    proximal = start + 0.4 * torch.sin(7 * start)
    reference = start + 0.3 * torch.cos(5 * start)
    fields = (tokens.logprobs_N, tokens.advantages_N, tokens.weights_N, tokens.calls_N)
    sampled, advantages, weights, calls = (torch.tensor(v) for v in fields)

    def objective() -> torch.Tensor:
        logprobs = model(rows)
        # Any differentiable stand-in for the entropy will do.
        entropy = logprobs**2
        return policy_loss(logprobs, proximal, sampled, advantages, weights, calls, config, entropy, reference)[0]

    def frozen_cispo() -> torch.Tensor:
        # CISPO's weight carries no gradient: the difference is taken with the weight of the start.
        coefficient = (start - proximal).exp().clamp(1 - config.clip_low, 1 + config.clip_high)
        return -(weights * coefficient * advantages * model(rows)).sum()

    found = gradient(model, objective())
    assert found.abs().max() > 1e-3
    for seed in range(4):
        direction = torch.randn(len(found), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        wanted = difference(model, frozen_cispo if config.loss == "cispo" else objective, direction)
        assert (found @ direction).item() == pytest.approx(wanted, rel=1e-5, abs=1e-7)


def test_gradient_of_the_critics_loss():
    torch.manual_seed(0)
    critic = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    states, returns = torch.randn(30, 4, dtype=torch.float64), torch.randn(30, dtype=torch.float64)
    old, weights = critic(states)[:, 0].detach() + 0.3 * returns, torch.rand(30, dtype=torch.float64)

    def objective() -> torch.Tensor:
        return value_loss(critic(states)[:, 0], old, returns, weights, 0.2)[0]

    objective().backward()
    found = torch.cat([p.grad.flatten() for p in critic.parameters() if p.grad is not None])
    direction = torch.randn(len(found), dtype=torch.float64)
    assert (found @ direction).item() == pytest.approx(difference(critic, objective, direction), rel=1e-5)
