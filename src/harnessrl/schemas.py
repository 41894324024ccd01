"""The wire types: everything that the gateway, the controller and the trainer say to each other.

Rollout, Event and Endpoint keep the shapes of Agent Lightning v1.0. Fields that v1.0 does not know are
left out of an answer while they are unset, so that a strict v1.0 client sees exactly what it expects.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
)

State = Literal["queuing", "running", "succeeded", "failed"]
Change = State | Literal["deleted"]
TERMINAL: frozenset[str] = frozenset({"succeeded", "failed"})
FailureKind = Literal["agent", "infra"]
Mode = Literal["train", "val"]
Json = dict[str, Any]

ROLLOUT_ID = r"^[^/\x00-\x1f]{1,200}$"
"""A rollout id is one path segment: no slash, no control characters."""
UNADDRESSABLE = frozenset({"terminal", "stream", "consumed", ".", ".."})
"""Ids that the routes or the URL's own rules would shadow."""


class Wire(BaseModel):
    """Base of the wire types; the names in `extensions` are left out of the JSON while they are None."""

    extensions: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _leave_out_unset_extensions(self, handler: SerializerFunctionWrapHandler) -> Json:
        return {k: v for k, v in handler(self).items() if v is not None or k not in self.extensions}


# ---------------------------------------------------------------------------------------- rollouts


class LocalRun(Wire):
    """How the local runner starts an agent: a `command`, or v1.0's `agent_class`."""

    extensions = frozenset(
        {"command", "cwd", "copy_cwd", "env", "preload", "setup", "evaluate", "memory_mb", "cpu_seconds"}
    )

    agent_class: str | None = None
    """`pkg.mod:Class` (or `pkg.mod.Class`); its `run()`, sync or async, is called."""
    env_map: dict[str, str] = {}
    """Environment variables filled from the task: `input` or `input.a.b`; anything else is literal."""
    command: list[str] | None = None
    """argv of the agent; each item is a Jinja template over `input`, `rollout_id` and `metadata`."""
    cwd: str | None = None
    """Working directory; default: a fresh temporary directory."""
    copy_cwd: bool | None = None
    """Run in a fresh copy of `cwd` instead of in `cwd` itself."""
    env: dict[str, str] | None = None
    """Further environment variables, templates as in `command`."""
    preload: list[str] | None = None
    """Python modules that a warm interpreter imports once; a `[python, script.py, …]` command is then forked
    from it instead of paying for its imports again."""
    setup: list[str] | None = None
    """Run to completion before the agent starts; a failure is infrastructure's."""
    evaluate: list[str] | None = None
    """Run after the agent ended, with a key that may reward."""
    memory_mb: Annotated[int, Field(ge=16)] | None = None
    """Most memory of a process of the rollout (its data segment: beyond that, allocations fail)."""
    cpu_seconds: Annotated[int, Field(ge=1)] | None = None
    """Most CPU time of a process of the rollout; one that needs more is killed, as at a time-out."""


class KubernetesRun(Wire):
    extensions = frozenset({"image", "command", "env", "resources", "user", "cwd", "setup", "evaluate"})

    job_template: str | None = None
    """A Jinja template of a `batch/v1` Job, as in v1.0 (`job_name`, `input`, filter `yaml_escape`)."""
    image: str | None = None
    command: list[str] | None = None
    """argv, templates as for the local runner; unset: the image's own."""
    env: dict[str, str] | None = None
    resources: Json | None = None
    """`requests` and `limits` of the container, as Kubernetes takes them."""
    user: Annotated[int, Field(ge=0)] | None = None
    """User id; 0 is root. Unset: the image's own, which must not be root."""
    cwd: str | None = None
    """Working directory; default: the image's own. With `setup` or `evaluate` a fresh folder, by default
    `/rollout`, which they share with the agent."""
    setup: list[str] | None = None
    """Run to completion before the agent, in a container like its own; a failure is infrastructure's."""
    evaluate: list[str] | None = None
    """Run after the agent ended well, in a container like its own, with a key that may reward."""


class RolloutConfig(Wire):
    extensions = frozenset({"max_attempts", "reward_from", "priority"})

    timeout_seconds: Annotated[int, Field(gt=0)] = 3600
    local: LocalRun | None = None
    k8s: KubernetesRun | None = None
    max_attempts: Annotated[int, Field(ge=1)] | None = None
    """Tries in all when the infrastructure fails (default 1); an agent's failure is never retried."""
    reward_from: Literal["agent", "evaluator"] | None = None
    """Whose reward counts; default `evaluator` where an evaluation command is set, else `agent`."""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    """Higher starts first; default 0."""

    @property
    def evaluated(self) -> bool:
        """It has an evaluation command, which runs within the attempt."""
        return any(run is not None and run.evaluate is not None for run in (self.local, self.k8s))


class Metadata(Wire):
    model_config = ConfigDict(extra="allow")
    extensions = frozenset({"group_id"})

    batch_idx: int | None = None
    sample_idx_in_batch: int | None = None
    group_id: str | None = None
    """The rollouts of one task that are compared with each other."""


class RolloutStatus(Wire):
    extensions = frozenset({"failure_kind", "held_seconds"})

    state: State = "queuing"
    k8s_job_name: str | None = None
    last_attempt_id: str | None = None
    error_message: str | None = None
    version: int = 1
    created_at: float
    updated_at: float
    failure_kind: FailureKind | None = None
    """Who owns the failure: `agent`'s are outcomes and train, `infra`'s are retried or dropped."""
    held_seconds: float | None = None
    """Seconds that this rollout's calls waited at the gateway for updates; not counted against its timeout."""


class NewRollout(Wire):
    """What `POST /api/rollouts` takes, in a list; a known `rollout_id` returns the stored rollout."""

    input: Any
    is_train: bool = True
    config: RolloutConfig = RolloutConfig()
    metadata: Metadata = Metadata()
    rollout_id: Annotated[str, Field(pattern=ROLLOUT_ID)] | None = None

    @field_validator("rollout_id", mode="before")
    @classmethod
    def _addressable(cls, rollout_id: Any) -> Any:
        if isinstance(rollout_id, str) and rollout_id in UNADDRESSABLE:
            raise ValueError(f"{rollout_id!r} can't be the id of a rollout")
        return None if rollout_id == "" else rollout_id


class Rollout(Wire):
    rollout_id: str
    input: Any
    is_train: bool
    config: RolloutConfig
    metadata: Metadata
    status: RolloutStatus


class RolloutDetail(Wire):
    rollout: Rollout
    attempts: list[str]


class StatusPatch(Wire):
    """`PATCH /api/rollouts/{id}`'s `status`; unknown fields and states are refused."""

    model_config = ConfigDict(extra="forbid")

    state: State | None = None
    k8s_job_name: str | None = None
    last_attempt_id: str | None = None
    error_message: str | None = None


class TerminalItem(Wire):
    rollout_id: str
    state: State
    data_id: str
    is_train: bool


class TerminalPage(Wire):
    """Rollouts in the order in which they ended, `after` the given cursor."""

    items: list[TerminalItem]
    next_after: int
    total_terminal: int


# ------------------------------------------------------------------------- the controller's part


class ClaimRequest(Wire):
    controller: str
    lease_seconds: Annotated[float, Field(gt=0)] = 30


class Claim(Wire):
    """A rollout that is now this controller's to run: its attempt and the keys to hand out."""

    rollout: Rollout
    attempt_id: str
    agent_key: str
    """Scoped to this rollout and attempt; void when the attempt ends."""
    evaluator_key: str | None = None
    """Set where the rollout's config has an evaluation command."""


class AttemptEnd(Wire):
    """How an attempt ended, as its controller saw it.

    The gateway, which knows the calls and the rewards, decides what it means: see `Rollout.status`.
    """

    ok: bool
    error_message: str | None = None
    failure_kind: FailureKind | None = None
    """None lets the gateway decide by evidence: `agent` if the model was called, else `infra`."""


class LeaseRenewal(Wire):
    controller: str
    lease_seconds: Annotated[float, Field(gt=0)] = 30
    rollout_ids: list[str]


class LeaseState(Wire):
    """Answer to a renewal. What is not in `kept` is no longer this controller's: stop it."""

    kept: list[str]
    held_seconds: dict[str, float]
    """Of the kept ones: seconds to add to their deadlines."""


# ------------------------------------------------------------------------------------------ events


class NewEvent(Wire):
    event_type: str
    data: Json = {}


class Event(Wire):
    event_type: str
    rollout_id: str
    attempt_id: str
    timestamp: float
    data: Json


# ------------------------------------------------------------------------------------------- models


class Endpoint(Wire):
    """A registered engine. Without a `kind` it is a chat endpoint, as in v1.0."""

    extensions = frozenset({"kind", "tokenizer", "renderer", "max_model_len", "trainable"})

    model: str
    endpoint: str
    """Base URL; a chat endpoint's ends in `/v1`, a token endpoint's is the server's root."""
    version: int = 0
    """The policy version of its weights: optimizer updates seen."""
    kind: Literal["chat", "token"] | None = None
    tokenizer: str | None = None
    """Token endpoints: folder or hub name of the tokenizer."""
    renderer: Json | None = None
    """Token endpoints: the renderer's configuration, e.g. `{"name": "chatml"}` or `{"name": "qwen3"}`."""
    max_model_len: int | None = None
    trainable: bool | None = None
    """False for frozen helpers and judges: their calls are recorded but never trained. Default true."""


# -------------------------------------------------------------------------------------------- calls


class Call(Wire):
    """One model call as captured, token ids and log-probabilities from the engine.

    The prompt is stored as a difference: it is the first `shared` ids of the context (prompt + sampled) of
    the call `parent`, followed by `new_prompt_ids`. `harnessrl.client.full_prompts` puts it together.
    """

    extensions = frozenset({"arrays"})

    call_id: str
    rollout_id: str
    attempt_id: str
    index: int
    """Position in the attempt, by start time, from 0."""
    mode: Mode
    agent: str | None = None
    """Name of the agent within the harness, where known (component of interest)."""
    model: str
    dialect: str
    parent: str | None = None
    shared: int = 0
    new_prompt_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float] | None
    """Of `sampled_ids`, natural log, of the distribution sampled from; None if the engine gave none."""
    versions: list[tuple[int, int]]
    """Policy versions of `sampled_ids`, run-length coded: (version, tokens)."""
    arrays: dict[str, list[Any]] | None = None
    """Further arrays of numbers by name (expert routing, sampling masks); the first axis goes by `sampled_ids`."""
    temperature: float
    finish_reason: str | None
    delivered: bool
    """The harness received the whole answer (design, invariant 3)."""
    trainable: bool
    untrainable_reason: str | None = None
    """Why not: helper model, forced tool, constrained by a grammar, capture failed, …"""
    capture_failed: bool = False
    """The call ran but its tokens are not known: the whole rollout is unusable for training."""
    continuity: str
    """`exact`, `first`, or `rendered(REASON)`."""
    started_at: float
    latency_ms: float
    held_ms: float = 0
    prefilled_again: int = 0
    """Tokens of its context that were computed once more, because the call was cut by an update and went on."""
    error: Json | None = None


# ---------------------------------------------------------------------------------------------- runs


class RunRecord(Wire):
    """What a trainer reports of its run, for those who watch it.

    `start` and `end` of a process that trains it, a `phase` that begins, an update's `metrics`, an `alarm`.
    """

    extensions = frozenset({"id"})

    id: int | None = None
    """Order of arrival, over all runs: the cursor of the run's records. Given by the gateway."""
    kind: Literal["start", "phase", "metrics", "alarm", "end"]
    at: float
    """By the trainer's clock."""
    data: Json = {}


class Run(Wire):
    """A training run that reports, or has reported, to this gateway."""

    run_id: str
    """Its rollouts' group ids begin with it."""
    started_at: float
    last_at: float
    """Of its last record."""
    start: Json
    """The newest `start` record's data."""
    ended: bool
    heard_seconds_ago: float | None = None
    """Since its trainer was last heard of; None: not since this gateway began."""


# --------------------------------------------------------------------------------------------- proxy


class Pause(Wire):
    """`POST /proxy/pause`. Requests are held, not failed, up to the gateway's `--hold-seconds`."""

    retry_after_seconds: float = 5
    reason: str | None = None
    rest: Literal["drain", "cut"] = "drain"
    """What becomes of calls in flight: let them finish, or stop them and go on after `resume`."""


class ProxyState(Wire):
    paused: bool
    retry_after_seconds: float
    reason: str | None
    inflight: int
    """Calls that an engine is working on; 0 means at rest."""
