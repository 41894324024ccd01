"""The `Backend` on verl's workers; the mathematics, the schedule and the wire are those of every backend."""

import importlib
import json
import logging
import os
import shutil
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import psutil
import structlog
import torch

from harnessrl.config import Config
from harnessrl.engine.model import PACKAGE, resolve
from harnessrl.schemas import Endpoint
from harnessrl.trainer.backends import LINEAGE
from harnessrl.trainer.backends.metrics import means, step_metrics
from harnessrl.trainer.batch import Update
from harnessrl.trainer.critic import critic_advantages
from harnessrl.trainer.loss import mean_metrics
from harnessrl.trainer.preference import dpo_advantages
from harnessrl.trainer.rows import Row

__all__ = ["VerlBackend"]

log = structlog.get_logger()

VECTORS = ("old", "sampled", "fresh")
Known = dict[str, dict[int, np.ndarray]]
"""Arrays by name and the row's `id`, by token."""
SHARDS = "verl"
"""In a checkpoint: what verl saves of each rank."""


class VerlBackend:
    """Implements `Backend`; starts Ray, the workers and the rollout servers, or joins the Ray cluster that
    `verl.ray_kwargs.ray_init.address` names."""

    def __init__(self, config: Config, checkpoint: Path | None = None, lineage: int = 0):
        """`checkpoint`: go on from it, as resumption number `lineage`, on as many ranks as wrote it."""
        began = time.monotonic()
        algorithm = config.algorithm
        self._config = config
        path = config.model.path
        local = path.startswith(PACKAGE) or Path(path).expanduser().is_dir()
        self._model = str(resolve(path)) if local else path
        """A folder that all nodes have, or a name on the hub."""
        on_cpu = config.model.device == "cpu" or (config.model.device == "auto" and not torch.cuda.is_available())
        _quiet()
        if on_cpu:
            importlib.import_module(f"{__package__}.cpu")
        from harnessrl.trainer.backends.verl.cluster import Cluster
        from harnessrl.trainer.backends.verl.settings import verl_settings

        settings = verl_settings(config, self._model, config.seed + lineage, on_cpu)
        self._refers = algorithm.kl_coef > 0 or algorithm.loss == "dpo"
        self._cluster = Cluster(settings, algorithm, self._refers and not config.model.lora_rank)
        self.version = lineage * LINEAGE
        try:
            if checkpoint:
                self._cluster.load(checkpoint / SHARDS)
                self.version += json.loads((checkpoint / "harnessrl.json").read_text())["version"] % LINEAGE
            self._cluster.publish(self.version)
            self._kinds: list[Literal["token", "chat"]] = [
                "token" if _takes_token_ids(url) else "chat" for url in self._cluster.urls
            ]
        except BaseException:
            self.close()
            raise
        log.info(
            "verl is ready",
            seconds=round(time.monotonic() - began, 1),
            ranks=self._cluster.ranks,
            gigabytes_here=_gigabytes(),
        )

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                model="policy",
                endpoint=url if kind == "token" else f"{url}/v1",
                version=self.version,
                kind=kind,
                tokenizer=self._model,
                renderer=self._config.model.renderer,
                max_model_len=self._config.engine.max_len,
            )
            for url, kind in zip(self._cluster.urls, self._kinds, strict=True)
        ]

    def update(self, update: Update) -> dict[str, float]:
        dpo = self._config.algorithm.loss == "dpo"
        self._cluster.rest()
        known: Known = self._values(update.rows) if self._config.algorithm.critic else {}
        if self._refers:
            known["reference"] = self._score(update.rows, reference=True)
        proximal = self._score(update.rows) if len(update.steps) > 1 else {}
        metrics: list[dict[str, float]] = []
        for number, step in enumerate(update.steps):
            if not step.rows:
                continue
            extra = self._prefer(step.rows, known["reference"]) if dpo else {}
            of_step = known | ({"proximal": proximal} if number else {})
            metrics.append(self._step(step.rows, of_step, extra, first_of_update=not metrics))
        self.version += 1
        self._cluster.publish(self.version)
        return means(metrics)

    def stop(self) -> None:
        """Make an update in another thread end with InterruptedError; the workers end with `close`."""
        self._cluster.stop()

    def save(self, folder: Path) -> None:
        """Each rank writes its shards: with several nodes, `folder` must be on a file system that they share."""
        self._cluster.save(folder.absolute() / SHARDS)
        for file in (folder / SHARDS / "huggingface").iterdir():
            shutil.move(file, folder / file.name)
        state = {"version": self.version, "renderer": self._config.model.renderer}
        (folder / "harnessrl.json").write_text(json.dumps(state, indent=2) + "\n")

    def close(self) -> None:
        self.stop()
        self._cluster.close()

    def _step(
        self, rows: Sequence[Row], known: Known, extra: dict[str, float], first_of_update: bool
    ) -> dict[str, float]:
        batch, _ = self._batch(rows, known)
        found = self._cluster.train_step(batch, first_of_update)
        parts = _by_micro_batch(found)
        old, sampled, fresh = (np.concatenate([part.pop(name) for part in parts]) for name in VECTORS)
        mean = extra | mean_metrics(parts) | {"loss": found["loss"]}
        if self._config.algorithm.critic:
            mean |= mean_metrics(_by_micro_batch(self._cluster.train_critic(batch)))
        return {"optim/lr": found["lr"]} | step_metrics(mean, found["grad_norm"], old, sampled, fresh)

    def _prefer(self, rows: Sequence[Row], reference: dict[int, np.ndarray]) -> dict[str, float]:
        """DPO's advantages, from the weights at the step's start."""
        current = self._score(rows)
        masked = [np.concatenate([known[id(row)][row.mask_T] for row in rows]) for known in (current, reference)]
        return dpo_advantages(rows, masked[0], masked[1], self._config.algorithm.dpo_beta)

    def _score(self, rows: Sequence[Row], reference: bool = False) -> dict[int, np.ndarray]:
        """Log-probabilities under the current weights, or those that the run began from."""
        if not rows:
            return {}
        batch, dealt = self._batch(rows, {})
        return _by_id(dealt, self._cluster.score(batch, reference))

    def _values(self, rows: Sequence[Row]) -> Known:
        """Set the rows' advantages by the critic; its values before the update and what they should have been."""
        if not rows:
            return {}
        batch, dealt = self._batch(rows, {})
        values = _by_id(dealt, self._cluster.values(batch))
        algorithm = self._config.algorithm
        trained = [values[id(row)][row.mask_T] for row in rows]
        returns = {id(row): np.zeros(len(row), dtype=np.float32) for row in rows}
        for row, found in zip(
            rows, critic_advantages(rows, trained, algorithm.gamma, algorithm.gae_lambda), strict=True
        ):
            returns[id(row)][row.mask_T] = found
        return {"old_values": values, "returns": returns}

    def _batch(self, rows: Sequence[Row], known: Known) -> tuple[Any, list[Row]]:
        from harnessrl.trainer.backends.verl.data import deal, to_batch

        dealt = deal(rows, self._cluster.ranks)
        return to_batch(dealt, self.version, known), dealt


def _by_id(dealt: Sequence[Row], found: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
    return {id(row): values for row, values in zip(dealt, found, strict=True) if row.mask_T.any()}


def _by_micro_batch(found: dict[str, Any]) -> list[dict[str, Any]]:
    """verl's metrics, which are by name, rank and micro-batch; what is not by micro-batch is left out."""
    flat = {name: sum(ranks, []) for name, ranks in found.items() if isinstance(ranks, list)}
    return [dict(zip(flat, values, strict=True)) for values in zip(*flat.values(), strict=True)]


def _takes_token_ids(url: str) -> bool:
    """Whether a rollout server has vLLM's `/inference/v1/generate`: it then refuses an empty request."""
    return httpx.post(f"{url}/inference/v1/generate", json={}, timeout=30).status_code not in (404, 405)


def _quiet() -> None:
    """Neither what verl and torch say of parts that are not used, nor what Ray would report home."""
    os.environ.setdefault("VERL_LOGGING_LEVEL", "WARN")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    warnings.filterwarnings("ignore", message=".* engine is not available")
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


def _gigabytes() -> float:
    """Memory of this process and those below it, Ray's and its workers, where it started Ray."""
    here = psutil.Process()
    return round(sum(p.memory_info().rss for p in [here, *here.children(recursive=True)]) / 1e9, 1)
