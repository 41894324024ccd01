"""verl on a CPU: its own workers on gloo, and our embedded engine as the rollout server.

For trying things out and for tests. verl loads this module wherever it is imported itself (`ENVIRONMENT`): it adds
a platform, an FSDP engine and a rollout engine by verl's registries, and mends three places that take a GPU for
granted.
"""

import functools
import inspect
import os
from collections.abc import Mapping
from contextlib import nullcontext
from types import ModuleType
from typing import Any

ENVIRONMENT = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": __name__}
os.environ |= ENVIRONMENT  # read when verl is imported

import ray  # noqa: E402
import torch  # noqa: E402
from transformers import AutoModelForTokenClassification  # noqa: E402
from verl.plugin.platform import PlatformBase, PlatformRegistry  # noqa: E402

__all__ = ["ENVIRONMENT", "ROLLOUT", "settings"]

ROLLOUT = "harnessrl"


def settings(ranks: int) -> dict[str, Any]:
    """What verl needs to be told on a CPU."""
    models, engines = ["actor_rollout_ref.model", "critic.model"], ["actor_rollout_ref.actor.fsdp_config"]
    engines += ["actor_rollout_ref.ref.fsdp_config", "critic.fsdp"]
    return {
        **{f"{model}.override_config": {"attn_implementation": "sdpa"} for model in models},
        **{f"{model}.use_remove_padding": False for model in models},
        **{f"{model}.enable_gradient_checkpointing": False for model in models},
        **{f"{engine}.use_torch_compile": False for engine in engines},
        "trainer.device": "cpu",
        "actor_rollout_ref.rollout.name": ROLLOUT,
        "actor_rollout_ref.rollout.free_cache_engine": False,
        "ray_kwargs.ray_init.runtime_env.env_vars": ENVIRONMENT,
        # Ray counts these, but binds nothing; a rank asks for 3 CPUs and a GPU, and would wait for them for ever.
        "ray_kwargs.ray_init.num_cpus": 4 * ranks + 4,
        "ray_kwargs.ray_init.num_gpus": ranks,
        "ray_kwargs.ray_init.object_store_memory": 1 << 29,
    }


def _device_module() -> ModuleType:
    module = ModuleType("harnessrl_cpu_device")
    vars(module).update(vars(torch.cpu))
    zero: dict[str, Any] = dict.fromkeys(
        ["max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"], lambda *_: 0
    )
    nothing = dict.fromkeys(["empty_cache", "synchronize", "set_device"], lambda *_: None)
    vars(module).update(
        zero | nothing,
        is_available=lambda: False,  # verl then skips what only a GPU has
        current_device=lambda: "cpu",
        get_device_name=lambda *_: "cpu",
        mem_get_info=lambda *_: (0, 0),
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
    )
    return module


class Cpu(PlatformBase):
    device_name = "cpu"  # type: ignore[assignment]  (verl declares properties)
    vendor_name = "cpu"  # type: ignore[assignment]
    device_module = _device_module()  # type: ignore[assignment]

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 0

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return nullcontext()

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


def _offload(policy: Any, pin_memory: bool = False) -> Any:
    return policy(pin_memory=False)


def _critic(local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool) -> Any:
    return AutoModelForTokenClassification.from_pretrained(local_path, dtype=torch_dtype, config=model_config)


PlatformRegistry.register(platform="cpu")(Cpu)

# These import what asks for the platform.
import verl.utils.distributed as distributed  # noqa: E402
import verl.utils.model as models  # noqa: E402
import verl.workers.engine.fsdp.transformer_impl as transformer_impl  # noqa: E402
import verl.workers.rollout.base as rollouts  # noqa: E402
from verl.workers.engine import EngineRegistry  # noqa: E402
from verl.workers.rollout.base import BaseRollout  # noqa: E402
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry  # noqa: E402

fsdp: Any = transformer_impl
EngineRegistry.register("language_model", ["fsdp", "fsdp2"], "cpu")(fsdp.FSDPEngineWithLMHead)
EngineRegistry.register("value_model", ["fsdp", "fsdp2"], "cpu")(fsdp.FSDPEngineWithValueHead)
# verl would ask for `cpu:gloo,cpu:gloo`, pin the memory of a frozen model for copies to a GPU, and load a critic
# with an attention that only a GPU has.
distributed.initialize_global_process_group_ray = functools.partial(
    distributed.initialize_global_process_group_ray, backend="cpu:gloo"
)
fsdp.CPUOffloadPolicy = functools.partial(_offload, fsdp.CPUOffloadPolicy)
models.load_valuehead_model = _critic


class Engine:
    """An embedded engine in a process of its own, behind its HTTP server."""

    def __init__(self, path: str, max_batch: int, max_len: int, seed: int):
        from harnessrl.engine.embedded import EmbeddedEngine
        from harnessrl.engine.model import load_model
        from harnessrl.engine.server import serve

        self._model = load_model(path)
        self._engine = EmbeddedEngine(self._model, max_batch=max_batch, max_len=max_len, seed=seed)
        self._engine.start()
        self._server = serve(self._engine, model="policy")

    def address(self) -> str:
        return self._server.url.removeprefix("http://")

    def load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        with self._engine.updating():
            self._model.load_state_dict(weights)
        self._engine.publish(version)

    def abort_all_requests(self, reject_request: bool = False) -> None:
        self._engine.pause()

    def resume_generation(self) -> None:
        self._engine.resume()

    def clear_kv_cache(self) -> None:
        self._engine.reset_prefix_cache()

    def sleep(self) -> None: ...

    def wake_up(self) -> None: ...


def _name(rank: int) -> str:
    return f"{ROLLOUT}-engine-{rank}"


class Replica(RolloutReplica):
    async def launch_servers(self) -> None:
        config, name = self.config, _name(self.replica_rank)
        server: Any = ray.remote(Engine).options(name=name, num_cpus=1, max_concurrency=4)
        handle = server.remote(
            self.model_config.path, config.max_num_seqs, config.max_model_len, config.seed + self.replica_rank
        )
        self.servers, self._server_handle = [handle], handle
        self._server_address = await handle.address.remote()


class Adapter(BaseRollout):
    """Lives in a worker and hands its weights to the engine of the same rank."""

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, wire_format: str = "named_tensors", **given: Any) -> None:
        if given.get("peft_config"):
            raise ValueError("backend: verl on a CPU trains whole models: set model.lora_rank=0")
        assert not inspect.isasyncgen(weights)
        tensors = {name: tensor.detach().clone() for name, tensor in weights}
        engine: Any = ray.get_actor(_name(torch.distributed.get_rank()))
        await engine.load.remote(tensors, given["global_steps"])


rollouts._ROLLOUT_REGISTRY[(ROLLOUT, "async")] = f"{__name__}.Adapter"
RolloutReplicaRegistry.register(ROLLOUT, lambda: Replica)
