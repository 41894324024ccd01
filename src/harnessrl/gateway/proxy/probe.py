"""Does an engine's log-probability belong to the distribution that it sampled from? (invariant 10)

Asked for one token at temperatures 1 and 0.5, an engine that gives the same token the same log-probability both
times always reports that of temperature 1. It may then be trained on at temperature 1 only.
"""

import math

from harnessrl.gateway.proxy.engine import EngineFailed, Engines
from harnessrl.schemas import Endpoint, Json

__all__ = ["Probe"]

_DRAWS = 8
_CERTAIN = -1e-3
"""A token this likely at temperature 1 is as likely at 0.5: it says nothing."""


class Probe:
    def __init__(self, engines: Engines):
        self._engines = engines
        self._known: dict[tuple[str, str], bool] = {}

    def forget(self) -> None:
        self._known.clear()

    async def ignores_temperature(self, endpoint: Endpoint, prompt: list[int], params: Json) -> bool:
        """Of a token endpoint; asked once. params: sampling parameters, whole."""
        key = endpoint.endpoint, endpoint.model
        if key not in self._known:
            warm, cold = [await self._draw(endpoint, prompt, params, t) for t in (1.0, 0.5)]
            both = [token for token in warm if token in cold and warm[token] < _CERTAIN]
            same = [math.isclose(warm[token], cold[token], abs_tol=1e-4) for token in both]
            self._known[key] = bool(same) and all(same)
        return self._known[key]

    async def _draw(
        self, endpoint: Endpoint, prompt: list[int], params: Json, temperature: float
    ) -> dict[int, float]:
        """Log-probability of each of some first tokens."""
        seen: dict[int, float] = {}
        for _ in range(_DRAWS):
            drawn = {**params, "temperature": temperature, "max_tokens": 1, "logprobs": 1}
            body = {"model": endpoint.model, "token_ids": prompt, "sampling_params": drawn, "stream": True}
            try:
                async for chunk in self._engines.generate(endpoint, body):
                    seen |= dict(zip(chunk.ids, chunk.logprobs, strict=False))
            except EngineFailed:
                return {}
        return seen
