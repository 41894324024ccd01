"""The sampler against hand-worked distributions."""

import math
import random

import pytest
import torch

from harnessrl.engine.sampling import Sampling, sample, truncate

LOGITS = torch.tensor([0.1, 0.4, 0.0, 0.3, 0.2]).log()


def draw(sampling: Sampling, uniform: float, logits: torch.Tensor = LOGITS) -> tuple[int, float]:
    ids, logprobs = sample(logits[None], [sampling], [uniform])
    return ids[0], math.exp(logprobs[0])


@pytest.mark.parametrize(
    ("uniform", "token"),
    [(0.0, 0), (0.0999, 0), (0.1001, 1), (0.4999, 1), (0.5001, 3), (0.7999, 3), (0.8001, 4), (1.0, 4)],
)
def test_inverts_the_cumulative_distribution(uniform: float, token: int) -> None:
    expected = [0.1, 0.4, 0.0, 0.3, 0.2][token]
    assert draw(Sampling(1), uniform) == (token, pytest.approx(expected, abs=1e-6))


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([0.0, 1.0, 0.0]).log()
    assert {draw(Sampling(1), u, logits)[0] for u in (0.0, 0.5, 1 - 1e-9, 1.0)} == {1}


def test_temperature() -> None:
    # p^2 / sum p^2 = (0.01, 0.16, 0, 0.09, 0.04) / 0.3
    token, probability = draw(Sampling(1, temperature=0.5), 0.5)
    assert (token, probability) == (1, pytest.approx(0.16 / 0.3))


def test_greedy_beside_sampled() -> None:
    rows = torch.stack([LOGITS, LOGITS])
    ids, logprobs = sample(rows, [Sampling(1, temperature=0), Sampling(1)], [0.99, 0.99])
    assert ids == [1, 4]
    assert [math.exp(p) for p in logprobs] == pytest.approx([0.4, 0.2])


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(1, top_k=2), {1: 4 / 7, 3: 3 / 7}),
        (Sampling(1, top_p=0.65), {1: 4 / 7, 3: 3 / 7}),
        (Sampling(1, top_p=0.75), {1: 4 / 9, 3: 3 / 9, 4: 2 / 9}),
        (Sampling(1, min_p=0.6), {1: 4 / 7, 3: 3 / 7}),
        (Sampling(1, top_k=3, top_p=0.7), {1: 4 / 7, 3: 3 / 7}),
        (Sampling(1, top_p=1e-6), {1: 1.0}),
    ],
)
def test_truncation_is_normalised(sampling: Sampling, kept: dict[int, float]) -> None:
    probabilities = truncate(LOGITS, sampling).exp()
    expected = torch.tensor([kept.get(token, 0.0) for token in range(5)])
    torch.testing.assert_close(probabilities, expected, atol=1e-6, rtol=0)


def test_frequencies() -> None:
    torch.manual_seed(0)
    logits = torch.randn(50) * 2
    rng = random.Random(0)
    count = 20_000
    ids, _ = sample(logits.expand(count, 50), [Sampling(1)] * count, [rng.random() for _ in range(count)])
    seen = torch.bincount(torch.tensor(ids), minlength=50) / count
    expected = logits.softmax(-1)
    deviation = (seen - expected) / (expected * (1 - expected) / count).sqrt()
    assert deviation.abs().max() < 4.5
