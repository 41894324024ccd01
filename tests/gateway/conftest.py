"""A store, a gateway in this process, and gateways as processes."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from gateway_kit import KEY, Serve, Served, client_of

from harnessrl.gateway.app import Gateway, create_app
from harnessrl.gateway.settings import Settings
from harnessrl.gateway.store.sqlite import SqliteStore

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = await SqliteStore.open(tmp_path / "store.db")
    yield store
    await store.close()


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with create_app(Settings(store=tmp_path / "store.db", key=KEY)) as app:
        yield app


@pytest.fixture
async def http(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(gateway) as client:
        yield client


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    os.environ.pop("HARNESSRL_KEY", None)
    running: list[Served] = []

    def start(*options: str, store: Path | None = None) -> Served:
        running.append(Served(store or tmp_path / "store.db", *options))
        return running[-1]

    yield start
    for served in running:
        if served.process.poll() is None:
            served.kill()
        assert served.process.stdout is not None
        served.process.stdout.close()


@pytest.fixture
def engine_url() -> Iterator[str]:
    """The fake chat endpoint of the benchmarks: `{engine_url}/PROMPTxSAMPLED/DELAY_MS/v1`."""
    command = [sys.executable, "-m", "benchmarks.kit.fake_engine"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as engine:
        assert engine.stdout is not None
        yield engine.stdout.readline().split()[-1]
        engine.kill()
