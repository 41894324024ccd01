"""What every route shares: who may call it, strict JSON in, fast JSON out."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any

import orjson
from fastapi import Depends, HTTPException, Path, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel

from harnessrl.gateway.auth import ROUTES, Caller
from harnessrl.gateway.body import read_json

if TYPE_CHECKING:
    from harnessrl.gateway.app import Gateway
else:
    Gateway = Any  # which imports this module

__all__ = ["AttemptId", "CallerDep", "GatewayDep", "GuardedRoute", "RolloutId", "RunId", "answer", "event_stream"]

_KEEP_ALIVE_SECONDS = 15.0
_SEGMENT = r"^[^/\x00-\x1f]+$"
RolloutId = Annotated[str, Path(pattern=_SEGMENT, max_length=200)]
AttemptId = Annotated[str, Path(pattern=_SEGMENT, max_length=200)]
RunId = Annotated[str, Path(pattern=_SEGMENT, max_length=200)]


def answer(value: Any, status: int = 200) -> Response:
    body = orjson.dumps(value, default=_dump, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, status, media_type="application/json")


def _dump(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump()
    raise TypeError(type(value).__name__)


def event_stream(items: AsyncIterator[Any], ending: asyncio.Event) -> Response:
    """Server-sent events, one for each item, until `ending`."""
    return StreamingResponse(_events(items, ending), media_type="text/event-stream")


async def _events(items: AsyncIterator[Any], ending: asyncio.Event) -> AsyncIterator[bytes]:
    end = asyncio.create_task(ending.wait())
    item = asyncio.ensure_future(anext(items))
    yield b": hello\n\n"
    try:
        while not ending.is_set():
            await asyncio.wait([item, end], timeout=_KEEP_ALIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if item.done():
                yield b"data: " + orjson.dumps(item.result(), default=_dump) + b"\n\n"
                item = asyncio.ensure_future(anext(items))
            elif not ending.is_set():
                yield b": still here\n\n"
    finally:
        item.cancel()
        end.cancel()


class StrictRequest(Request):
    """A request whose body is bounded, of type JSON and parsed strictly."""

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            limit = self.app.state.gateway.settings.max_body_bytes
            too_large = HTTPException(413, f"The body is larger than {limit} bytes")
            length = self.headers.get("content-length", "0")
            if length.isdecimal() and int(length) > limit:
                raise too_large
            body = bytearray()
            async for chunk in self.stream():
                body += chunk
                if len(body) > limit:
                    raise too_large
            media_type = self.headers.get("content-type", "").partition(";")[0].strip().lower()
            if body and media_type != "application/json":
                raise HTTPException(415, "Send the body as content-type: application/json")
            self._body = bytes(body)
        return self._body

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            try:
                self._json = await read_json(await self.body())
            except ValueError as error:
                raise HTTPException(422, f"The body is not valid JSON: {error}") from error
        return self._json


class GuardedRoute(APIRoute):
    """Checks the caller against the table of `auth.ROUTES` before anything is read."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        (method,) = self.methods or set()
        roles = ROUTES[method, self.path_format]

        async def guarded(request: Request) -> Response:
            gateway: Gateway = request.app.state.gateway
            caller = gateway.auth.authorize(roles, request.url.path, request.scope["headers"])
            if caller.rollout_id is not None:
                path = request.path_params
                caller.check_scope(path.get("rollout_id"), path.get("attempt_id"))
                caller.check_open(await gateway.store.access(caller.rollout_id))
            request.state.caller = caller
            return await handle(StrictRequest(request.scope, request.receive))

        return guarded


async def _gateway(request: Request) -> Gateway:
    return request.app.state.gateway


async def _caller(request: Request) -> Caller:
    return request.state.caller


GatewayDep = Annotated[Gateway, Depends(_gateway)]
CallerDep = Annotated[Caller, Depends(_caller)]
