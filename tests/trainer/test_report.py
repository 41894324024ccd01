"""What a trainer tells those who watch: all of it, in order, even if the gateway is away for a while."""

import asyncio
import math
from pathlib import Path

import httpx
import pytest

from harnessrl.client import AsyncClient
from harnessrl.config import Config
from harnessrl.gateway.app import Gateway
from harnessrl.gateway.settings import Settings
from harnessrl.schemas import RunRecord
from harnessrl.trainer import report
from harnessrl.trainer.report import Reporter
from harnessrl.trainer.rollout import FinishedRollout


class Silent:
    """A `Progress` that keeps the warnings."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def phase(self, name: str, rollouts: int) -> None: ...

    def rollout(self, rollout: FinishedRollout) -> None: ...

    def update(self, number: int, metrics: dict[str, float]) -> None: ...

    def warn(self, message: str) -> None:
        self.said.append(message)


class Flaky(httpx.ASGITransport):
    """Loses the first `lost` requests."""

    lost = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.lost:
            self.lost -= 1
            raise httpx.ConnectError("away")
        return await super().handle_async_request(request)


async def reported(tmp_path: Path, lost: int, error: BaseException | None = None) -> list[RunRecord]:
    config = Config(name="r")
    async with Gateway(Settings(store=tmp_path / "store.db")) as gateway:
        transport = Flaky(app=gateway)
        transport.lost = lost
        client = AsyncClient("http://gateway", transport=transport)
        inner = Silent()
        try:
            async with client, Reporter(client, "r-1", 0, config, inner) as progress:
                progress.phase("collect", 32)
                await asyncio.sleep(0.05)
                progress.update(1, {"reward/train": 0.5, "optim/grad_norm": math.inf})
                progress.warn("careful")
                if error:
                    raise error
        except RuntimeError:
            pass
        assert inner.said == ["careful"]
        return await gateway.store.run_records("r-1", 0)


@pytest.mark.parametrize("lost", [0, 2])
async def test_everything_arrives_in_order(tmp_path: Path, lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RETRY_SECONDS", 0.05)
    records = await reported(tmp_path, lost)
    assert [record.kind for record in records] == ["start", "phase", "metrics", "alarm", "end"]
    start, phase, metrics, alarm, end = (record.data for record in records)
    assert start["config"]["name"] == "r" and "gateway" not in start["config"] and "agent" not in start["config"]
    assert phase == {"name": "collect", "rollouts": 32}
    assert metrics == {"update": 1, "reward/train": 0.5, "optim/grad_norm": None}
    assert alarm == {"message": "careful"} and end["state"] == "finished"


async def test_a_failure_is_told_too(tmp_path: Path) -> None:
    records = await reported(tmp_path, 0, RuntimeError("no group can complete"))
    assert records[-1].data == {"state": "failed", "message": "no group can complete"}


async def test_a_gateway_that_stays_away_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "LAST_SECONDS", 0.1)
    assert await asyncio.wait_for(reported(tmp_path, 1000), 5) == []
