"""The Rollout Controller: it learns of queued rollouts, claims them, has them run and tells how they ended.

Invariants: at most `concurrency` attempts of this controller run at once; each runs under a lease that only
this controller's name holds; what the gateway does not confirm as ours is stopped; an end is reported until
the gateway has taken it. Which rollouts wait, and in which order, the gateway alone knows: it is asked again
whenever its stream says that something was queued, never by polling.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import httpx

from harnessrl.client import (
    AsyncClient,
    GatewayError,
    Request,
    claim_rollout,
    end_attempt,
    list_rollouts,
    patch_rollout,
    post_event,
    renew_leases,
)
from harnessrl.controller.environment import StartError
from harnessrl.schemas import (
    TERMINAL,
    AttemptEnd,
    Claim,
    ClaimRequest,
    Json,
    LeaseRenewal,
    NewEvent,
    Rollout,
    StatusPatch,
)

log = logging.getLogger(__name__)
T = TypeVar("T")
StopReason = Literal["timeout", "lost", "shutdown"]

_REQUESTS_AT_ONCE = 16
"""About attempts: leases must not wait behind a thousand ends, and the client's pool is slow with a long queue."""
_LOG_EVENT_BYTES = 32 << 10
_PAGE = 500


class Attempt(Protocol):
    """One try that a runner has started or found."""

    rollout_id: str
    attempt_id: str
    job: str | None
    """Name of its Kubernetes Job."""
    held_seconds: float
    """Set by the controller: time that does not count against the timeout."""

    def deadline(self) -> float:
        """Epoch seconds after which it is to be stopped; may move."""
        ...

    def stop(self, reason: StopReason, at_once: bool = False) -> None:
        """Begin to stop it."""
        ...

    async def wait(self) -> AttemptEnd:
        """Until nothing of it runs any more."""
        ...

    async def output(self, limit: int) -> Json | None:
        """Its log after its end, at most `limit` bytes: `text`, and where it was; None if it is empty."""
        ...


A = TypeVar("A", bound=Attempt)


class Runner(Protocol[A]):
    name: str
    """Of the controller, the same after a restart."""
    outlives_controller: bool
    """Attempts go on when the controller is asked to end, for its successor."""

    def accepts(self, rollout: Rollout) -> bool: ...

    def heartbeat(self) -> None:
        """Called while the controller lives, several times per lease."""
        ...

    async def start(self, claim: Claim) -> A:
        """Raises `StartError`."""
        ...

    async def adopt(self) -> list[A]:
        """Attempts that an earlier controller of this name left, running or ended."""
        ...

    async def forget(self, attempt: A, ok: bool) -> None:
        """The gateway has taken its end: remove what is left of it."""
        ...


@dataclass(frozen=True)
class Pace:
    lease_seconds: float = 30
    retry_seconds: float = 1
    """First pause after a lost connection or an infrastructure failure; doubles up to `retry_max_seconds`."""
    retry_max_seconds: float = 30
    shutdown_seconds: float = 8
    """For stopping all agents and telling the gateway; then they are killed."""


class Controller:
    def __init__(self, gateway: AsyncClient, runner: Runner[Any], concurrency: int, pace: Pace | None = None):
        self._gateway, self._runner, self._concurrency = gateway, runner, concurrency
        self._pace = pace or Pace()
        self._queue: deque[Rollout] = deque()
        self._stale = True
        """Something was queued since the queue was last read, or there is more than was read."""
        self._wake = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._attempts: dict[str, Attempt] = {}
        self._passed_over: set[str] = set()
        """Queued again while their earlier attempt was still being stopped here."""
        self._starting: set[str] = set()
        """Claimed, not yet started."""
        self._failures: dict[str, tuple[int, float]] = {}
        """Infrastructure failures in a row and when to try again, of rollouts that failed here."""
        self._requests = asyncio.Semaphore(_REQUESTS_AT_ONCE)
        self._stopping = self._dropping = False

    async def run(self) -> None:
        """Until cancelled; then all agents are stopped and their ends reported, unless the runner keeps them."""
        for attempt in await self._runner.adopt():
            self._spawn(attempt.rollout_id, self._see_through(attempt))
        if self._tasks:
            log.info("adopted %d attempts of an earlier controller", len(self._tasks))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch())
                group.create_task(self._keep_leases())
                group.create_task(self._fill())
        finally:
            await self._shut_down()

    # ------------------------------------------------------------------------------------ the queue

    async def _watch(self) -> None:
        """Follow the gateway's stream, from where it broke off."""
        cursor: int | None = None
        pauses = self._pauses()
        while True:
            try:
                async for position, rollout_id, state in self._changes(cursor):
                    cursor = position
                    pauses = self._pauses()
                    if state == "queuing":
                        self._look_again()
                    elif state != "running" and rollout_id in self._attempts:
                        self._attempts[rollout_id].stop("lost")
            except (httpx.HTTPError, GatewayError) as error:
                log.warning("no change stream from the gateway: %s", _why(error))
            await asyncio.sleep(next(pauses))

    async def _changes(self, cursor: int | None) -> AsyncIterator[tuple[int, str, str]]:
        connected = asyncio.Event()
        after_connecting = asyncio.create_task(self._look_again_after(connected))
        try:
            async for change in self._gateway.rollout_changes(cursor, connected):
                yield change
        finally:
            after_connecting.cancel()

    async def _look_again_after(self, connected: asyncio.Event) -> None:
        await connected.wait()
        self._look_again()

    def _look_again(self) -> None:
        self._stale = True
        self._wake.set()

    async def _fill(self) -> None:
        """Keep all places taken while anything waits."""
        pauses = self._pauses()
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                while len(self._tasks) < self._concurrency and (rollout := await self._next()):
                    self._spawn(rollout.rollout_id, self._claim_and_run(rollout))
                pauses = self._pauses()
            except (httpx.HTTPError, GatewayError) as error:
                log.warning("the gateway does not list what is queued: %s", _why(error))
                asyncio.get_running_loop().call_later(next(pauses), self._look_again)

    async def _next(self) -> Rollout | None:
        """The first queued rollout that this controller may start now."""
        if self._stale:
            self._stale = False
            self._queue = deque(await self._read_queue())
        now = time.monotonic()
        for _ in range(len(self._queue)):
            rollout = self._queue.popleft()
            if rollout.rollout_id in self._tasks:
                self._passed_over.add(rollout.rollout_id)
            elif self._failures.get(rollout.rollout_id, (0, 0.0))[1] <= now:
                self._stale = self._stale or not self._queue
                return rollout
        return None

    async def _read_queue(self) -> Sequence[Rollout]:
        """By priority, then age. Reads on while all of a full page is for other runners."""
        limit = _PAGE + len(self._tasks) + len(self._failures)
        while True:
            page = await self._gateway(list_rollouts("queuing", limit=limit))
            ours = [rollout for rollout in page if self._runner.accepts(rollout)]
            if ours or len(page) < limit:
                return ours
            limit *= 4

    # --------------------------------------------------------------------------------- one attempt

    def _spawn(self, rollout_id: str, work: Any) -> None:
        task = self._tasks[rollout_id] = asyncio.create_task(work, name=rollout_id)
        task.add_done_callback(self._over)

    def _over(self, task: "asyncio.Task[None]") -> None:
        del self._tasks[task.get_name()]
        if not task.cancelled() and task.exception():
            log.error("rollout %s: fault of the controller", task.get_name(), exc_info=task.exception())
        if task.get_name() in self._passed_over:
            self._passed_over.remove(task.get_name())
            self._stale = True
        self._wake.set()

    async def _claim_and_run(self, rollout: Rollout) -> None:
        request = ClaimRequest(controller=self._runner.name, lease_seconds=self._pace.lease_seconds)
        try:
            async with self._requests:
                claim = await self._gateway(claim_rollout(rollout.rollout_id, request))
        except GatewayError as error:
            self._failures.pop(rollout.rollout_id, None)
            if error.status not in (404, 409):
                log.warning("rollout %s: could not be claimed: %s", rollout.rollout_id, error)
            return
        except httpx.HTTPError:
            self._look_again()
            return
        self._starting.add(rollout.rollout_id)
        try:
            attempt = await self._runner.start(claim)
        except Exception as error:  # whatever it is, its owner should hear of it, not of a lease that ran out
            message = str(error) if isinstance(error, StartError) else f"could not be started: {error!r}"
            if not isinstance(error, StartError):
                log.exception("rollout %s: fault of the controller", rollout.rollout_id)
            end = AttemptEnd(ok=False, error_message=message, failure_kind="infra")
            await self._report(rollout.rollout_id, claim.attempt_id, end)
            return
        finally:
            self._starting.discard(rollout.rollout_id)
        if attempt.job:
            await self._persist(patch_rollout(rollout.rollout_id, StatusPatch(k8s_job_name=attempt.job)))
        await self._see_through(attempt)

    async def _see_through(self, attempt: Attempt) -> None:
        self._attempts[attempt.rollout_id] = attempt
        if self._stopping:
            attempt.stop("shutdown")
        watchdog = asyncio.create_task(self._stop_in_time(attempt))
        try:
            end = await attempt.wait()
        finally:
            watchdog.cancel()
            del self._attempts[attempt.rollout_id]
        if output := await attempt.output(_LOG_EVENT_BYTES):
            event = NewEvent(event_type="log", data=output)
            await self._persist(post_event(attempt.rollout_id, attempt.attempt_id, event))
        await self._report(attempt.rollout_id, attempt.attempt_id, end)
        await self._runner.forget(attempt, end.ok)

    async def _stop_in_time(self, attempt: Attempt) -> None:
        while (left := attempt.deadline() - time.time()) > 0:
            await asyncio.sleep(left)
            if attempt.deadline() <= time.time():
                with contextlib.suppress(httpx.HTTPError, GatewayError):
                    async with self._requests:
                        await self._renew([attempt.rollout_id])  # it may have been held meanwhile
        attempt.stop("timeout")

    async def _report(self, rollout_id: str, attempt_id: str, end: AttemptEnd) -> None:
        """Tell the gateway, however long it takes."""
        rollout = await self._persist(end_attempt(rollout_id, attempt_id, end))
        if rollout is None or rollout.status.state in TERMINAL:
            self._failures.pop(rollout_id, None)
        else:
            failures = self._failures.get(rollout_id, (0, 0.0))[0]
            pause = min(self._pace.retry_seconds * 2**failures, self._pace.retry_max_seconds)
            self._failures[rollout_id] = (failures + 1, time.monotonic() + pause)
            asyncio.get_running_loop().call_later(pause, self._look_again)
        if not end.ok:
            log.info("rollout %s: %s", rollout_id, end.error_message)

    async def _persist(self, request: Request[T]) -> T | None:
        """Send until the gateway answers; None if it refuses."""
        for pause in self._pauses():
            try:
                async with self._requests:
                    return await self._gateway(request)
            except httpx.HTTPError as error:
                log.warning("%s: %s; trying again", request.path, _why(error))
            except GatewayError as error:
                if error.status < 500:
                    log.info("%s: refused: %s", request.path, error)
                    return None
                log.warning("%s: %s; trying again", request.path, error)
            if self._dropping:
                return None
            await asyncio.sleep(pause)
        return None

    # -------------------------------------------------------------------------------------- leases

    async def _keep_leases(self) -> None:
        while True:
            self._runner.heartbeat()
            try:
                # A gateway that hangs must not keep the heartbeat back: agents would be stopped for want of it.
                async with asyncio.timeout(self._pace.lease_seconds / 3):
                    await self._renew([*self._attempts, *self._starting])
            except (httpx.HTTPError, GatewayError, TimeoutError) as error:
                log.warning("leases not renewed: %s", _why(error))
            await asyncio.sleep(self._pace.lease_seconds / 3)

    async def _renew(self, rollout_ids: list[str]) -> None:
        renewal = LeaseRenewal(
            controller=self._runner.name, lease_seconds=self._pace.lease_seconds, rollout_ids=rollout_ids
        )
        state = await self._gateway(renew_leases(renewal))
        kept = set(state.kept)
        for rollout_id in rollout_ids:
            attempt = self._attempts.get(rollout_id)
            if attempt is None:
                continue
            if rollout_id in kept:
                attempt.held_seconds = state.held_seconds.get(rollout_id, attempt.held_seconds)
            else:
                attempt.stop("lost")

    # ------------------------------------------------------------------------------------ the end

    def hurry(self) -> None:
        """Kill what is still being stopped."""
        for attempt in self._attempts.values():
            attempt.stop("shutdown", at_once=True)

    async def _shut_down(self) -> None:
        self._stopping = True
        if self._runner.outlives_controller:
            await self._drop(self._tasks.values())
            return
        for attempt in self._attempts.values():
            attempt.stop("shutdown")
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks.values(), timeout=self._pace.shutdown_seconds)
        self.hurry()
        if late:
            _, late = await asyncio.wait(late, timeout=2)
        await self._drop(late)

    async def _drop(self, tasks: "Iterable[asyncio.Task[None]]") -> None:
        """What was not reported yet is found by the next controller."""
        self._dropping = True
        dropped = list(tasks)
        for task in dropped:
            task.cancel()
        await asyncio.gather(*dropped, return_exceptions=True)

    def _pauses(self) -> Iterator[float]:
        """Seconds to wait before each further try, doubling, without end."""
        pause = self._pace.retry_seconds
        while True:
            yield pause
            pause = min(pause * 2, self._pace.retry_max_seconds)


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
