"""Does an engine's log-probability belong to the distribution that it sampled from? (invariant 10)

Asked for one token at temperatures 1 and 0.5, an engine that gives the same token the same log-probability both
times always reports that of temperature 1. It may then be trained on at temperature 1 only. Each engine of the
policy is asked when it registers, in the background; what it said is kept until it is registered no more.
"""

import asyncio
import itertools
import uuid
from collections.abc import Sequence

import orjson
import structlog

from harnessrl.gateway.chat.canonical import RequestError
from harnessrl.gateway.proxy.engine import EngineFailed, Engines
from harnessrl.gateway.proxy.gate import Gate
from harnessrl.schemas import Endpoint, Json

__all__ = ["Probe"]

_PROMPTS = [[n, n + 7, n + 1] * 4 + [n] for n in range(40, 48)]
"""Ids that any vocabulary has, in patterns that leave a model neither certain nor without a guess.

Shorter than a block of a prefix cache: the same numbers come from the same computation."""
_DRAWS = 4
"""Tokens drawn after a prompt, at each temperature, until one comes at both."""
_ENOUGH = 3
"""Prompts whose log-probabilities are the same at both temperatures."""
_TELLING = (-100.0, -1e-3)
"""Log-probabilities that another temperature changes: what is certain stays so."""
_TRY_SECONDS = 30.0
_MAX_BACKOFF = 5.0
_WAIT_SECONDS = 30.0
"""How long a call waits for what is not known yet."""
_log = structlog.get_logger("proxy")

_Key = tuple[str, str, str | None]


class Probe:
    def __init__(self, engines: Engines, gate: Gate):
        self._engines = engines
        self._gate = gate
        self._ignores: dict[_Key, bool] = {}
        """What is known, by URL, model and kind."""
        self._asking: dict[_Key, asyncio.Task[bool | None]] = {}
        self._registered: set[_Key] = set()

    def close(self) -> None:
        for task in self._asking.values():
            task.cancel()

    def registered(self, endpoints: Sequence[Endpoint]) -> None:
        """These are all that there are: forget what is known of others."""
        self._registered = {_key(endpoint) for endpoint in endpoints}
        self._ignores = {key: known for key, known in self._ignores.items() if key in self._registered}

    def ask(self, endpoints: Sequence[Endpoint]) -> None:
        """Begin to find out what is not known of them."""
        for endpoint in endpoints:
            if _key(endpoint) not in self._ignores:
                self._task(endpoint)

    async def check(self, endpoints: Sequence[Endpoint]) -> None:
        """Raises `RequestError` unless those in reach may be trained on at any temperature.

        One that was found to ignore it is asked again: it may have been started anew, with the right option.
        """
        for endpoint in endpoints:
            if self._ignores.get(_key(endpoint)) is False or not self._engines.reachable([endpoint]):
                continue
            asking = self._task(endpoint)
            await asyncio.wait([asking], timeout=_WAIT_SECONDS)
            ignores = asking.result() if asking.done() else None
            if ignores is None:
                raise RequestError(
                    f"Whether the log-probabilities of {endpoint.endpoint} heed the temperature is not known: "
                    "train at temperature 1, or see the gateway's log.",
                    503,
                    "logprobs_not_probed",
                    retry_after=5,
                )
            if ignores:
                raise RequestError(
                    f"The log-probabilities of {endpoint.endpoint} ignore the temperature: train at temperature 1, "
                    "or start vLLM with --logprobs-mode processed_logprobs.",
                    503,
                    "logprobs_ignore_temperature",
                )

    def _task(self, endpoint: Endpoint) -> asyncio.Task[bool | None]:
        key = _key(endpoint)
        if key not in self._asking:
            self._asking[key] = asyncio.create_task(self._find_out(endpoint))
        return self._asking[key]

    async def _find_out(self, endpoint: Endpoint) -> bool | None:
        """Whether it ignores the temperature, once it answers; None if it refuses to say."""
        key = _key(endpoint)
        try:
            for tries in itertools.count():
                if self._gate.is_open and await self._engines.alive(endpoint.endpoint):
                    try:
                        async with asyncio.timeout(_TRY_SECONDS):
                            ignores = await self._ignores_temperature(endpoint)
                    except (EngineFailed, TimeoutError) as error:
                        if isinstance(error, EngineFailed) and error.status < 500 and not error.retriable:
                            _log.warning("can't tell whether log-probabilities heed temperature", error=str(error))
                            return None
                    else:
                        self._note(endpoint, ignores)
                        return ignores
                await asyncio.sleep(min(0.1 * 2**tries, _MAX_BACKOFF))
                if key not in self._registered:
                    return None
        finally:
            del self._asking[key]

    def _note(self, endpoint: Endpoint, ignores: bool) -> None:
        key = _key(endpoint)
        if ignores and key not in self._ignores:
            _log.warning(
                "log-probabilities ignore the temperature: train at 1, or start vLLM with "
                "--logprobs-mode processed_logprobs",
                endpoint=endpoint.endpoint,
            )
        self._ignores[key] = ignores

    async def _ignores_temperature(self, endpoint: Endpoint) -> bool:
        """Raises `EngineFailed`. An engine that never draws a telling token twice is taken to heed it."""
        same = 0
        for prompt in _PROMPTS:
            pairs = await self._pairs(endpoint, prompt)
            if any(abs(warm - cold) > 1e-3 * min(1, -warm) for warm, cold in pairs):
                return False
            same += bool(pairs)
            if same == _ENOUGH:
                break
        return same > 0

    async def _pairs(self, endpoint: Endpoint, prompt: list[int]) -> list[tuple[float, float]]:
        """Log-probabilities of the same tokens at temperatures 1 and 0.5, where they tell something."""
        draw = self._draw_token if endpoint.kind == "token" else self._draw_chat
        warm: dict[str | int, float] = {}
        cold: dict[str | int, float] = {}
        for seed in range(_DRAWS):
            for seen, temperature in ((warm, 1.0), (cold, 0.5)):
                seen |= await draw(endpoint, prompt, {"temperature": temperature, "max_tokens": 1, "seed": seed})
            telling = [token for token in warm.keys() & cold if _TELLING[0] < warm[token] < _TELLING[1]]
            if telling:
                return [(warm[token], cold[token]) for token in telling]
        return []

    async def _draw_token(self, endpoint: Endpoint, prompt: list[int], sampling: Json) -> dict[int, float]:
        body = {
            "request_id": f"probe-{uuid.uuid4().hex}",
            "model": endpoint.model,
            "token_ids": prompt,
            "sampling_params": {**sampling, "logprobs": 1},
            "stream": True,
        }
        seen: dict[int, float] = {}
        async for chunk in self._engines.generate(endpoint, body):
            seen |= zip(chunk.ids, chunk.logprobs, strict=True)
        return seen

    async def _draw_chat(self, endpoint: Endpoint, prompt: list[int], sampling: Json) -> dict[str, float]:
        said = " ".join(map(str, prompt))
        body = {
            "model": endpoint.model,
            "messages": [{"role": "user", "content": said}],
            **sampling,
            "logprobs": True,
            "top_logprobs": 5,
        }
        response = await self._engines.post(endpoint, "/chat/completions", orjson.dumps(body))
        answer = await self._engines.read(endpoint, response)
        try:
            (first, *_) = orjson.loads(answer)["choices"][0]["logprobs"]["content"]
            return {e["token"]: float(e["logprob"]) for e in [first, *(first.get("top_logprobs") or ())]}
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise EngineFailed(f"{endpoint.endpoint} sent no log-probabilities ({error!r})", 400) from error


def _key(endpoint: Endpoint) -> _Key:
    return endpoint.endpoint, endpoint.model, endpoint.kind
