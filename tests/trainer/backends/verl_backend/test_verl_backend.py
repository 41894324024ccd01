"""verl's own workers on a CPU (Ray, FSDP2 on gloo) against the torch backend: same rows, same update."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

if importlib.util.find_spec("verl") is None:
    pytest.skip("needs harnessrl[verl]: make test-verl", allow_module_level=True)

from transformers import AutoModelForCausalLM  # noqa: E402

from harnessrl.config import Config  # noqa: E402
from harnessrl.trainer.backends import Backend  # noqa: E402
from harnessrl.trainer.backends.torch import TorchBackend  # noqa: E402
from harnessrl.trainer.backends.verl.backend import VerlBackend  # noqa: E402
from harnessrl.trainer.batch import Step, Update  # noqa: E402
from harnessrl.trainer.rows import Row  # noqa: E402

pytestmark = pytest.mark.verl
TINY = str(Path(__file__).parents[3] / "assets" / "tiny")


def config(ranks: int = 1, **sections: dict) -> Config:
    return Config.model_validate(
        {
            "model": {"path": TINY},
            "optim": {"lr": 1e-3, "warmup_updates": 1},
            "engine": {"max_len": 128, "max_batch": 4},
            "train": {"micro_batch_tokens": 128},
            "verl": {"trainer": {"n_gpus_per_node": ranks}},
            **sections,
        }
    )


def sample(backend: Backend, prompt: list[int], server: int = 0) -> tuple[list[int], list[float]]:
    body = {"token_ids": prompt, "sampling_params": {"max_tokens": 8, "temperature": 0.8, "logprobs": 1}}
    url = backend.endpoints()[server].endpoint
    choice = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=30).json()["choices"][0]
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


def rows(backend: Backend, count: int = 7) -> list[Row]:
    """On-policy rows of different lengths, sampled by all servers, with made-up advantages; the first one's
    log-probabilities are not known."""
    rng = np.random.default_rng(0)
    made = []
    for i in range(count):
        prompt = rng.integers(3, 300, size=10 + 9 * i).tolist()
        ids, logprobs = sample(backend, prompt, i % len(backend.endpoints()))
        n, p = len(prompt) + len(ids), len(prompt)
        mask = np.arange(n) >= p
        made.append(
            Row(
                rollout_id=f"r{i}",
                group_id=f"g{i % 2}",
                ids_T=np.array(prompt + ids, dtype=np.int32),
                mask_T=mask,
                logprobs_T=np.array([np.nan] * p + (logprobs if i else [np.nan] * len(ids)), dtype=np.float32),
                versions_T=np.where(mask, backend.version, -1).astype(np.int32),
                temperatures_T=np.where(mask, 0.8, 1).astype(np.float32),
                calls_T=np.where(mask, 0, -1).astype(np.int32),
                advantages_T=np.full(n, (-1.0) ** (i // 2), dtype=np.float32),
                rewards_T=np.zeros(n, dtype=np.float32),
                weights_T=np.full(n, 1 / (count * len(ids)), dtype=np.float32),
            )
        )
    return made


def update_of(*steps: list[Row]) -> Update:
    return Update([Step([], step, len(step)) for step in steps], {}, {})


def weights(backend: Backend, folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    backend.save(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def test_a_critic_learns_and_a_resumed_backend_goes_on_alike(tmp_path: Path) -> None:
    settings = {"trainer": {"n_gpus_per_node": 1}, "critic": {"optim": {"lr": 1e-3}}}
    gae = config(algorithm={"advantage": "gae"}, optim={"lr": 1e-4}, verl=settings)
    backend = VerlBackend(gae)
    made = rows(backend)
    for row in made:
        row.rewards_T[-1] = 1.0
    errors = [backend.update(update_of(made))["policy/value_error"] for _ in range(8)]
    assert errors[-1] < 0.5 * errors[0]
    saved = weights(backend, tmp_path / "saved")
    expected = backend.update(update_of(made))
    backend.close()
    resumed = VerlBackend(gae, checkpoint=tmp_path / "saved", lineage=2)
    try:
        assert resumed.version == resumed.endpoints()[0].version == 2_000_008
        again = weights(resumed, tmp_path / "again")
        assert all(torch.equal(saved[name], again[name]) for name in saved)
        assert resumed.update(update_of(made)) == pytest.approx(expected, rel=1e-3, abs=1e-5)
    finally:
        resumed.close()


def test_too_few_devices_are_said_and_not_waited_for() -> None:
    few = {"trainer": {"n_gpus_per_node": 2}, "ray_kwargs": {"ray_init": {"num_gpus": 1}}}
    with pytest.raises(ValueError, match="is 2, but of the cluster's 1 are 1 free"):
        VerlBackend(config(verl=few))


CLIP: dict = {"kl_coef": 0.1, "entropy_coef": 0.01}


@pytest.fixture(scope="module", params=[(1, CLIP), (2, CLIP), (1, {"loss": "dpo"})], ids=["1", "2", "dpo"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[VerlBackend, TorchBackend]]:
    """The same model on verl, with one or two ranks, and on torch."""
    ranks, algorithm = request.param
    on_torch = TorchBackend(config(algorithm=algorithm))
    on_verl = VerlBackend(config(ranks, algorithm=algorithm))
    yield on_verl, on_torch
    on_verl.close()
    on_torch.close()


def test_an_update_is_that_of_the_torch_backend(pair: tuple[VerlBackend, TorchBackend], tmp_path: Path) -> None:
    """Loss, gradient and all other metrics, with micro-batches, a reference, and two optimizer steps; and where
    the parameters went."""
    on_verl, on_torch = pair
    before = weights(on_torch, tmp_path / "before")
    made = rows(on_torch)
    found, expected = (backend.update(update_of(made[:3], made[3:])) for backend in pair)
    for metrics in (found, expected):
        metrics.pop("policy/dpo_accuracy", None)  # a matter of signs, and all margins are 0 in the first step
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)
    after, wanted = weights(on_verl, tmp_path / "verl"), weights(on_torch, tmp_path / "torch")
    assert max((wanted[name] - before[name]).abs().max() for name in wanted) > 5e-4
    assert max((after[name] - wanted[name]).abs().max() for name in wanted) < 1e-4


def test_after_each_hand_over_the_servers_and_the_workers_agree(pair: tuple[VerlBackend, TorchBackend]) -> None:
    on_verl, _ = pair
    for _ in range(3):
        metrics = on_verl.update(update_of(rows(on_verl)))
        assert metrics["policy/gap_fresh"] < 1e-5 and metrics["policy/gap_p99"] < 1e-4
        assert metrics["policy/ratio"] == pytest.approx(1)
        assert {endpoint.version for endpoint in on_verl.endpoints()} == {on_verl.version}
