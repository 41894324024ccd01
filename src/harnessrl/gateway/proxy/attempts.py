"""What the proxy remembers of live attempts: the calls that later ones may continue, and the time they waited.

It is rebuilt from the store when a gateway takes over a running rollout, and dropped when its attempt ends.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from harnessrl.gateway.chat.continuation import Memory, Trail
from harnessrl.gateway.store import NotFound, Store, StoreError, UnderWay

__all__ = ["Attempt", "Attempts"]

_SWEEP_SECONDS = 2.0
_NOTE_SECONDS = 0.25


class Attempt:
    def __init__(self, rollout_id: str, attempt_id: str):
        self.rollout_id = rollout_id
        self.attempt_id = attempt_id
        self.memory = Memory()
        """Of calls at token endpoints."""
        self.trail = Trail()
        """Of calls at chat endpoints."""
        self.calls = 0
        """Calls under way."""
        self._rebuilt: asyncio.Task[None] | None = None
        self._holders = 0
        self._held_from = 0.0
        self._held = 0.0

    async def rebuild_once(self, rebuild: Callable[["Attempt"], Coroutine[Any, Any, None]]) -> None:
        """Fill the memory from what an earlier gateway recorded; calls at the same time wait for one another."""
        if self._rebuilt is None:
            self._rebuilt = asyncio.create_task(rebuild(self))
        await asyncio.shield(self._rebuilt)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """While entered, a call waits at the gate; overlapping waits count once."""
        if self._holders == 0:
            self._held_from = time.monotonic()
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            if self._holders == 0:
                self._held += time.monotonic() - self._held_from

    async def note_held(self, store: Store) -> None:
        """Give the rollout the time that its calls waited, so that its deadline moves."""
        held = self._take_held()
        if held > 0:
            await store.add_held_seconds(self.rollout_id, held)

    def _take_held(self) -> float:
        """Seconds that calls waited since this was last asked."""
        held, self._held = self._held, 0.0
        if self._holders:
            now = time.monotonic()
            held += now - self._held_from
            self._held_from = now
        return held

    @property
    def idle(self) -> bool:
        return self.calls == 0 and self._holders == 0


class Attempts:
    def __init__(self, store: Store):
        self._store = store
        self._live: dict[tuple[str, str], Attempt] = {}
        self._under_way: dict[str, UnderWay] = {}
        self._noted: set[str] = set()
        """Of calls under way, those that the store knows of."""
        self._tasks: list[asyncio.Task[None]] = []

    @contextmanager
    def under_way(self, call: UnderWay) -> Iterator[None]:
        """While entered, the call is one that a kill of the gateway would cut."""
        self._under_way[call.call_id] = call
        try:
            yield
        finally:
            del self._under_way[call.call_id]

    def get(self, rollout_id: str, attempt_id: str) -> Attempt:
        key = rollout_id, attempt_id
        if key not in self._live:
            self._live[key] = Attempt(rollout_id, attempt_id)
        return self._live[key]

    def busy(self) -> list[str]:
        """The attempts with calls under way, as ROLLOUT/ATTEMPT."""
        return [f"{a.rollout_id}/{a.attempt_id}" for a in self._live.values() if a.calls]

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._sweep()), asyncio.create_task(self._keep_noting())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._note()

    async def _keep_noting(self) -> None:
        while True:
            await asyncio.sleep(_NOTE_SECONDS)
            await self._note()

    async def _note(self) -> None:
        """Tell the store of calls that last longer than a moment, many in one write."""
        begun = [call for call_id, call in self._under_way.items() if call_id not in self._noted]
        ended = self._noted - self._under_way.keys()
        if begun or ended:
            with suppress(StoreError):  # a full disk may have room the next time
                await self._store.note_under_way(begun, list(ended))
                self._noted -= ended
                self._noted.update(call.call_id for call in begun)

    async def _sweep(self) -> None:
        """Forget attempts that have ended; tell the store of those that still wait."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            for key, attempt in list(self._live.items()):
                try:
                    await attempt.note_held(self._store)
                    ended = not (await self._store.access(attempt.rollout_id)).open(attempt.attempt_id)
                except NotFound:
                    ended = True
                if ended and attempt.idle:
                    self._live.pop(key, None)
