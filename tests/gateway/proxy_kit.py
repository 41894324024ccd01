"""A served gateway in front of a scripted engine, for tests that speak to it as harnesses do."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from scripted_engine import ScriptedEngine

from harnessrl.client import full_prompts
from harnessrl.gateway.app import Gateway
from harnessrl.gateway.chat.tokenizer import load_tokenizer
from harnessrl.gateway.settings import Settings
from harnessrl.schemas import Call, Endpoint, NewRollout

TINY = str(Path(__file__).parents[1] / "assets" / "tiny")
TOKENIZER = load_tokenizer(TINY)


class Proxied:
    """A running gateway with one rollout."""

    def __init__(self, gateway: Gateway, url: str, rollout_id: str):
        self.gateway = gateway
        self.url = url
        self.rollout_id = rollout_id

    def base(self, mode: str = "train", family: str = "openai/v1") -> str:
        return f"{self.url}/proxy/rollout/{self.rollout_id}/attempt/0/mode/{mode}/{family}"

    async def calls(self) -> list[Call]:
        return await self.gateway.store.calls(self.rollout_id, "0")

    async def register(self, *endpoints: Endpoint) -> None:
        await self.gateway.store.delete_endpoints()
        await self.gateway.store.put_endpoints(endpoints)
        await self.gateway.proxy.endpoints_changed()

    async def new_rollout(self, **fields: Any) -> str:
        (rollout,) = await self.gateway.store.create_rollouts([NewRollout(input={}, **fields)])
        self.rollout_id = rollout.rollout_id
        return self.rollout_id


@asynccontextmanager
async def proxied(tmp_path: Path, *endpoints: Endpoint, **settings: Any) -> AsyncIterator[Proxied]:
    async with Gateway(Settings(store=tmp_path / "store.db", **settings)) as gateway, served(gateway, "off") as url:
        proxy = Proxied(gateway, url, "")
        await proxy.register(*endpoints)
        await proxy.new_rollout()
        yield proxy


@asynccontextmanager
async def served(app: Any, lifespan: Any = "on") -> AsyncIterator[str]:
    """The URL of an ASGI application, served by uvicorn in this process."""
    config = uvicorn.Config(app, http="httptools", ws="none", lifespan=lifespan, log_config=None, port=0)
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[method-assign]
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await serving


def contexts(calls: list[Call]) -> dict[str, np.ndarray]:
    """Prompt + sampled ids of each call, by call id."""
    prompts = full_prompts(calls)
    return {c.call_id: np.concatenate([prompts[c.call_id], np.asarray(c.sampled_ids)]) for c in calls}


__all__ = ["TINY", "TOKENIZER", "Proxied", "ScriptedEngine", "contexts", "proxied", "served"]
