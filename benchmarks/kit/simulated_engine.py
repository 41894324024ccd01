"""A token endpoint without a model: each call gets its tokens at a fixed rate, in real time."""

import asyncio
import time
from collections.abc import AsyncIterator

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

__all__ = ["simulated_engine"]

TOKEN = 65


def simulated_engine(tokens_per_second: float, busy: list[tuple[float, float]]) -> Starlette:
    """Answers `max_tokens` tokens; a client that leaves ends its call. Notes in `busy` from when to when
    (`time.monotonic`) it worked on each."""

    async def generate(request: Request) -> Response:
        wanted = (await request.json())["sampling_params"]["max_tokens"]

        async def chunks() -> AsyncIterator[bytes]:
            began = time.monotonic()
            try:
                async for chunk in tokens():
                    yield chunk
            finally:
                busy.append((began, time.monotonic()))

        async def tokens() -> AsyncIterator[bytes]:
            for number in range(wanted):
                await asyncio.sleep(1 / tokens_per_second)
                choice = {
                    "index": 0,
                    "token_ids": [TOKEN],
                    "logprobs": {"content": [{"token": f"token_id:{TOKEN}", "logprob": -1.0}]},
                    "finish_reason": "length" if number == wanted - 1 else None,
                }
                yield b"data: " + orjson.dumps({"request_id": "r", "choices": [choice]}) + b"\n\n"
            yield b"data: [DONE]\n\n"

        return StreamingResponse(chunks(), media_type="text/event-stream")

    async def models(request: Request) -> Response:
        return JSONResponse({"data": [{"id": "policy", "max_model_len": 4096}]})

    async def health(request: Request) -> Response:
        return JSONResponse({})

    return Starlette(
        routes=[
            Route("/inference/v1/generate", generate, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
        ]
    )
