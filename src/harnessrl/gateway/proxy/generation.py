"""Sampling one answer at token endpoints, through pauses and failures.

Invariants: a token is kept once it has come, with the version of the weights that sampled it; what was cut goes on
from prompt + kept ids under the new weights; another engine is tried only while nothing was sampled.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import numpy as np

from harnessrl.gateway.proxy.context import Context, Services
from harnessrl.gateway.proxy.engine import Chunk, EngineFailed
from harnessrl.schemas import Endpoint, Json

__all__ = ["Generation"]

_ABORTS = 20
"""Times that an engine may stop a call on its own before that is an error."""


@dataclass(slots=True)
class Generation:
    prompt: np.ndarray
    params: Json
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Run-length coded over `sampled`: (version, tokens)."""
    finish_reason: str | None = None
    endpoint: Endpoint | None = None
    """The last one used."""
    tries: int = 0
    prefilled_again: int = 0
    """Tokens that were computed once more, because the call was cut and went on."""

    async def run(
        self,
        services: Services,
        context: Context,
        model: str,
        request_id: str,
    ) -> AsyncGenerator[list[int]]:
        """New ids as they come. Raises `EngineFailed` and `Paused`."""
        engines, gate = services.engines, services.gate
        aborts = 0
        while self.finish_reason is None:
            self.endpoint = endpoint = await context.endpoint(services, model, self.tries)
            body = {
                "request_id": f"{request_id}-{self.tries + aborts}",
                "model": endpoint.model,
                "token_ids": np.concatenate([self.prompt, np.asarray(self.sampled, dtype=np.int32)]),
                "sampling_params": {**self.params, "max_tokens": self.params["max_tokens"] - len(self.sampled)},
                "stream": True,
            }
            try:
                stopped = False
                with context.at_engine(gate):
                    async for chunk in _until(gate.cut, engines.generate(endpoint, body)):
                        self._take(chunk, endpoint.version)
                        stopped = chunk.finish_reason == "abort"
                        if chunk.ids:
                            yield chunk.ids
                if self.finish_reason is None and not stopped and not gate.cut.is_set():
                    raise EngineFailed(f"{endpoint.endpoint} broke off its answer", retriable=True)
            except EngineFailed as error:
                self.tries += 1
                if self.sampled:
                    raise
                await engines.before_retry(self.tries, error)
                continue
            if self.finish_reason is None:
                self.prefilled_again += len(self.prompt) + len(self.sampled)
                if len(self.sampled) >= self.params["max_tokens"]:
                    self.finish_reason = "length"
                elif not gate.cut.is_set():
                    aborts += 1
                    if aborts > _ABORTS:
                        raise EngineFailed(f"{endpoint.endpoint} stopped the call {aborts} times")
                    await asyncio.sleep(0.05 * aborts)  # it may be about to change its weights

    def _take(self, chunk: Chunk, version: int) -> None:
        self.sampled += chunk.ids
        self.logprobs += chunk.logprobs
        if chunk.ids:
            if self.versions and self.versions[-1][0] == version:
                self.versions[-1] = (version, self.versions[-1][1] + len(chunk.ids))
            else:
                self.versions.append((version, len(chunk.ids)))
        if chunk.finish_reason not in (None, "abort"):
            self.finish_reason = "length" if chunk.finish_reason == "length" else "stop"


async def _until(cut: asyncio.Event, chunks: AsyncGenerator[Chunk]) -> AsyncGenerator[Chunk]:
    """The chunks up to the cut; leaving early closes the connection, and the engine stops."""
    cutting = asyncio.ensure_future(cut.wait())
    following: asyncio.Future[Chunk] | None = None
    try:
        while True:
            following = asyncio.ensure_future(anext(chunks))
            await asyncio.wait([following, cutting], return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                return
            yield following.result()
    except StopAsyncIteration:
        return
    finally:
        cutting.cancel()
        if following is not None and not following.done():
            following.cancel()
            await asyncio.wait([following])
        await chunks.aclose()
