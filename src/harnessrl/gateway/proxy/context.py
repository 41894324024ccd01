"""What a call needs: the parts that all calls share, and where this one belongs."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import structlog

from harnessrl.gateway.body import LARGE
from harnessrl.gateway.metrics import Metrics
from harnessrl.gateway.proxy.attempts import Attempt
from harnessrl.gateway.proxy.engine import EngineFailed, Engines
from harnessrl.gateway.proxy.gate import Gate, Paused
from harnessrl.gateway.proxy.routing import Routing
from harnessrl.gateway.settings import Settings
from harnessrl.gateway.store import CallRecord, Store
from harnessrl.schemas import Endpoint, Mode

__all__ = ["Context", "Services"]

T = TypeVar("T")
_log = structlog.get_logger("proxy")


@dataclass(frozen=True, slots=True)
class Services:
    store: Store
    settings: Settings
    gate: Gate
    engines: Engines
    routing: Routing
    metrics: Metrics

    async def keep(self, call: CallRecord, upstream_seconds: float) -> None:
        """Record a call; durable when this returns."""
        self.metrics.count(call)
        own = (call.latency_ms - call.held_ms) / 1000 - upstream_seconds
        self.metrics.added_latency.observe(max(own, 0.0))
        _log.debug(
            "call",
            rollout=call.rollout_id,
            dialect=call.dialect,
            status=call.http_status,
            continuity=call.continuity,
            prompt=len(call.prompt_ids),
            sampled=len(call.sampled_ids),
            ms=round(call.latency_ms, 1),
        )
        await self.store.add_call(call)

    def reachable(self, endpoints: Sequence[Endpoint]) -> bool:
        """Whether a call may go to one of them. Where not it waits: its trainer may be starting again."""
        return self.engines.reachable(endpoints) or bool(endpoints and not self.settings.hold_seconds)


@dataclass(slots=True)
class Context:
    attempt: Attempt
    mode: Mode
    call_id: str
    started_at: float
    clock: float
    """`time.perf_counter` at its start."""
    held: float = 0.0
    """Seconds that it waited at the gate."""
    upstream: float = 0.0
    """Seconds that engines worked on it."""
    size: int = 0
    """Bytes of its request."""

    async def aside(self, work: Callable[[], T]) -> T:
        """Do `work`, whose time goes by the request's size: a large one's beside the event loop."""
        return await asyncio.to_thread(work) if self.size > LARGE else work()

    @contextmanager
    def at_engine(self, gate: Gate) -> Iterator[None]:
        """While an engine works on the call."""
        begun = time.perf_counter()
        try:
            with gate.call():
                yield
        finally:
            self.upstream += time.perf_counter() - begun

    async def pass_gate(self, services: Services, ready: Callable[[], bool]) -> None:
        """Wait until the gate is open and `ready`.

        Raises `Paused` after the gateway's `hold_seconds`, `EngineFailed` where only `ready` was missing.
        """
        if services.gate.is_open and ready():
            return
        try:
            with self.attempt.holding():
                self.held += await services.gate.wait_open(ready)
        except Paused as paused:
            if paused.pause is None:
                raise EngineFailed("no engine serves this model now", 503, retry_after=5) from paused
            raise
        finally:
            await self.attempt.note_held(services.store)

    async def endpoint(self, services: Services, model: str, tries: int) -> Endpoint:
        """Where the call's next try goes, once it may. Raises as `pass_gate` does."""

        def serving() -> list[Endpoint]:
            return services.routing.serving(model)

        await self.pass_gate(services, lambda: services.reachable(serving()))
        order = services.engines.order(serving(), self.attempt.rollout_id)
        return order[tries % len(order)]
