"""The gateway as one ASGI application.

A plain dispatcher stands at the top: model calls go straight to the proxy, without routing or middleware;
everything else is FastAPI's.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import AsyncExitStack
from typing import Any, Self

from fastapi import FastAPI

from harnessrl.gateway.api import build_api
from harnessrl.gateway.auth import Auth
from harnessrl.gateway.proxy.gate import Gate
from harnessrl.gateway.settings import Settings
from harnessrl.gateway.store import Store
from harnessrl.gateway.store.sqlite import SqliteStore

try:
    from harnessrl.gateway.proxy.app import ProxyApp  # pyright: ignore
except ImportError:
    from harnessrl.gateway.proxy.placeholder import ProxyApp

__all__ = ["Gateway", "create_app"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_LEASE_CHECK_SECONDS = 1.0


class Gateway:
    """Use as an asynchronous context manager, or through ASGI's lifespan."""

    store: Store
    gate: Gate
    auth: Auth
    proxy: ProxyApp
    api: FastAPI

    def __init__(self, settings: Settings):
        self.settings = settings
        self.ending = asyncio.Event()
        """Set when the gateway begins to end: what would wait for ever returns."""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        settings = self.settings
        async with AsyncExitStack() as stack:
            self.store = await SqliteStore.open(settings.store)
            stack.push_async_callback(self.store.close)
            self.auth = Auth(settings.key, settings.loopback)
            self.gate = Gate(self.store, settings.hold_seconds)
            await self.gate.load()
            self.proxy = ProxyApp(self.store, settings, self.auth, self.gate)
            await self.proxy.start()
            stack.push_async_callback(self.proxy.close)
            self.api = build_api(self)
            leases = asyncio.create_task(self._watch_leases())
            stack.callback(leases.cancel)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.begin_drain()
        await self._stack.aclose()

    def begin_drain(self) -> None:
        """From now on nobody is kept waiting; calls in flight run out."""
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

    async def _watch_leases(self) -> None:
        while True:
            await asyncio.sleep(_LEASE_CHECK_SECONDS)
            await self.store.requeue_expired()


def create_app(settings: Settings) -> Gateway:
    return Gateway(settings)
