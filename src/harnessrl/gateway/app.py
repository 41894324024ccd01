"""The gateway as one ASGI application.

A plain dispatcher stands at the top: model calls go straight to the proxy, without routing or middleware;
everything else is FastAPI's.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Literal, Self

import structlog
from fastapi import APIRouter, FastAPI

from harnessrl.gateway.api import build_api
from harnessrl.gateway.auth import Auth
from harnessrl.gateway.metrics import Metrics
from harnessrl.gateway.proxy.app import ProxyApp
from harnessrl.gateway.proxy.gate import Gate
from harnessrl.gateway.settings import Settings
from harnessrl.gateway.store import Store, StoreError
from harnessrl.gateway.store.sqlite import SqliteStore

__all__ = ["Gateway", "create_app"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_LEASE_CHECK_SECONDS = 1.0
_RETENTION_SECONDS = 60.0

_log = structlog.get_logger("gateway")


class Gateway:
    """Use as an asynchronous context manager, or through ASGI's lifespan."""

    store: Store
    gate: Gate
    auth: Auth
    metrics: Metrics
    proxy: ProxyApp
    api: FastAPI

    def __init__(self, settings: Settings, routers: Sequence[APIRouter] = ()):
        """routers: further routes, such as the dashboard's; each has its roles in `auth.ROUTES`."""
        self.settings = settings
        self.routers = routers
        self.last_heard: dict[tuple[str, str], float] = {}
        """When each trainer and controller was last heard of (`time.monotonic`), by kind and name."""
        self.ending = asyncio.Event()
        """Set when the gateway begins to end: what would wait for ever returns."""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        settings = self.settings
        async with AsyncExitStack() as stack:
            self.store = store = await SqliteStore.open(settings.store)
            stack.push_async_callback(self.store.close)
            self.auth = Auth(settings.key, settings.loopback)
            self.gate = Gate(self.store, settings.hold_seconds)
            await self.gate.load()
            self.metrics = Metrics()
            self.metrics.gauge("inflight", "Calls that an engine is working on.", lambda: self.gate.inflight)
            self.metrics.gauge("held", "Requests that wait for the gate to open.", lambda: self.gate.held)
            self.metrics.gauge("store_backlog", "Writes that wait for their commit.", store.backlog)
            self.proxy = ProxyApp(self.store, settings, self.auth, self.gate, self.metrics)
            await self.proxy.start()
            stack.push_async_callback(self.proxy.close)
            self.api = build_api(self)
            for watch in (
                _every(_LEASE_CHECK_SECONDS, self._give_back_leases),
                _every(_RETENTION_SECONDS, self._retain),
                self.metrics.watch_loop(),
            ):
                stack.callback(asyncio.create_task(watch).cancel)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.begin_drain()
        await self._stack.aclose()

    def heard(self, kind: Literal["trainer", "controller"], name: str) -> None:
        self.last_heard[kind, name] = time.monotonic()

    def silence(self, kind: Literal["trainer", "controller"], name: str) -> float | None:
        """Seconds since; None if it was never heard of."""
        at = self.last_heard.get((kind, name))
        return None if at is None else time.monotonic() - at

    def begin_drain(self) -> None:
        """From now on nobody is kept waiting; calls in flight run out."""
        if not self.ending.is_set() and (busy := self.proxy.busy()):
            _log.info("waiting for calls", seconds=self.settings.drain_seconds, attempts=busy)
        self.ending.set()
        self.gate.drain()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/proxy/rollout/"):
            await self.proxy(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await self.api(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await self.__aenter__()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.__aexit__()
        await send({"type": "lifespan.shutdown.complete"})

    async def _give_back_leases(self) -> None:
        for rollout_id in await self.store.requeue_expired():
            _log.warning("lease ran out", rollout_id=rollout_id)

    async def _retain(self) -> None:
        days, keep_bytes = self.settings.keep_days, self.settings.keep_bytes
        if days is None and keep_bytes is None:
            return
        if removed := await self.store.retain(None if days is None else days * 86_400, keep_bytes):
            _log.info("retention removed rollouts", rollouts=removed)


async def _every(seconds: float, job: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await job()
        except StoreError as error:  # a full disk may have room again
            _log.error("store", error=str(error))
        await asyncio.sleep(seconds)


def create_app(settings: Settings, routers: Sequence[APIRouter] = ()) -> Gateway:
    return Gateway(settings, routers)
