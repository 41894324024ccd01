"""The gate between harnesses and engines: closed while the weights change.

While it is closed, new calls wait in order of arrival (up to `hold_seconds`), and those in flight run out
or are cut. Its state survives a restart. Calls also wait here while no engine is there to take them.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from harnessrl.gateway.store import Store
from harnessrl.schemas import Pause, ProxyState

__all__ = ["Gate", "Paused"]

_SETTING = "pause"


class Paused(Exception):
    """The request may wait no longer. `pause` carries the answer's `Retry-After`; None: the gate was open."""

    def __init__(self, pause: Pause | None):
        super().__init__("gateway paused")
        self.pause = pause


class Gate:
    def __init__(self, store: Store, hold_seconds: float):
        self._store = store
        self._hold_seconds = hold_seconds
        self._pause: Pause | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._draining = False
        self.inflight = 0
        """Calls that an engine is working on."""
        self.cut = asyncio.Event()
        """Set while a pause with `rest: cut` lasts: calls in flight stop and go on after `resume`."""

    async def load(self) -> None:
        """Take up the state of the gateway's earlier life."""
        saved = await self._store.get_setting(_SETTING)
        self._set(Pause.model_validate(saved) if saved else None)

    @property
    def is_open(self) -> bool:
        return self._pause is None

    @property
    def held(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    async def pause(self, how: Pause) -> ProxyState:
        self._set(how)
        await self._store.put_setting(_SETTING, how.model_dump(mode="json"))
        return self.state()

    async def resume(self) -> ProxyState:
        await self._store.put_setting(_SETTING, None)
        self._set(None)
        return self.state()

    def drain(self) -> None:
        """The gateway is ending: those who wait are sent away, nobody waits from now on."""
        self._draining = True
        self.look_again()

    def state(self) -> ProxyState:
        pause = self._pause
        return ProxyState(
            paused=pause is not None,
            retry_after_seconds=pause.retry_after_seconds if pause else Pause().retry_after_seconds,
            reason=pause.reason if pause else None,
            inflight=self.inflight,
        )

    async def wait_open(self, ready: Callable[[], bool]) -> float:
        """Wait until the gate is open and `ready` (see `look_again`); returns the seconds waited.

        Raises `Paused` after `hold_seconds`, or at once where the gateway ends.
        """
        start = time.monotonic()
        while self._pause is not None or not ready():
            left = start + self._hold_seconds - time.monotonic()
            if self._draining or left <= 0:
                raise Paused(self._pause)
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await asyncio.wait([turn], timeout=left)
            finally:
                if turn in self._waiting:
                    self._waiting.remove(turn)
        return time.monotonic() - start

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call is with an engine while this is entered."""
        self.inflight += 1
        try:
            yield
        finally:
            self.inflight -= 1

    def _set(self, pause: Pause | None) -> None:
        self._pause = pause
        if pause is not None and pause.rest == "cut":
            self.cut.set()
        else:
            self.cut.clear()
        if pause is None:
            self.look_again()

    def look_again(self) -> None:
        """What those who wait are waiting for may have come."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
