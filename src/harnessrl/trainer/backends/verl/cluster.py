"""Ray, the workers and the rollout servers: everything of verl that the driver touches, in one thin file.

The order around an update is verl's own for a collocated trainer: abort, sleep, train, hand the weights over (which
wakes the servers), drop caches, go on.
"""

import contextlib
import io
import logging
import math
import signal
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from verl.checkpoint_engine import CheckpointEngineManager
from verl.plugin.platform import get_platform
from verl.protocol import DataProtoFuture
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.rollout.llm_server import LLMServerManager

from harnessrl.trainer.algorithm import AlgorithmConfig
from harnessrl.trainer.backends.verl.worker import PolicyWorker, critic_loss, loss

__all__ = ["Cluster"]

CRITIC = "critic"
FREE_SECONDS = 60
POLL_SECONDS = 0.2
PROCESSES = 3
"""That may share a device, as verl reckons: worker, critic, rollout server."""
QUIET = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}


class Cluster:
    """Blocking calls; `stop` makes the one under way, and all later ones, raise InterruptedError."""

    def __init__(self, settings: DictConfig, algorithm: AlgorithmConfig, copy: bool):
        """`copy`: keep a frozen one of the model, as the reference of `score`."""
        self._settings, self._has_copy = settings, copy
        self._entropy = settings.actor_rollout_ref.actor.calculate_entropy or algorithm.entropy_coef > 0
        self._workers: Any = None
        self._critic: Any = None
        self._stopping = threading.Event()
        _start_ray(settings)
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # verl prints
                self._start(algorithm, "actor_rollout_ref" if copy else "actor_rollout")
        except BaseException:
            self.close()
            raise

    def _start(self, algorithm: AlgorithmConfig, role: str) -> None:
        trainer, parts = self._settings.trainer, self._settings.actor_rollout_ref
        _check_devices(trainer.n_gpus_per_node * trainer.nnodes)
        pool = RayResourcePool([trainer.n_gpus_per_node] * trainer.nnodes, max_colocate_count=PROCESSES)

        def workers(kind: type, **arguments: Any) -> Any:
            return RayWorkerGroup(
                resource_pool=pool,
                ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(kind), **arguments),
                device_name=trainer.device,
                ray_wait_register_center_timeout=trainer.ray_wait_register_center_timeout,
            )

        if self._settings.critic.enable:
            self._critic = workers(TrainingWorker, config=_critic_config(self._settings))
            self._critic.reset()
            self._critic.set_loss_fn(partial(critic_loss, algorithm))
        self._workers = workers(PolicyWorker, config=parts, role=role)
        self._workers.init_model()
        self._workers.set_loss_fn(partial(loss, algorithm))
        meshes = [(self._workers, "actor"), (self._workers, "ref"), (self._critic, "train")]
        used = [meshes[0], *meshes[1:2] * self._has_copy, *meshes[2:] * bool(self._critic)]
        self.ranks = math.lcm(*(max(group._query_dispatch_info(mesh)) + 1 for group, mesh in used))
        """Into how many equal parts a batch can be divided, by the data-parallel ranks of each model."""
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
        return _by_row(self._call(method, batch), "log_probs")

    def train_step(self, batch: TensorDict, first_of_update: bool) -> dict[str, Any]:
        """One optimizer step; its metrics: sums and vectors by token (see `worker.loss`), `loss`, `grad_norm`,
        `lr`."""
        tensordict_utils.assign_non_tensor(batch, first_of_update=first_of_update, calculate_entropy=self._entropy)
        return tensordict_utils.get(self._call(self._workers.train_step, batch), "metrics")

    def values(self, batch: TensorDict) -> list[np.ndarray]:
        """The critic's, of the state before each token, by row; 0 for a row's first."""
        tensordict_utils.assign_non_tensor(batch, compute_loss=False)
        return _by_row(self._call(self._critic.infer_batch, batch), "values")

    def train_critic(self, batch: TensorDict) -> dict[str, Any]:
        """One optimizer step; as `train_step`."""
        return tensordict_utils.get(self._call(self._critic.train_batch, batch), "metrics")

    def save(self, folder: Path) -> None:
        """Each rank its part, in verl's own form; the whole model is in `huggingface/`."""
        self._workers.save_checkpoint(str(folder))
        if self._critic:
            self._critic.save_checkpoint(str(folder / CRITIC))

    def load(self, folder: Path) -> None:
        self._workers.load_checkpoint(str(folder))
        if self._critic:
            self._critic.load_checkpoint(str(folder / CRITIC))

    def stop(self) -> None:
        self._stopping.set()

    def close(self) -> None:
        ray.shutdown()

    def _call(self, method: Any, batch: TensorDict) -> TensorDict:
        future: DataProtoFuture = method(batch)
        pending: Sequence[Any] = future.futures
        while pending:
            if self._stopping.is_set():
                raise InterruptedError
            _, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_SECONDS)
        return future.get()


def _by_row(found: TensorDict, name: str) -> list[np.ndarray]:
    """What a forward pass says of the next token, moved to that token."""
    rows = tensordict_utils.get(found, name).unbind()
    return [np.append(np.float32(0), row.float().numpy()[:-1]) for row in rows]


def _critic_config(settings: DictConfig) -> TrainingWorkerConfig:
    critic = omega_conf_to_dataclass(settings.critic)
    critic.engine.max_token_len_per_gpu = critic.ppo_max_token_len_per_gpu
    critic.engine.infer_max_token_len_per_gpu = critic.ppo_infer_max_token_len_per_gpu
    return TrainingWorkerConfig(
        model_type="value_model",
        model_config=critic.model,
        engine_config=critic.engine,
        optimizer_config=critic.optim,
        checkpoint_config=critic.checkpoint,
    )


def _check_devices(wanted: int) -> None:
    """ValueError if there are too few, or not enough free soon: verl would wait for them for ever."""
    name, deadline = get_platform().ray_resource_name(), time.monotonic() + FREE_SECONDS
    total = int(ray.cluster_resources().get(name, 0))
    while (free := int(ray.available_resources().get(name, 0))) < wanted:
        if total < wanted or time.monotonic() > deadline:
            raise ValueError(
                f"configuration: verl: trainer.n_gpus_per_node x trainer.nnodes is {wanted}, but of the cluster's "
                f"{total} are {free} free: lower them, or name a larger cluster by ray_kwargs.ray_init.address"
            )
        time.sleep(POLL_SECONDS)


def _start_ray(settings: DictConfig) -> None:
    """Join the cluster that `ray_kwargs.ray_init.address` names, or start one of this machine's."""
    given = settings.ray_kwargs.ray_init
    environment = OmegaConf.merge(get_ppo_ray_runtime_env(settings), given.get("runtime_env", {}))
    options: Any = OmegaConf.to_container(OmegaConf.create({**given, "runtime_env": environment}))
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(**{**QUIET, **options})
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray puts its own in place, which would not end the run in order
