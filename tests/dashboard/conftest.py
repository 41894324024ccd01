"""A gateway with the dashboard's routes, and a client of it."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from harnessrl.dashboard import router
from harnessrl.gateway.app import Gateway, create_app
from harnessrl.gateway.settings import Settings
from harnessrl.gateway.store.sqlite import SqliteStore


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with create_app(Settings(store=tmp_path / "store.db"), [router]) as app:
        yield app


@pytest.fixture
def store(gateway: Gateway) -> SqliteStore:
    assert isinstance(gateway.store, SqliteStore)
    return gateway.store


@pytest.fixture
async def http(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=gateway)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client
