"""The run's progress as the gateway keeps it, for the dashboard and whoever else watches from afar.

Reporting never holds up the training and never fails it: what cannot be sent now is sent later, in order.
"""

import asyncio
import contextlib
import math
import time
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import httpx
import structlog

from harnessrl.client import AsyncClient, GatewayError, report_run
from harnessrl.config import Config
from harnessrl.schemas import Json, RunRecord
from harnessrl.trainer.rollout import FinishedRollout

if TYPE_CHECKING:
    from harnessrl.trainer.loop import Progress

__all__ = ["Reporter"]

log = structlog.get_logger()

HEARTBEAT_SECONDS = 10.0
RETRY_SECONDS = 2.0
LAST_SECONDS = 5.0
"""How long the end of a run waits for what is not yet sent."""
TOLD = {"name", "seed", "model", "engine", "collect", "algorithm", "optim", "train"}
"""Sections of the configuration that those who watch get to see: no keys, no agent's environment."""


class Reporter:
    """A `Progress` that tells `inner` and the gateway; an asynchronous context manager around the run."""

    def __init__(self, gateway: AsyncClient, run_id: str, lineage: int, config: Config, inner: "Progress"):
        self._gateway, self._run_id, self._inner = gateway, run_id, inner
        self._unsent: list[RunRecord] = []
        self._news = asyncio.Event()
        self._note("start", {"lineage": lineage, "config": config.model_dump(mode="json", include=TOLD)})

    async def __aenter__(self) -> Self:
        self._sender = asyncio.create_task(self._send_all())
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        stopped = isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
        state = "finished" if error is None else "stopped" if stopped else "failed"
        self._note("end", {"state": state, "message": str(error) if state == "failed" else None})
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._sender), LAST_SECONDS)
        self._sender.cancel()

    def phase(self, name: str, rollouts: int) -> None:
        self._note("phase", {"name": name, "rollouts": rollouts})
        self._inner.phase(name, rollouts)

    def rollout(self, rollout: FinishedRollout) -> None:
        self._inner.rollout(rollout)

    def update(self, number: int, metrics: dict[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._note("metrics", {"update": number, **finite})
        self._inner.update(number, metrics)

    def warn(self, message: str) -> None:
        self._note("alarm", {"message": message})
        self._inner.warn(message)

    def _note(self, kind: Literal["start", "phase", "metrics", "alarm", "end"], data: Json) -> None:
        self._unsent.append(RunRecord(kind=kind, at=time.time(), data=data))
        self._news.set()

    async def _send_all(self) -> None:
        """Until the end of the run is sent."""
        while True:
            self._news.clear()
            records = list(self._unsent)
            try:
                await self._gateway(report_run(self._run_id, records))
            except (httpx.TransportError, GatewayError) as error:
                if isinstance(error, GatewayError) and error.status < 500:  # an older gateway: nobody watches there
                    log.warning("the gateway takes no reports of the run", error=str(error))
                    return
                await asyncio.sleep(RETRY_SECONDS)
                continue
            del self._unsent[: len(records)]
            if records and records[-1].kind == "end":
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), HEARTBEAT_SECONDS)
