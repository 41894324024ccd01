"""The upstream side: one client for all registered engines, over plain HTTP with keep-alive and no cap of its own.

A rollout stays with one endpoint of its model (rendezvous hashing), so that prefix caches hit and the end of an
endpoint moves only its own rollouts. Dead endpoints come last in the order until a probe reaches them again.
"""

import asyncio
import math
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import aiohttp
import orjson
import structlog

from harnessrl.schemas import Endpoint, Json

__all__ = ["Chunk", "EngineFailed", "Engines"]

_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_JSON = {"content-type": "application/json"}
_TRIES = 6
_MAX_BACKOFF = 8.0
_NO_LOGPROB = -9999.0
"""What vLLM says for NaN and minus infinity."""
_log = structlog.get_logger("proxy")


class EngineFailed(Exception):
    """An engine gave no usable answer.

    `status` is what the harness is told: the engine's own for its 4xx, else 502 or 504. `retriable`: another try,
    here or elsewhere, may work. `body`: what it said, where that was JSON.
    """

    def __init__(
        self,
        message: str,
        status: int = 502,
        retriable: bool = False,
        retry_after: float | None = None,
        body: bytes = b"",
    ):
        super().__init__(message)
        self.status = status
        self.retriable = retriable
        self.retry_after = retry_after
        self.body = body


@dataclass(slots=True)
class Chunk:
    ids: list[int]
    logprobs: list[float]
    finish_reason: str | None


class Engines:
    def __init__(
        self,
        connect_seconds: float,
        read_seconds: float,
        health_seconds: float,
        on_return: Callable[[], None] = lambda: None,
    ):
        """read_seconds: longest silence of an engine that still answers its probes.

        on_return: called when an endpoint that was dead answers again.
        """
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_seconds, sock_read=read_seconds)
        self._health_seconds = health_seconds
        self._on_return = on_return
        self._session: aiohttp.ClientSession | None = None
        self._dead: set[str] = set()
        self._busy: dict[str, set[Callable[[], Any]]] = {}
        """What ends each call that is under way, by endpoint."""
        self._limits: dict[str, Json] = {}
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=self._timeout, cookie_jar=aiohttp.DummyCookieJar()
        )
        self._watch = asyncio.create_task(self._watch_health())

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._session is not None:
            await self._session.close()

    def order(self, endpoints: Sequence[Endpoint], rollout_id: str) -> list[Endpoint]:
        """The endpoints in the order in which this rollout tries them."""

        def weight(endpoint: Endpoint) -> tuple[bool, bytes]:
            mixed = f"{endpoint.endpoint}\0{rollout_id}".encode()
            return endpoint.endpoint not in self._dead, blake2b(mixed, digest_size=8).digest()

        return list(endpoints) if len(endpoints) == 1 else sorted(endpoints, key=weight, reverse=True)

    def reachable(self, endpoints: Sequence[Endpoint]) -> bool:
        """Whether a call may be tried at one of them."""
        return any(endpoint.endpoint not in self._dead for endpoint in endpoints)

    async def facts(self, endpoint: Endpoint) -> Json:
        """What a token endpoint says of its model: `max_model_len` and `owned_by`, where it says anything."""
        known = self._limits.get(endpoint.endpoint)
        if known is None:
            known = {}
            with suppress(EngineFailed, ValueError, LookupError, TypeError):
                status, body = await self._get(f"{_root(endpoint)}/v1/models")
                listed = orjson.loads(body)["data"] if status == 200 else []
                known = next((m for m in listed if m.get("id") == endpoint.model), listed[0])
                self._limits[endpoint.endpoint] = known
        return known

    def forget(self) -> None:
        """The registered endpoints changed: ask them anew."""
        self._limits.clear()
        self._dead.clear()

    async def post(self, endpoint: Endpoint, path: str, body: bytes) -> aiohttp.ClientResponse:
        """The response, its status checked, its body not yet read. Raises `EngineFailed`."""
        url = endpoint.endpoint.rstrip("/") + path
        sending = asyncio.ensure_future(self._http.post(url, data=body, headers=_JSON))
        try:
            with self._using(endpoint, sending.cancel):
                response = await sending
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
                self._lost(endpoint.endpoint)
            raise _failed(endpoint, error) from error
        except asyncio.CancelledError:
            if endpoint.endpoint in self._dead and sending.cancelled():
                raise EngineFailed(f"{endpoint.endpoint} no longer answers", 502, True) from None
            sending.cancel()
            raise
        if response.status >= 400:
            text = await self.read(endpoint, response)
            raise EngineFailed(
                f"{endpoint.endpoint} answered {response.status}: {text[:500].decode(errors='replace')}",
                response.status if response.status < 500 else 502,
                response.status in _RETRIED,
                _seconds(response.headers.get("Retry-After")),
                text,
            )
        return response

    async def read(self, endpoint: Endpoint, response: aiohttp.ClientResponse) -> bytes:
        with self._using(endpoint, response.close):
            try:
                return await response.read()
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                raise _failed(endpoint, error) from error
            finally:
                response.release()

    async def events(self, endpoint: Endpoint, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """The data of each server-sent event. Leaving the loop early closes the connection: the engine stops."""
        with self._using(endpoint, response.close):
            try:
                buffer = b""
                async for piece in response.content.iter_any():
                    *events, buffer = (buffer + piece).replace(b"\r\n", b"\n").split(b"\n\n")
                    for event in events:
                        data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line[:5] == b"data:")
                        if data:
                            yield data
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                raise _failed(endpoint, error) from error
            finally:
                response.close()

    async def generate(self, endpoint: Endpoint, body: Json) -> AsyncGenerator[Chunk]:
        """Sampled ids with their log-probabilities as they come. Raises `EngineFailed`."""
        encoded = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        response = await self.post(endpoint, "/inference/v1/generate", encoded)
        if "event-stream" not in response.headers.get("content-type", ""):
            chunk = _chunk(endpoint, await self.read(endpoint, response), body)
            if chunk is not None:
                yield chunk
            return
        async for data in self.events(endpoint, response):
            if data == b"[DONE]":
                break
            chunk = _chunk(endpoint, data, body)
            if chunk is not None:
                yield chunk

    @staticmethod
    async def before_retry(tries: int, error: EngineFailed) -> None:
        """Wait as long as the engine asked for, else longer each time. Raises `error` where no try is left."""
        if not error.retriable or tries >= _TRIES:
            raise error
        backoff = min(0.5 * 2 ** (tries - 1), _MAX_BACKOFF) * random.uniform(0.75, 1.25)
        await asyncio.sleep(backoff if error.retry_after is None else min(error.retry_after, 60))

    @property
    def _http(self) -> aiohttp.ClientSession:
        assert self._session is not None, "start() first"
        return self._session

    @contextmanager
    def _using(self, endpoint: Endpoint, end: Callable[[], Any]) -> Iterator[None]:
        busy = self._busy.setdefault(endpoint.endpoint, set())
        busy.add(end)
        try:
            yield
        finally:
            busy.discard(end)

    async def _get(self, url: str) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=max(self._health_seconds, 1))
        try:
            async with self._http.get(url, timeout=timeout) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise EngineFailed(str(error)) from error

    async def _watch_health(self) -> None:
        """Probe the endpoints that are in use or dead; two silent probes end the calls of one."""
        silent: dict[str, int] = {}
        while True:
            await asyncio.sleep(self._health_seconds)
            watched = [url for url in {*self._dead, *self._busy} if url in self._dead or self._busy.get(url)]
            for url, alive in zip(watched, await asyncio.gather(*map(self.alive, watched)), strict=True):
                silent[url] = 0 if alive else silent.get(url, 0) + 1
                if alive and url in self._dead:
                    self._dead.discard(url)
                    _log.warning("engine is back", endpoint=url)
                    self._on_return()
                elif not alive and silent[url] >= 2:
                    self._lost(url)
                    for end in list(self._busy.get(url, ())):
                        end()

    def _lost(self, url: str) -> None:
        if url not in self._dead:
            self._dead.add(url)
            _log.warning("engine does not answer: calls go elsewhere, or wait", endpoint=url)

    async def alive(self, url: str) -> bool:
        """Whether the engine at `url` answers, within its probe's time."""
        try:
            await self._get(url.rstrip("/") + ("/models" if url.rstrip("/").endswith("/v1") else "/health"))
        except EngineFailed:
            return False
        return True


def _root(endpoint: Endpoint) -> str:
    return endpoint.endpoint.rstrip("/").removesuffix("/v1")


def _failed(endpoint: Endpoint, error: BaseException) -> EngineFailed:
    if isinstance(error, TimeoutError):
        return EngineFailed(f"{endpoint.endpoint} did not answer in time", 504, True)
    return EngineFailed(f"no connection to {endpoint.endpoint}: {error or type(error).__name__}", 502, True)


def _seconds(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0 <= value < math.inf else None


def _chunk(endpoint: Endpoint, data: bytes, body: Json) -> Chunk | None:
    """Raises `EngineFailed` for what is no token endpoint's answer."""
    try:
        answer = orjson.loads(data)
        if "error" in answer:
            raise EngineFailed(f"{endpoint.endpoint} failed: {orjson.dumps(answer['error'])[:500].decode()}")
        if not answer["choices"]:
            return None
        choice = answer["choices"][0]
        ids = choice.get("token_ids") or []
        logprobs = [float(entry["logprob"]) for entry in (choice.get("logprobs") or {}).get("content") or ()]
        finish_reason = choice.get("finish_reason")
        if not all(isinstance(i, int) and i >= 0 for i in ids):
            raise ValueError("token ids that are no ids")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise EngineFailed(f"{endpoint.endpoint} sent no token answer ({error!r}): {data[:200]!r}") from error
    if "logprobs" in body["sampling_params"] and len(logprobs) != len(ids):
        raise EngineFailed(f"{endpoint.endpoint} sent {len(ids)} token ids with {len(logprobs)} log-probabilities")
    if any(not math.isfinite(value) or value <= _NO_LOGPROB for value in logprobs):
        raise EngineFailed(f"{endpoint.endpoint} sent a log-probability that is not a finite number")
    return Chunk(ids, logprobs, finish_reason)
