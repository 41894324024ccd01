"""`harnessrl serve`: the proxy without rollouts: same dialects, rendering and continuation, nothing recorded.

A deployed agent so sees the distribution that it was trained in. Each conversation, known by how it begins, has a
memory of its own; the least recently used ones are forgotten, and their next turn is rendered afresh.
"""

from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from hashlib import blake2b
from typing import Any

import orjson

from harnessrl.gateway.auth import Auth
from harnessrl.gateway.body import read_json
from harnessrl.gateway.metrics import Metrics
from harnessrl.gateway.proxy.app import ProxyApp
from harnessrl.gateway.proxy.gate import Gate
from harnessrl.gateway.settings import Settings
from harnessrl.gateway.store import Access, CallRecord, NotFound, UnderWay
from harnessrl.schemas import Endpoint

__all__ = ["ServeApp"]

_CONVERSATIONS = 1000


class _NoStore:
    """Knows the engine and which conversations are live; keeps nothing. What the proxy needs of a `Store`."""

    def __init__(self, endpoint: Endpoint):
        self._endpoint = endpoint
        self.live: OrderedDict[str, None] = OrderedDict()

    async def access(self, rollout_id: str) -> Access:
        if rollout_id not in self.live:
            raise NotFound(rollout_id)
        return Access("running", 0, "agent")

    async def endpoints(self) -> list[Endpoint]:
        return [self._endpoint]

    async def call_records(self, rollout_id: str, attempt_id: str) -> Sequence[CallRecord]:
        return []

    async def add_call(self, call: CallRecord) -> None:
        pass

    async def note_under_way(self, begun: Sequence[UnderWay], ended: Sequence[str]) -> None:
        pass

    async def set_delivered(self, call_id: str, delivered: bool) -> None:
        pass


class ServeApp:
    """An ASGI application; base URLs end in `/openai/v1` (or `/v1`) and `/anthropic`."""

    def __init__(self, endpoint: Endpoint, settings: Settings):
        self._store: Any = _NoStore(endpoint)
        self._settings = settings
        self._auth = Auth(settings.key, settings.loopback)
        gate = Gate(self._store, settings.hold_seconds)
        self._proxy = ProxyApp(self._store, settings, self._auth, gate, Metrics())

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        messages = [message async for message in _whole(receive, self._settings.max_body_bytes)]
        conversation = await _conversation(b"".join(m.get("body", b"") for m in messages))
        live = self._store.live
        live[conversation] = None
        live.move_to_end(conversation)
        while len(live) > _CONVERSATIONS:
            live.popitem(last=False)
        path = scope["path"]
        if not path.startswith(("/openai", "/anthropic")):
            path = ("/anthropic" if "/messages" in path else "/openai") + path
        path = f"/proxy/rollout/{conversation}/attempt/0/mode/val{path}"

        async def replay() -> Any:
            return messages.pop(0) if messages else await receive()

        await self._proxy({**scope, "path": path}, replay, send)

    async def _lifespan(self, receive: Any, send: Any) -> None:
        await receive()
        await self._proxy.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._proxy.close()
        await send({"type": "lifespan.shutdown.complete"})


async def _whole(receive: Any, limit: int) -> AsyncIterator[Any]:
    """The messages of a request's body, up to the one that passes the limit."""
    size = 0
    while True:
        message = await receive()
        yield message
        size += len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body") or size > limit:
            return


async def _conversation(raw: bytes) -> str:
    """A name for the conversation that a request belongs to: a digest of how it begins."""
    try:
        body = await read_json(raw)
    except ValueError:
        return "none"
    if not isinstance(body, dict):
        return "none"
    history = body.get("messages", body.get("input"))
    first = (
        next((m for m in history if isinstance(m, dict) and m.get("role") == "user"), None)
        if isinstance(history, list)
        else history
    )
    return blake2b(orjson.dumps([body.get("system"), first]), digest_size=16).hexdigest()
