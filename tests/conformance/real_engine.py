"""The embedded engine as a process, for harnesses that take what a model says, and what it sampled.

A model without an end in itself is cut on the way, so that the harness and the gateway know as little of it as of
an engine's own limit.
"""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from harnessrl.schemas import Endpoint

__all__ = ["RealEngine", "between", "engine_process"]


@contextmanager
def engine_process(model: str, max_len: int) -> Iterator[str]:
    """The URL of `harnessrl engine`."""
    command = [sys.executable, "-m", "harnessrl", "engine", "--model", model, "--port", "0"]
    process = subprocess.Popen(
        [*command, "--max-len", str(max_len), "--max-batch", "4"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if " is served at " in line)
        yield line.partition(" is served at ")[2].split(",")[0]
    finally:
        process.terminate()
        process.wait(20)


@dataclass
class RealEngine:
    name: str
    url: str
    tokenizer: Path
    max_len: int
    sampled: list[list[int]] = field(default_factory=list)
    """Of each request, the ids that the engine sent."""

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(
            model="policy-model",
            endpoint=self.url,
            kind="token",
            tokenizer=str(self.tokenizer),
            renderer={"name": "chatml"},
            max_model_len=self.max_len,
        )


@asynccontextmanager
async def between(name: str, upstream: str, tokenizer: Path, max_len: int, most: int) -> AsyncIterator[RealEngine]:
    """Stands before the engine: cuts answers at `most` tokens and notes what was sampled."""
    async with aiohttp.ClientSession() as http:

        async def generate(request: web.Request) -> web.StreamResponse:
            body: dict[str, Any] = await request.json()
            params = body["sampling_params"]
            params["max_tokens"] = min(params["max_tokens"], most)
            said: list[int] = []
            engine.sampled.append(said)
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            async with http.post(f"{upstream}/inference/v1/generate", json=body) as answer:
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        said += json.loads(line[6:])["choices"][0]["token_ids"]
                    await response.write(line)
            return response

        async def healthy(_: web.Request) -> web.Response:
            return web.Response()

        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/inference/v1/generate", generate)
        app.router.add_get("/health", healthy)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        engine = RealEngine(name, f"http://127.0.0.1:{runner.addresses[0][1]}", tokenizer, max_len)
        yield engine
        await runner.cleanup()
