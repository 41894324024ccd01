"""What `/metrics` shows (Prometheus). Counting a call costs microseconds: it may be done on the hot path."""

import asyncio
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from harnessrl.gateway.store import CallRecord

__all__ = ["Metrics"]

_LAG_INTERVAL_SECONDS = 0.1
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class Metrics:
    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._calls = Counter("harnessrl_calls", "Model calls.", ("dialect", "status"), registry=registry)
        self._tokens = Counter("harnessrl_tokens", "Tokens of calls.", ("kind",), registry=registry)
        self._continuity = Counter(
            "harnessrl_continuity", "How prompts continue earlier calls.", ("continuity",), registry=registry
        )
        self.added_latency = Histogram(
            "harnessrl_added_latency_seconds",
            "Time of a call that neither the engine nor a pause took.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._lag = Histogram(
            "harnessrl_event_loop_lag_seconds", "Delay of a timer.", buckets=_SECONDS, registry=registry
        )
        self._store_bytes = Gauge("harnessrl_store_bytes", "Size of the store.", registry=registry)

    def gauge(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        """A gauge that is read when it is asked for."""
        Gauge(f"harnessrl_{name}", meaning, registry=self._registry).set_function(value)

    def count(self, call: CallRecord) -> None:
        self._calls.labels(call.dialect, str(call.http_status)).inc()
        self._tokens.labels("prompt").inc(len(call.prompt_ids))
        self._tokens.labels("sampled").inc(len(call.sampled_ids))
        self._tokens.labels("prefilled_again").inc(call.prefilled_again)
        self._continuity.labels(call.continuity).inc()

    def text(self, store_bytes: int) -> bytes:
        self._store_bytes.set(store_bytes)
        return generate_latest(self._registry)

    async def watch_loop(self) -> None:
        """Measures the event loop's lag, for ever."""
        while True:
            due = time.perf_counter() + _LAG_INTERVAL_SECONDS
            await asyncio.sleep(_LAG_INTERVAL_SECONDS)
            self._lag.observe(max(0.0, time.perf_counter() - due))
