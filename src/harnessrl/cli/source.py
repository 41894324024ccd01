"""Where the commands that look at rollouts find them: at a running gateway, or in the store of a run."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import httpx
import typer

from harnessrl.client import AsyncClient, get_calls, get_events, get_rollout, terminal_rollouts
from harnessrl.schemas import Call, Event, Json, Rollout

__all__ = ["AsJson", "GatewayUrl", "Key", "Seen", "StoreFile", "ended_rollouts", "open_source", "see"]

GatewayUrl = Annotated[str | None, typer.Option(help="A running gateway's URL.", envvar="HARNESSRL_GATEWAY")]
Key = Annotated[str | None, typer.Option(help="Its key.", envvar="HARNESSRL_KEY")]
StoreFile = Annotated[Path | None, typer.Option("--store", help="Or the store of a run, runs/NAME/rollouts.db.")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]

_AT_ONCE = 16


@asynccontextmanager
async def open_source(url: str | None, key: str | None, store: Path | None) -> AsyncIterator[AsyncClient]:
    """A client of the running gateway, or of one in this process that serves `store`."""
    if (url is None) == (store is None):
        raise ValueError(
            "say where to look: either --gateway URL (of a running gateway) or --store FILE (of a run)"
        )
    if url is not None:
        async with AsyncClient(url, key) as client:
            yield client
        return
    from harnessrl.gateway.app import Gateway
    from harnessrl.gateway.settings import Settings

    assert store
    if not store.exists():
        raise ValueError(f"there is no store {store}")
    async with (
        Gateway(Settings(store=store)) as gateway,
        AsyncClient("http://store", transport=httpx.ASGITransport(gateway)) as client,
    ):
        yield client


@dataclass(frozen=True)
class Seen:
    """All that is known of a rollout's last attempt."""

    rollout: Rollout
    attempts: list[str]
    events: list[Event]
    calls: list[Call]
    requests: dict[str, Json]
    """By call id: data of the call's `model_request` event: request and response in their dialect."""

    @property
    def reward(self) -> float | None:
        rewards = [event.data.get("value") for event in self.events if event.event_type == "reward"]
        return rewards[-1] if rewards else None


async def see(source: AsyncClient, rollout_id: str) -> Seen:
    detail, events, calls = await asyncio.gather(
        source(get_rollout(rollout_id)), source(get_events(rollout_id)), source(get_calls(rollout_id))
    )
    return Seen(detail.rollout, detail.attempts, events, calls, _requests(calls, events))


def _requests(calls: Iterable[Call], events: Iterable[Event]) -> dict[str, Json]:
    """Calls come in the order of their start, events in that of their end: the exact latency pairs them."""
    waiting: dict[float, list[Json]] = {}
    for event in events:
        if event.event_type == "model_request":
            waiting.setdefault(event.data["latency_ms"], []).append(event.data)
    return {call.call_id: waiting[call.latency_ms].pop(0) for call in calls if waiting.get(call.latency_ms)}


async def ended_rollouts(source: AsyncClient) -> AsyncIterator[Seen]:
    """All that ended, in that order."""
    after = 0
    while (page := await source(terminal_rollouts(after))).items:
        after = page.next_after
        for start in range(0, len(page.items), _AT_ONCE):
            some = page.items[start : start + _AT_ONCE]
            for seen in await asyncio.gather(*(see(source, item.rollout_id) for item in some)):
                yield seen
