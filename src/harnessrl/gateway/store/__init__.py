"""What the gateway keeps, as a protocol.

Every method that changes something returns after the change is durable (invariant 11). `NotFound` and
`Conflict` are what a caller has to expect; `StoreError` says that nothing can be written (a full disk).
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from harnessrl.gateway.store.browse import Search
from harnessrl.schemas import (
    TERMINAL,
    AttemptEnd,
    Call,
    Change,
    Endpoint,
    Event,
    Json,
    LeaseState,
    Mode,
    NewRollout,
    Rollout,
    Run,
    RunRecord,
    State,
    StatusPatch,
    TerminalPage,
)

__all__ = ["Access", "CallRecord", "Conflict", "NotFound", "Store", "StoreError", "UnderWay"]


class NotFound(Exception):
    """No such rollout (or it was deleted)."""


class Conflict(Exception):
    """The rollout is in a state that does not allow this."""


class StoreError(Exception):
    """The store can't be opened or written; the message says why, in a sentence."""


@dataclass(frozen=True, slots=True)
class Access:
    """What decides whether an attempt may still call the model or append events; cheap to ask for."""

    state: State
    tries: int
    """Attempts that a controller has claimed so far; 0 for v1.0's controllers, which claim nothing."""
    reward_from: Literal["agent", "evaluator"]

    def open(self, attempt_id: str) -> bool:
        """False once the attempt has ended. Attempts that nobody claimed (v1.0) end with their rollout."""
        if self.state in TERMINAL:
            return False
        if self.tries == 0 or not attempt_id.isdecimal():
            return True
        current = self.tries - 1 if self.state == "running" else self.tries
        return int(attempt_id) >= current


def _no_ids() -> np.ndarray:
    return np.zeros(0, dtype=np.int32)


@dataclass(slots=True)
class CallRecord:
    """One model call as the proxy hands it to the store: whole; the store keeps the difference to `parent`."""

    call_id: str
    rollout_id: str
    attempt_id: str
    mode: Mode
    dialect: str
    model: str
    endpoint: str
    model_version: int
    agent: str | None
    started_at: float
    request: Json
    """As sent upstream (chat endpoints) or as received (token endpoints)."""
    response: Json = field(default_factory=dict)
    """The answer in its dialect, without token ids and log-probabilities (kept in the arrays below)."""
    prompt_ids: np.ndarray = field(default_factory=_no_ids)
    """int32, whole."""
    sampled_ids: np.ndarray = field(default_factory=_no_ids)
    """int32."""
    logprobs: np.ndarray | None = None
    """float32, of `sampled_ids`."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    temperature: float = 1.0
    continuity: str = "first"
    parent: str | None = None
    """Call whose context the prompt continues, if any; the store shares its ids and messages with it."""
    latency_ms: float = 0.0
    http_status: int = 200
    status: str = "ok"
    """`ok` or `error`."""
    delivered: bool = False
    trainable: bool = True
    untrainable_reason: str | None = None
    capture_failed: bool = False
    held_ms: float = 0
    retry_count: int = 0
    prefilled_again: int = 0
    usage: Json | None = None
    finish_reason: str | None = None
    error: Json | None = None
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    """Further named per-token arrays (expert routing, sampling masks)."""

    def fail(self, http_status: int, reason: str | None, error: Json) -> None:
        self.http_status, self.status, self.error = http_status, "error", error
        self.trainable, self.untrainable_reason = False, reason


class UnderWay(NamedTuple):
    """A call that has begun and not ended."""

    call_id: str
    rollout_id: str
    attempt_id: str
    mode: Mode
    dialect: str
    started_at: float


class Store(Protocol):
    async def create_rollouts(self, new: Sequence[NewRollout]) -> list[Rollout]:
        """Create all or none; a known `rollout_id` returns the stored rollout unchanged."""
        ...

    async def get_rollout(self, rollout_id: str) -> Rollout: ...

    async def access(self, rollout_id: str) -> Access:
        """From memory for rollouts in use, so that each proxied call can ask."""
        ...

    async def attempts(self, rollout_id: str) -> list[str]:
        """Attempt ids that have events or calls, in the order of their first."""
        ...

    async def list_rollouts(self, states: Sequence[State], limit: int) -> bytes:
        """Queuing ones by priority, then age; others by age. As JSON: lists are long and asked for often."""
        ...

    async def terminal(self, after: int, limit: int) -> TerminalPage: ...

    async def patch_status(self, rollout_id: str, patch: StatusPatch) -> Rollout: ...

    async def delete_rollout(self, rollout_id: str) -> None: ...

    async def claim(self, rollout_id: str, controller: str, lease_seconds: float) -> tuple[Rollout, str]:
        """Compare-and-set queuing → running under a lease; returns the rollout and its new attempt id."""
        ...

    async def renew(self, controller: str, rollout_ids: Sequence[str], lease_seconds: float) -> LeaseState: ...

    async def end_attempt(self, rollout_id: str, attempt_id: str, end: AttemptEnd) -> Rollout: ...

    async def requeue_expired(self) -> list[str]:
        """Rollouts whose controller's lease ran out: queued again if attempts are left, else failed (infra)."""
        ...

    async def add_event(
        self, rollout_id: str, attempt_id: str, event_type: str, data: Json, late: bool = False
    ) -> Event:
        """`late`: even though the attempt has ended (else `Conflict`)."""
        ...

    async def events(
        self, rollout_id: str, attempt_id: str | None = None, event_type: str | None = None
    ) -> list[Event]:
        """In insertion order, of the last attempt by default, as v1.0 does.

        Calls appear as v1.0 `model_request` events, rebuilt whole; their token ids are NumPy arrays.
        """
        ...

    async def add_call(self, call: CallRecord) -> None:
        """`Conflict` if the attempt has ended meanwhile; a known `call_id` changes nothing."""
        ...

    async def note_under_way(self, begun: Sequence[UnderWay], ended: Sequence[str]) -> None:
        """Calls that began, ids of those that ended. What is under way at a kill is a failed call afterwards."""
        ...

    async def set_delivered(self, call_id: str, delivered: bool) -> None: ...

    async def calls(self, rollout_id: str, attempt_id: str | None = None) -> list[Call]:
        """In the order of their start, of the last attempt by default."""
        ...

    async def call_records(self, rollout_id: str, attempt_id: str) -> list[CallRecord]:
        """Whole calls, for rebuilding the proxy's memory of a live rollout after a restart."""
        ...

    async def add_held_seconds(self, rollout_id: str, seconds: float) -> None: ...

    async def endpoints(self) -> list[Endpoint]: ...

    async def put_endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        """Add, or replace what has the same model and URL."""
        ...

    async def delete_endpoints(self) -> None: ...

    async def get_setting(self, name: str) -> Any:
        """A small JSON value kept over restarts (signing key, pause state); None if unset."""
        ...

    async def put_setting(self, name: str, value: Any) -> None: ...

    async def add_run_records(self, run_id: str, records: Sequence[RunRecord]) -> None: ...

    async def runs(self) -> list[Run]:
        """Newest first."""
        ...

    async def run_records(self, run_id: str, after: int) -> list[RunRecord]:
        """Those with a greater `id` than `after`."""
        ...

    def follow_run(self, run_id: str, after: int) -> AsyncIterator[RunRecord]:
        """The same, then what comes, for ever."""
        ...

    async def find(self, search: Search) -> Json: ...

    async def find_groups(self, search: Search) -> Json: ...

    async def facets(self, run: str | None) -> Json: ...

    async def counts(self) -> Json: ...

    async def mark_consumed(self, rollout_ids: Sequence[str]) -> None:
        """The trainer is done with these: they may be removed (see `retain`); unknown ids are ignored."""
        ...

    async def retain(self, keep_seconds: float | None, keep_bytes: int | None) -> int:
        """Remove the oldest consumed rollouts beyond these bounds; returns how many."""
        ...

    async def size_bytes(self) -> int: ...

    def backlog(self) -> int:
        """Writes that wait for their commit."""
        ...

    def changes(self, after: int | None) -> AsyncIterator[tuple[int, str, Change]]:
        """(cursor, rollout id, state) of each state change or deletion, from `after` on, then live."""
        ...

    async def close(self) -> None: ...
