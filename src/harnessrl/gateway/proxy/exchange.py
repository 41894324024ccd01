"""One HTTP request and its answer on bare ASGI: no framework stands in the way of a model call."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

import orjson

from harnessrl.gateway.chat.canonical import RequestError
from harnessrl.schemas import Json

__all__ = ["ClientGone", "Exchange", "Headers"]

T = TypeVar("T")
Headers = Iterable[tuple[bytes, bytes]]
_JSON = (b"content-type", b"application/json")
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class ClientGone(Exception):
    """The harness has closed its connection."""


class Exchange:
    def __init__(
        self,
        scope: Json,
        receive: Callable[[], Awaitable[Json]],
        send: Callable[[Json], Awaitable[None]],
    ):
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.method: str = scope["method"]
        self.gone = False
        """The client has left."""
        self.started = False
        """The answer's head is out."""
        self._receive = receive
        self._send = send
        self._watch: asyncio.Task[None] | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._work: asyncio.Task[Any] | None = None
        self._wrote_at = 0.0

    async def body(self, limit: int) -> bytearray:
        """The request's body; raises `RequestError` (413) beyond `limit` bytes and `ClientGone`."""
        too_large = RequestError(f"The request is larger than {limit} bytes", 413, "request_too_large")
        length = self.headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > limit:
            raise too_large
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body += message.get("body", b"")
            if len(body) > limit:
                raise too_large
            if not message.get("more_body"):
                return body

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work`, but stop it and raise `ClientGone` when the client leaves."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_client())
        self._work = task = asyncio.create_task(work)
        try:
            if self.gone:
                task.cancel()
            return await task
        except asyncio.CancelledError:
            if self.gone and task.cancelled():
                raise ClientGone from None
            task.cancel()
            raise
        finally:
            self._work = None

    def keep_alive(self, seconds: float) -> None:
        """From now on an event stream is kept open by a comment after each silence of that length."""
        self._wrote_at = time.monotonic()
        self._ticker = asyncio.create_task(self._tick(seconds))

    async def answer(self, status: int, body: bytes, headers: Headers = ()) -> bool:
        """Send a whole JSON answer; True if the client was there to the last byte."""
        delivered = await self._still_there()
        self.close()
        self.started = True
        length = (b"content-length", b"%d" % len(body))
        await self._send({"type": "http.response.start", "status": status, "headers": [_JSON, length, *headers]})
        await self._send({"type": "http.response.body", "body": b"" if self.method == "HEAD" else body})
        return delivered

    async def answer_json(self, status: int, value: Any, headers: Headers = ()) -> bool:
        return await self.answer(status, orjson.dumps(value), headers)

    async def write(self, data: bytes, headers: Headers = ()) -> None:
        """A piece of an event stream, its head before the first."""
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": [*_EVENTS, *headers]})
        self._wrote_at = time.monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes, headers: Headers = ()) -> bool:
        """The last piece of an event stream; True if the client was there to the last byte."""
        await self.write(data, headers)
        delivered = await self._still_there()
        self.close()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        return delivered

    def close(self) -> None:
        for task in (self._watch, self._ticker):
            if task is not None:
                task.cancel()
        self._watch = self._ticker = None

    async def _still_there(self) -> bool:
        await asyncio.sleep(0)  # lets a disconnect that is already known be seen
        return not self.gone

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        if self._work is not None:
            self._work.cancel()

    async def _tick(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(max(self._wrote_at + seconds - time.monotonic(), 0.001))
            if time.monotonic() - self._wrote_at >= seconds:
                await self.write(b": keepalive\n\n")
