"""verl's own configuration tree: its defaults, then what follows from ours, then the `verl:` section.

verl checks it; what it refuses is shown in its words.
"""

import contextlib
import io
from collections.abc import Iterator, Mapping
from typing import Any

from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from verl.utils.config import omega_conf_to_dataclass, validate_config

from harnessrl.config import Config

__all__ = ["verl_settings"]

ENGINE = "model_engine"
"""verl's name for the choice between FSDP (`dp`), `megatron`, …: the one setting that selects others' files."""


def verl_settings(config: Config, model: str, seed: int, on_cpu: bool) -> DictConfig:
    """The resolved tree, checked; ValueError in one sentence. `model`: its folder or name."""
    section = dict(_leaves(config.verl))
    engine = section.pop(ENGINE, "dp")
    try:
        with initialize_config_module("verl.trainer.config", version_base=None):
            tree = compose("ppo_trainer", overrides=[f"{ENGINE}={engine}"])
        ours = _ours(config, model, seed, engine)
        if on_cpu:
            from harnessrl.trainer.backends.verl import cpu

            ours |= cpu.settings(section.get("trainer.n_gpus_per_node", 1))
        for name, value in ours.items():
            OmegaConf.update(tree, name, value, force_add=True)
        for name, value in section.items():
            OmegaConf.update(tree, name.lstrip("+"), value, force_add=name.startswith("+"))
        OmegaConf.resolve(tree)
        rollout = tree.actor_rollout_ref.rollout
        if not (tree.actor_rollout_ref.actor.use_dynamic_bsz and rollout.log_prob_use_dynamic_bsz):
            raise ValueError("use_dynamic_bsz must stay true: train.micro_batch_tokens sizes the micro-batches")
        with contextlib.redirect_stdout(io.StringIO()):
            validate_config(tree, use_reference_policy=False, use_critic=tree.critic.enable)
        omega_conf_to_dataclass(rollout)
    except (ValueError, AssertionError, NotImplementedError, HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"configuration: verl: {_plain(error)}") from error
    return tree


def _ours(config: Config, path: str, seed: int, engine: str) -> dict[str, Any]:
    """What of verl's follows from our sections."""
    model, optim, engine_size = config.model, config.optim, config.engine
    tokens = max(config.train.micro_batch_tokens, engine_size.max_len)
    settings: dict[str, Any] = {
        "trainer.n_gpus_per_node": 1,
        "ray_kwargs.ray_init.address": None,
        "actor_rollout_ref.model.path": path,
        "actor_rollout_ref.model.lora_rank": model.lora_rank,
        "actor_rollout_ref.model.lora_alpha": model.lora_alpha,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": tokens,
        "actor_rollout_ref.actor.calculate_entropy": True,
        "actor_rollout_ref.actor.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
        "actor_rollout_ref.actor.checkpoint.load_contents": ["model", "optimizer", "extra"],
        "actor_rollout_ref.actor.optim.lr": optim.lr,
        "actor_rollout_ref.actor.optim.betas": list(optim.betas),
        "actor_rollout_ref.actor.optim.weight_decay": optim.weight_decay,
        "actor_rollout_ref.actor.optim.clip_grad": optim.grad_clip,
        "actor_rollout_ref.actor.optim.total_training_steps": max(1, config.train.updates),
        "actor_rollout_ref.actor.optim.lr_warmup_steps": optim.warmup_updates + 1 if optim.warmup_updates else -1,
        "critic.enable": config.algorithm.critic,
        "critic.model.path": path,
        "critic.ppo_max_token_len_per_gpu": tokens,
        "critic.ppo_infer_max_token_len_per_gpu": tokens,
        "critic.optim.weight_decay": 0.0,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.dtype": model.dtype,
        "actor_rollout_ref.rollout.max_model_len": engine_size.max_len,
        "actor_rollout_ref.rollout.response_length": engine_size.max_len,
        "actor_rollout_ref.rollout.max_num_seqs": engine_size.max_batch,
        "actor_rollout_ref.rollout.seed": seed,
        "actor_rollout_ref.rollout.engine_kwargs.vllm.served_model_name": "policy",
        "actor_rollout_ref.rollout.engine_kwargs.sglang.served_model_name": "policy",
    }
    if engine == "dp":
        precision = "fp32" if model.dtype == "float32" else "bf16"
        mixed = {"param_dtype": precision, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
        settings |= {"actor_rollout_ref.actor.strategy": "fsdp2", "critic.strategy": "fsdp2"}
        for part in ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp"):
            settings |= {f"{part}.mixed_precision": mixed, f"{part}.seed": seed}
    return settings


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Full names and values. As in hydra, a `+` in front of a part adds what verl's files don't list."""
    for name, value in section.items():
        full = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{full}.")
        else:
            yield ("+" if "+" in full else "") + full.replace("+", ""), value


def _plain(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{text} (write +NAME to add one that verl's own files don't list)" if "not in struct" in text else text
