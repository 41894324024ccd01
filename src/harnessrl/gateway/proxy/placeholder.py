"""Stands where the proxy will be: every model call is answered 503."""

from typing import Any

from harnessrl.gateway.auth import Auth
from harnessrl.gateway.proxy.gate import Gate
from harnessrl.gateway.settings import Settings
from harnessrl.gateway.store import Store

__all__ = ["ProxyApp"]


class ProxyApp:
    def __init__(self, store: Store, settings: Settings, auth: Auth, gate: Gate):
        pass

    async def start(self) -> None:
        """Called once, in the event loop, before the first request."""

    async def close(self) -> None:
        pass

    async def endpoints_changed(self) -> None:
        """The registered engines are others now; returns when calls go by the new list."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b'{"error":"no model server"}'
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": body})
