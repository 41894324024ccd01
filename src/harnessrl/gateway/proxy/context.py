"""What a call needs: the parts that all calls share, and where this one belongs."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from harnessrl.gateway.metrics import Metrics
from harnessrl.gateway.proxy.attempts import Attempt
from harnessrl.gateway.proxy.engine import Engines
from harnessrl.gateway.proxy.gate import Gate
from harnessrl.gateway.proxy.probe import Probe
from harnessrl.gateway.proxy.routing import Routing
from harnessrl.gateway.settings import Settings
from harnessrl.gateway.store import CallRecord, Store
from harnessrl.schemas import Endpoint, Mode

__all__ = ["Context", "Services"]

_log = structlog.get_logger("proxy")


@dataclass(frozen=True, slots=True)
class Services:
    store: Store
    settings: Settings
    gate: Gate
    engines: Engines
    routing: Routing
    metrics: Metrics
    probe: Probe

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

    def candidates(self, model: str, rollout_id: str) -> list[Endpoint]:
        """The endpoints that serve `model` now, in the order in which the rollout tries them."""
        return self.engines.order(self.routing.serving(model), rollout_id)


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

    @contextmanager
    def at_engine(self, gate: Gate) -> Iterator[None]:
        """While an engine works on the call."""
        begun = time.perf_counter()
        try:
            with gate.call():
                yield
        finally:
            self.upstream += time.perf_counter() - begun

    async def pass_gate(self, services: Services) -> None:
        """Raises `Paused` after the gateway's `hold_seconds`."""
        if services.gate.is_open:
            return
        try:
            with self.attempt.holding():
                self.held += await services.gate.wait_open()
        finally:
            await self.attempt.note_held(services.store)
