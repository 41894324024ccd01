"""The torch backend on the tiny model: what an update does to the weights, and what it leaves on disk."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from on_policy import TINY, config, rows, sample, update_of
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from harnessrl.trainer.backends.torch import TorchBackend, takes_trees


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[TorchBackend]:
    backend = TorchBackend(config(**getattr(request, "param", {})))
    yield backend
    backend.close()


def weights(backend: TorchBackend, folder: Path) -> dict[str, torch.Tensor]:
    backend.save(folder)
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_straight_after_sampling_recomputed_and_captured_logprobs_agree(backend: TorchBackend) -> None:
    metrics = backend.update(update_of(rows(backend)))
    assert metrics["policy/gap"] < 1e-3
    assert metrics["policy/ratio"] == pytest.approx(1)
    assert metrics["policy/entropy"] > 0


def test_an_update_publishes_new_weights_under_the_next_version(backend: TorchBackend) -> None:
    first = rows(backend)
    backend.update(update_of(first))
    assert backend.version == backend.endpoints()[0].version == 1
    assert backend.update(update_of(rows(backend)))["policy/gap"] < 1e-3
    # The first rows are of the old policy now, and the gap shows it.
    assert backend.update(update_of(first))["policy/gap"] > 1e-2


@pytest.mark.parametrize("tokens", [40, 4096])
def test_neither_packing_nor_micro_batches_change_the_update(tokens: int, tmp_path: Path) -> None:
    plain = TorchBackend(config(train={"share_prefixes": False, "micro_batch_tokens": 1}))
    shared = TorchBackend(config(train={"share_prefixes": True, "micro_batch_tokens": tokens}))
    try:
        made = rows(plain)
        a, b = plain.update(update_of(made)), shared.update(update_of(made))
        assert a["policy/loss"] == pytest.approx(b["policy/loss"], abs=1e-5)
        assert a["optim/grad_norm"] == pytest.approx(b["optim/grad_norm"], rel=1e-4)
    finally:
        plain.close()
        shared.close()


def test_the_second_step_of_an_update_clips_against_the_policy_before_the_first(backend: TorchBackend) -> None:
    made = rows(backend)
    metrics = backend.update(update_of(made[:3], made[3:]))
    assert metrics["policy/ratio"] != pytest.approx(1, abs=1e-6)
    assert metrics["policy/gap"] < 1e-3


def test_a_gradient_that_is_not_finite_changes_no_weight(backend: TorchBackend, tmp_path: Path) -> None:
    before = weights(backend, tmp_path / "before")
    made = rows(backend)
    made[0].advantages_T[:] = np.nan
    assert backend.update(update_of(made))["optim/skipped"] == 1
    after = weights(backend, tmp_path / "after")
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("backend", [{}, {"model": {"path": TINY, "lora_rank": 4}}], indirect=True)
def test_a_checkpoint_loads_in_transformers_and_samples_alike(backend: TorchBackend, tmp_path: Path) -> None:
    backend.update(update_of(rows(backend)))
    backend.save(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompt = AutoTokenizer.from_pretrained(tmp_path).encode("CALC(12+")
    ids, logprobs = sample(backend, prompt)
    logits = model(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
    expected = [logits[len(prompt) + i - 1, token].item() for i, token in enumerate(ids)]
    assert logprobs == pytest.approx(expected, abs=1e-3)
    assert json.loads((tmp_path / "harnessrl.json").read_text()) == {"version": 1, "renderer": {"name": "chatml"}}


def test_only_models_that_attend_to_everything_take_several_rows_at_once() -> None:
    assert takes_trees(LlamaConfig()) and takes_trees(Qwen3Config())
    assert not takes_trees(Gemma3TextConfig()) and not takes_trees(MistralConfig(sliding_window=4096))


@pytest.mark.parametrize("backend", [{"algorithm": {"kl_coef": 0.1}}], indirect=True)
def test_the_reference_is_the_model_that_the_run_began_from(backend: TorchBackend) -> None:
    assert backend.update(update_of(rows(backend)))["policy/kl_reference"] == pytest.approx(0, abs=1e-6)
    assert backend.update(update_of(rows(backend)))["policy/kl_reference"] > 1e-6


@pytest.mark.parametrize("backend", [{"algorithm": {"loss": "dpo"}, "optim": {"lr": 1e-4}}], indirect=True)
def test_dpo_widens_the_margin_between_chosen_and_rejected(backend: TorchBackend) -> None:
    pairs = rows(backend, 4)
    first, second = backend.update(update_of(pairs)), backend.update(update_of(pairs))
    assert first["policy/dpo_margin"] == pytest.approx(0, abs=1e-5)
    assert second["policy/dpo_margin"] > 0 and second["policy/dpo_loss"] < first["policy/dpo_loss"]


@pytest.mark.parametrize("backend", [{"algorithm": {"advantage": "gae", "value_lr": 0.005}}], indirect=True)
def test_the_critic_learns_what_rollouts_earn(backend: TorchBackend, tmp_path: Path) -> None:
    made = rows(backend)
    for row in made:
        row.rewards_T[-1] = 1.0
    errors = [backend.update(update_of(made))["policy/value_error"] for _ in range(8)]
    assert errors[0] > 0.5 and errors[-1] < 0.5 * errors[0]
    backend.save(tmp_path)
    resumed = TorchBackend(config(algorithm={"advantage": "gae"}), checkpoint=tmp_path, lineage=1)
    again = resumed.update(update_of(made))["policy/value_error"]
    resumed.close()
    assert again == pytest.approx(backend.update(update_of(made))["policy/value_error"], rel=0.05)


@pytest.mark.parametrize(
    "backend",
    [
        {"algorithm": {"kl_coef": 0.1, "importance": "call_mask", "steps_per_update": 2}},
        {"algorithm": {"advantage": "gae"}},
        {"algorithm": {"loss": "dpo"}},
    ],
    indirect=True,
    ids=["all-terms", "critic", "dpo"],
)
def test_every_metric_is_documented(
    backend: TorchBackend, undocumented: Callable[[Iterable[str]], list[str]]
) -> None:
    made = rows(backend, 4)
    metrics = backend.update(update_of(made[:2], made[2:]))
    assert len(metrics) > 10 and undocumented(metrics) == []
