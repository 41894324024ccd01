"""What the parts of the store share: the file, and what memory knows of it until a commit says otherwise."""

import asyncio
import functools
import sqlite3
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from harnessrl.gateway.store import Access
from harnessrl.gateway.store.calls import CallWriter
from harnessrl.gateway.store.database import Database
from harnessrl.gateway.store.rows import access_of
from harnessrl.schemas import TERMINAL, Change

if TYPE_CHECKING:
    from types import CoroutineType

__all__ = ["Base", "Changed", "reads", "writes"]

P = ParamSpec("P")
S = TypeVar("S", bound="Base")
T = TypeVar("T")
Job = Callable[Concatenate[S, sqlite3.Connection, P], T]

_ACCESS_ENTRIES = 20_000
_CHANGES_PAGE = 1000


class Changed(NamedTuple):
    """Noted by writes: `on_commit` forgets what memory knew of the rollout and wakes the streams."""

    rollout_id: str | None
    """None: nothing but a run's records changed."""
    cursor: int | None


def reads(job: Job[S, P, T]) -> "Callable[Concatenate[S, P], CoroutineType[Any, Any, T]]":
    """A method of one that is given a reader's connection."""

    @functools.wraps(job)
    async def method(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._db.read(lambda db: job(self, db, *args, **kwargs))

    return method


def writes(job: Job[S, P, T]) -> "Callable[Concatenate[S, P], CoroutineType[Any, Any, T]]":
    """A method of one that is given the writer's connection; it returns once what that did is durable."""

    @functools.wraps(job)
    async def method(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._db.write(lambda db: job(self, db, *args, **kwargs))

    return method


class Base:
    """One SQLite file, as all parts of the store see it."""

    def __init__(self, path: Path):
        """Opens or creates the file; raises `StoreError`. Must be called in the event loop."""
        self._calls = CallWriter()
        self._access: OrderedDict[str, Access] = OrderedDict()
        self._generation = 0
        self._cursor = 0
        self._changed = asyncio.Event()
        self._db = Database(path, self._committed)

    def backlog(self) -> int:
        """Writes that wait for their commit."""
        return self._db.backlog()

    async def access(self, rollout_id: str) -> Access:
        if (known := self._access.get(rollout_id)) is not None:
            return known
        generation = self._generation
        found = await self._db.read(lambda db: access_of(db, rollout_id))
        if generation == self._generation and found.state not in TERMINAL:
            self._access[rollout_id] = found
            if len(self._access) > _ACCESS_ENTRIES:
                self._access.popitem(last=False)
        return found

    def changes(self, after: int | None) -> AsyncIterator[tuple[int, str, Change]]:
        return self._changes_since(self._cursor if after is None else after)

    async def _changes_since(self, cursor: int) -> AsyncIterator[tuple[int, str, Change]]:
        while True:
            changed = self._changed
            rows = await self._db.read(
                lambda db, since=cursor: db.execute(
                    "SELECT cursor, rollout_id, state FROM changes WHERE cursor > ? ORDER BY cursor LIMIT ?",
                    (since, _CHANGES_PAGE),
                ).fetchall()
            )
            for row in rows:
                cursor = row[0]
                yield row
            if not rows:
                await changed.wait()

    async def _write(self, sql: str, arguments: tuple[Any, ...] = ()) -> None:
        await self._db.write(lambda db: db.execute(sql, arguments) and None)

    @reads
    def _one(self, db: sqlite3.Connection, sql: str, *arguments: Any) -> Any:
        return db.execute(sql, arguments).fetchone()

    def _note_change(self, db: sqlite3.Connection, rollout_id: str, state: str) -> None:
        added = db.execute(
            "INSERT INTO changes (rollout_id, state, at) VALUES (?,?,?)", (rollout_id, state, time.time())
        )
        self._db.note(Changed(rollout_id, added.lastrowid))

    def _committed(self, notes: list[Changed]) -> None:
        if not notes:
            return
        self._generation += 1
        for rollout_id, cursor in notes:
            if rollout_id is not None:
                self._access.pop(rollout_id, None)
            self._cursor = max(self._cursor, cursor or 0)
        self._changed.set()
        self._changed = asyncio.Event()
