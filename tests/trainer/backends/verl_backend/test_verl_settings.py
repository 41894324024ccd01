"""verl's configuration from ours: what follows, what the `verl:` section changes, and what verl refuses."""

import importlib.util
from pathlib import Path

import pytest

if importlib.util.find_spec("verl") is None:
    pytest.skip("needs harnessrl[verl]: make test-verl", allow_module_level=True)

from harnessrl.config import Config, load_config
from harnessrl.trainer.backends.verl.settings import verl_settings

pytestmark = pytest.mark.verl
ROOT = Path(__file__).parents[4]
TINY = ROOT / "tests" / "assets" / "tiny"


def settings(**sections: dict):
    return verl_settings(Config.model_validate(sections), str(TINY), 0, on_cpu=False).actor_rollout_ref


def test_the_users_section_wins_over_what_follows_from_the_others() -> None:
    sections = {"optim": {"lr": 1e-5, "warmup_updates": 3}, "engine": {"max_len": 9000}}
    ours = settings(**sections)
    assert (ours.actor.strategy, ours.actor.optim.lr, ours.actor.optim.lr_warmup_steps) == ("fsdp2", 1e-5, 4)
    assert ours.actor.ppo_max_token_len_per_gpu == ours.rollout.max_model_len == 9000
    nested = {"actor_rollout_ref": {"actor": {"fsdp_config": {"param_offload": True}, "optim": {"lr": 2e-5}}}}
    theirs = settings(**sections, verl=nested)
    assert theirs.actor.fsdp_config.param_offload and theirs.actor.optim.lr == 2e-5
    dotted = {"+actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space": 4}
    assert settings(verl=dotted).rollout.engine_kwargs.vllm.swap_space == 4


def test_megatron_is_verls_own_choice() -> None:
    parts = settings(verl={"model_engine": "megatron", "actor_rollout_ref": {"actor": {"megatron": {"seed": 7}}}})
    assert parts.actor.strategy == "megatron" and parts.actor.megatron.seed == 7


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"actor_rollout_ref": {"actor": {"learning_rate": 1}}}, "learning_rate"),
        ({"model_engine": "nosuch"}, "nosuch"),
        ({"actor_rollout_ref": {"actor": {"loss_agg_mode": "median"}}}, "Invalid loss_agg_mode: median"),
        ({"actor_rollout_ref.actor.ulysses_sequence_parallel_size": 2,
          "actor_rollout_ref.model.use_remove_padding": False}, "must enable `use_remove_padding`"),
        ({"actor_rollout_ref": {"rollout": {"mode": "sync"}}}, "Rollout mode 'sync' has been removed"),
        ({"actor_rollout_ref": {"actor": {"use_dynamic_bsz": False}}}, "must stay true"),
    ],
)  # fmt: skip
def test_what_verl_refuses_is_said_in_its_words(section: dict, message: str) -> None:
    with pytest.raises(ValueError, match="configuration: verl: ") as refused:
        settings(verl=section)
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["one_node", "four_nodes"])
@pytest.mark.parametrize("schedule", ["synchronous", "collocated"])
def test_the_examples_for_clusters_are_accepted(name: str, schedule: str) -> None:
    example = ROOT / "examples" / "cluster" / f"{name}.yaml"
    groups = load_config(example).collect.groups_per_update
    in_flight = groups if schedule == "synchronous" else 2 * groups
    config = load_config(example, [f"collect.groups_in_flight={in_flight}"])
    assert config.agent.k8s and config.controller.runner == "none" and Path(config.data.train).exists()
    tree = verl_settings(config, str(TINY), 0, on_cpu=False)
    parts, gpus = tree.actor_rollout_ref, tree.trainer.nnodes * tree.trainer.n_gpus_per_node
    assert parts.rollout.max_model_len == config.engine.max_len
    ranks = parts.actor.ulysses_sequence_parallel_size
    assert ranks * parts.actor.ppo_max_token_len_per_gpu >= config.engine.max_len
    assert gpus % (ranks * parts.rollout.tensor_model_parallel_size) == 0
