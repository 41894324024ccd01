"""Ray, the workers and the rollout servers: everything of verl that the driver touches, in one thin file.

The order around an update is verl's own for a collocated trainer: abort, sleep, train, hand the weights over (which
wakes the servers), drop caches, go on.
"""

import contextlib
import io
import logging
import signal
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from verl.checkpoint_engine import CheckpointEngineManager
from verl.protocol import DataProtoFuture
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.llm_server import LLMServerManager

from harnessrl.trainer.algorithm import AlgorithmConfig
from harnessrl.trainer.backends.verl.worker import PolicyWorker, loss

__all__ = ["Cluster"]

POLL_SECONDS = 0.2
PROCESSES = 3
"""Worker groups that may share a device, as verl reckons: workers, rollout servers, one more."""
QUIET = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}


class Cluster:
    """Blocking calls; `stop` makes the one under way, and all later ones, raise InterruptedError."""

    def __init__(self, settings: DictConfig, algorithm: AlgorithmConfig, copy: bool):
        """`copy`: keep a frozen one of the model, as the reference of `score`."""
        self._settings, self._has_copy = settings, copy
        self._entropy = settings.actor_rollout_ref.actor.calculate_entropy or algorithm.entropy_coef > 0
        self._stopping = threading.Event()
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            _start_ray(settings)
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # verl prints
                self._start(algorithm, "actor_rollout_ref" if copy else "actor_rollout")
        except BaseException:
            self.close()
            raise

    def _start(self, algorithm: AlgorithmConfig, role: str) -> None:
        trainer, parts = self._settings.trainer, self._settings.actor_rollout_ref
        pool = RayResourcePool([trainer.n_gpus_per_node] * trainer.nnodes, max_colocate_count=PROCESSES)
        self._workers: Any = RayWorkerGroup(
            resource_pool=pool,
            ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(PolicyWorker), config=parts, role=role),
            device_name=trainer.device,
            ray_wait_register_center_timeout=trainer.ray_wait_register_center_timeout,
        )
        self._workers.init_model()
        self._workers.set_loss_fn(partial(loss, algorithm))
        self.ranks = max(self._workers._query_dispatch_info("actor")) + 1
        """Data-parallel ones: into how many equal parts a batch is divided."""
        servers: Any = LLMServerManager.create(
            config=self._settings, worker_group=self._workers, rollout_resource_pool=pool
        )
        self.urls = [f"http://{address}" for address in servers.get_addresses()]
        replicas = servers.get_replicas()
        hand_over = omega_conf_to_dataclass(parts.rollout.checkpoint_engine)
        self._replicas: Any = CheckpointEngineManager(config=hand_over, actor_wg=self._workers, replicas=replicas)
        self._replicas.sleep_replicas()

    def rest(self) -> None:
        """Bring the rollout servers to rest and free what memory they share with the workers."""
        self._replicas.abort_replicas()
        self._replicas.sleep_replicas()

    def publish(self, version: int) -> None:
        """Hand the weights over as this version, without a key or value of the old ones, and serve."""
        self._replicas.update_weights(global_steps=version)
        for replica in self._replicas.replicas:
            ray.get([server.clear_kv_cache.remote() for server in replica.servers])
        self._replicas.resume_generation_replicas()

    def score(self, batch: TensorDict, reference: bool = False) -> list[np.ndarray]:
        """Log-probabilities of all tokens, by row, under the current weights or the reference's: the frozen copy,
        or without one the base model under the adapter. A row's first token, which nothing predicts, has 0."""
        without_adapter = reference and not self._has_copy
        tensordict_utils.assign_non_tensor(batch, compute_loss=False, no_lora_adapter=without_adapter)
        method = self._workers.score_reference if reference and self._has_copy else self._workers.score
        rows = tensordict_utils.get(self._call(method, batch), "log_probs").unbind()
        return [np.append(np.float32(0), row.float().numpy()[:-1]) for row in rows]

    def train_step(self, batch: TensorDict, first_of_update: bool) -> dict[str, Any]:
        """One optimizer step; its metrics: sums and vectors by token (see `worker.loss`), `loss`, `grad_norm`."""
        tensordict_utils.assign_non_tensor(batch, first_of_update=first_of_update, calculate_entropy=self._entropy)
        return tensordict_utils.get(self._call(self._workers.train_step, batch), "metrics")

    def save(self, folder: Path) -> None:
        """Each rank its part, in verl's own form; the whole model is in `huggingface/`."""
        self._workers.save_checkpoint(str(folder))

    def load(self, folder: Path) -> None:
        self._workers.load_checkpoint(str(folder))

    def stop(self) -> None:
        self._stopping.set()

    def close(self) -> None:
        if self._owns_ray:
            ray.shutdown()

    def _call(self, method: Any, batch: TensorDict) -> TensorDict:
        future: DataProtoFuture = method(batch)
        pending: Sequence[Any] = future.futures
        while pending:
            if self._stopping.is_set():
                raise InterruptedError
            _, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_SECONDS)
        return future.get()


def _start_ray(settings: DictConfig) -> None:
    """Join the cluster that `ray_kwargs.ray_init.address` names, or start one of this machine's."""
    given = settings.ray_kwargs.ray_init
    environment = OmegaConf.merge(get_ppo_ray_runtime_env(settings), given.get("runtime_env", {}))
    options: Any = OmegaConf.to_container(OmegaConf.create({**given, "runtime_env": environment}))
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(**{**QUIET, **options})
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray puts its own in place, which would not end the run in order
