"""On-policy rows of the tiny model: sampled from a backend's own endpoint, with made-up advantages."""

from pathlib import Path

import httpx
import numpy as np

from harnessrl.config import Config
from harnessrl.trainer.backends.torch import TorchBackend
from harnessrl.trainer.batch import Step, Update
from harnessrl.trainer.rows import Row

TINY = str(Path(__file__).parents[2] / "assets" / "tiny")


def config(**sections: dict) -> Config:
    return Config.model_validate(
        {"model": {"path": TINY}, "optim": {"lr": 1e-3}, "engine": {"max_len": 256, "max_batch": 4}, **sections}
    )


def sample(backend: TorchBackend, prompt: list[int], tokens: int = 8) -> tuple[list[int], list[float]]:
    body = {
        "token_ids": prompt,
        "sampling_params": {"max_tokens": tokens, "temperature": 1.0, "logprobs": 1},
    }
    url = backend.endpoints()[0].endpoint
    choice = (
        httpx.post(f"{url}/inference/v1/generate", json=body, timeout=300).raise_for_status().json()["choices"][0]
    )
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


def rows(backend: TorchBackend, count: int = 6) -> list[Row]:
    """On-policy rows that share prompts, with made-up advantages."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 300, size=n).tolist() for n in (20, 30)]
    made = []
    for i in range(count):
        prompt = prompts[i % 2]
        ids, logprobs = sample(backend, prompt)
        n, p = len(prompt) + len(ids), len(prompt)
        row = Row(
            rollout_id=f"r{i}",
            group_id=f"g{i % 2}",
            ids_T=np.array(prompt + ids, dtype=np.int32),
            mask_T=np.arange(n) >= p,
            logprobs_T=np.full(n, np.nan, dtype=np.float32),
            versions_T=np.zeros(n, dtype=np.int32),
            temperatures_T=np.ones(n, dtype=np.float32),
            calls_T=np.where(np.arange(n) >= p, 0, -1).astype(np.int32),
            advantages_T=np.full(n, (-1.0) ** (i // 2), dtype=np.float32),
            rewards_T=np.zeros(n, dtype=np.float32),
            weights_T=np.full(n, 1 / (count * len(ids)), dtype=np.float32),
        )
        row.logprobs_T[p:] = logprobs
        made.append(row)
    return made


def update_of(*steps: list[Row]) -> Update:
    return Update([Step([], step, len(step)) for step in steps], {}, {})
