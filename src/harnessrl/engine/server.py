"""The engine over HTTP: the surface of a vLLM token endpoint, so that the gateway has one path for both.

A field that the engine would have to ignore is refused by name: what was asked for is what was sampled from.
"""

import asyncio
import contextlib
import socket
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
import uvicorn
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from harnessrl.engine.embedded import Answer, Delta, EmbeddedEngine, PromptTooLong, join
from harnessrl.engine.sampling import Sampling

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "stop": ([], ""),
    "include_stop_str_in_output": (False, True),
    "skip_special_tokens": (False, True),
    "spaces_between_special_tokens": (False, True),
    "detokenize": (False, True),
}
"""Fields of vLLM's sampling parameters that change nothing at these values, or at null; others are refused."""


class SamplingParams(BaseModel):
    model_config = ConfigDict(extra="allow")

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Default: the context that is left."""
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    stop_token_ids: list[int] | None = None
    """Besides the model's end-of-sequence token."""
    ignore_eos: bool = False
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    seed: int | None = None


class GenerateRequest(BaseModel):
    model: str | None = None
    request_id: str | None = None
    token_ids: list[int]
    sampling_params: SamplingParams = SamplingParams()
    stream: bool = False


class AbortRequest(BaseModel):
    request_ids: list[str]


def _json(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


def _refusal(message: str, status: int = 400, param: str | None = None, kind: str = "BadRequestError") -> Response:
    return _json({"error": {"message": message, "type": kind, "param": param, "code": status}}, status)


def _unsupported(params: SamplingParams) -> str | None:
    """The first field that would change what is sampled, and that the engine doesn't know."""
    for name, value in (params.model_extra or {}).items():
        if value is not None and value not in NEUTRAL.get(name, ()):
            return name
    return None


def _choice(token_ids: list[int], logprobs: list[float], reason: str | None, wanted: bool) -> dict[str, Any]:
    content = [
        {"token": f"token_id:{t}", "logprob": p, "bytes": None, "top_logprobs": []}
        for t, p in zip(token_ids, logprobs, strict=True)
    ]
    return {
        "index": 0,
        "token_ids": token_ids,
        "logprobs": {"content": content} if wanted else None,
        "finish_reason": reason,
    }


class _Server:
    def __init__(self, engine: EmbeddedEngine, model: str):
        self.engine = engine
        self.model = model
        self.app = Starlette(
            routes=[
                Route("/inference/v1/generate", self.generate, methods=["POST"]),
                Route("/inference/v1/abort_requests", self.abort, methods=["POST"]),
                Route("/pause", self.pause, methods=["POST"]),
                Route("/resume", self.resume, methods=["POST"]),
                Route("/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"]),
                Route("/health", self.health),
                Route("/v1/models", self.models),
                Route("/metrics", self.metrics),
            ]
        )

    async def generate(self, request: Request) -> Response:
        try:
            body = GenerateRequest.model_validate_json(await request.body())
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            return _refusal(f"{where or 'body'}: {first['msg']}", param=where or None)
        params = body.sampling_params
        if name := _unsupported(params):
            why = f"sampling_params.{name} is not supported by the embedded engine: leave it out"
            return _refusal(f"{why}.", param=name)
        deltas: asyncio.Queue[Delta] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def emit(delta: Delta) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(deltas.put_nowait, delta)

        request_id = body.request_id or f"generate-{uuid.uuid4().hex}"
        try:
            self.engine.submit(body.token_ids, self._sampling(params), emit, request_id)
        except PromptTooLong as error:
            return _refusal(str(error), param="token_ids", kind="context_length_exceeded")
        except ValueError as error:
            return _refusal(str(error), param="token_ids")
        except RuntimeError as error:
            return _refusal(str(error), 503, kind="ServiceUnavailableError")
        wanted = params.logprobs is not None
        if body.stream:
            events = self._stream(request_id, len(body.token_ids), deltas, wanted)
            return StreamingResponse(events, media_type="text/event-stream")
        return await self._whole(request, request_id, len(body.token_ids), deltas, wanted)

    def _sampling(self, params: SamplingParams) -> Sampling:
        stops = frozenset(params.stop_token_ids or ())
        return Sampling(
            max_tokens=params.max_tokens or self.engine.max_len,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            stop_token_ids=stops if params.ignore_eos else stops | self.engine.eos_token_ids,
            seed=params.seed,
        )

    async def _whole(
        self, request: Request, request_id: str, prompt_tokens: int, deltas: asyncio.Queue[Delta], wanted: bool
    ) -> Response:
        answering = asyncio.create_task(_collect(deltas))
        leaving = asyncio.create_task(_disconnect(request))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                return Response(status_code=499)
        finally:
            leaving.cancel()
            if not answering.done():
                answering.cancel()
                self.engine.abort(request_id)
        answer = answering.result()
        if answer.finish_reason == "error":
            return _refusal(answer.error or "", 500, kind="InternalServerError")
        choice = _choice(answer.token_ids, answer.logprobs, answer.finish_reason, wanted)
        usage = _usage(prompt_tokens, len(answer.token_ids))
        return _json({"request_id": request_id, "choices": [choice], "usage": usage, "version": answer.version})

    async def _stream(
        self, request_id: str, prompt_tokens: int, deltas: asyncio.Queue[Delta], wanted: bool
    ) -> AsyncIterator[bytes]:
        reason, sampled = None, 0
        try:
            while reason is None:
                delta = await deltas.get()
                reason = delta.finish_reason
                sampled += len(delta.token_ids)
                if reason == "error":
                    error = {"message": delta.error, "type": "InternalServerError", "param": None, "code": 500}
                    yield _event({"error": error})
                    break
                chunk = {
                    "request_id": request_id,
                    "choices": [_choice(delta.token_ids, delta.logprobs, reason, wanted)],
                    "usage": _usage(prompt_tokens, sampled) if reason else None,
                    "version": delta.version,
                }
                yield _event(chunk)
            yield b"data: [DONE]\n\n"
        finally:
            if reason is None:
                self.engine.abort(request_id)

    async def abort(self, request: Request) -> Response:
        try:
            body = AbortRequest.model_validate_json(await request.body())
        except ValidationError:
            return _refusal('The body must be {"request_ids": [...]}.', param="request_ids")
        self.engine.abort(*body.request_ids)
        return Response()

    async def pause(self, request: Request) -> Response:
        await run_in_threadpool(self.engine.pause)
        return _json({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        try:
            self.engine.resume()
        except RuntimeError as error:
            return _refusal(str(error), 409, kind="ConflictError")
        return _json({"status": "resumed"})

    async def reset_prefix_cache(self, request: Request) -> Response:
        await run_in_threadpool(self.engine.reset_prefix_cache)
        return Response()

    async def health(self, request: Request) -> Response:
        return Response()

    async def models(self, request: Request) -> Response:
        model = {
            "id": self.model,
            "object": "model",
            "owned_by": "harnessrl",
            "max_model_len": self.engine.max_len,
            "version": self.engine.version,
        }
        return _json({"object": "list", "data": [model]})

    async def metrics(self, request: Request) -> Response:
        lines = (f"harnessrl_engine_{name} {value}\n" for name, value in vars(self.engine.stats()).items())
        return PlainTextResponse("".join(lines))


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


def _usage(prompt_tokens: int, sampled: int) -> dict[str, int]:
    total = prompt_tokens + sampled
    return {"prompt_tokens": prompt_tokens, "completion_tokens": sampled, "total_tokens": total}


async def _collect(deltas: asyncio.Queue[Delta]) -> Answer:
    parts = [await deltas.get()]
    while parts[-1].finish_reason is None:
        parts.append(await deltas.get())
    return join(parts)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@dataclass(frozen=True)
class ServerHandle:
    url: str
    close: Callable[[], None]
    """Stop serving; streams still open are cut after a second. The engine goes on."""


def serve(
    engine: EmbeddedEngine, host: str = "127.0.0.1", port: int = 0, *, model: str = "embedded"
) -> ServerHandle:
    """Serve the engine from a thread of this process; port 0 takes a free one.

    Raises ValueError if the address cannot be had.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ValueError(f"Cannot listen on {host}:{port} ({error.strerror}): choose another --port.") from None
    config = uvicorn.Config(_Server(engine, model).app, log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), name="engine-http", daemon=True)
    listener.listen(2048)
    thread.start()

    def close() -> None:
        server.should_exit = True
        thread.join()
        listener.close()

    shown = f"[{host}]" if ":" in host else host
    return ServerHandle(f"http://{shown}:{listener.getsockname()[1]}", close)
