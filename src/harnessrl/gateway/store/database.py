"""One SQLite file: a writer thread that commits in groups, and reader threads.

A write is acknowledged after its commit; what waits meanwhile is committed together. WAL with
`synchronous=NORMAL`: an acknowledged write survives kill -9 of the process (a power cut may cost the last
moments, never consistency). Neither side ever blocks the event loop.
"""

import asyncio
import fcntl
import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from harnessrl.gateway.store import StoreError
from harnessrl.gateway.store.schema import MIGRATIONS

__all__ = ["Database"]

T = TypeVar("T")
Job = Callable[[sqlite3.Connection], T]

_GROUP = 500
"""Most writes in one commit."""
_READERS = 4
_VACUUM_PAGES = 2000
_CHECKPOINT_PAGES = 4000
"""WAL size (in pages of 4 KiB) at which the writer moves it into the file."""


class Database:
    def __init__(self, path: Path, on_commit: Callable[[list[Any]], None]):
        """`on_commit` gets, in the event loop, what the committed jobs have noted."""
        self._path = path
        self._on_commit = on_commit
        self._loop = asyncio.get_running_loop()
        self._lock = _lock(path)
        self._connection = _connect(path)
        _migrate(self._connection, path)
        self._notes: list[Any] = []
        self._jobs: queue.SimpleQueue[tuple[Job[Any], asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._local = threading.local()
        self._read_connections: list[sqlite3.Connection] = []
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="store-read")
        self._writer = threading.Thread(target=self._write_groups, name="store-write", daemon=True)
        self._writer.start()

    async def write(self, job: Job[T]) -> T:
        """Run `job` in the writer and return its result once it is durable. An exception undoes all of it."""
        done: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put((job, done))
        return await asyncio.shield(done)

    async def read(self, job: Job[T]) -> T:
        return await self._loop.run_in_executor(self._readers, self._with_reader, job)

    def note(self, what: Any) -> None:
        """From within a write job: tell `on_commit` about it, if it is committed."""
        self._notes.append(what)

    def backlog(self) -> int:
        """Writes that wait for the writer."""
        return self._jobs.qsize()

    async def vacuum(self) -> None:
        """Give free pages back to the file system, some at a time, so that writes need not wait for long."""
        while await self.write(_vacuum):
            pass

    async def close(self) -> None:
        """Commit what waits, then let go of the file."""
        self._jobs.put(None)
        await asyncio.to_thread(self._writer.join)
        self._readers.shutdown()
        for connection in (*self._read_connections, self._connection):
            connection.close()
        self._lock.close()

    def _with_reader(self, job: Job[T]) -> T:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = _connect(self._path)
            connection.execute("PRAGMA query_only = ON")
            self._read_connections.append(connection)
        return job(connection)

    def _write_groups(self) -> None:
        while (first := self._jobs.get()) is not None:
            group, last = [first], False
            while len(group) < _GROUP and not last:
                try:
                    item = self._jobs.get_nowait()
                except queue.Empty:
                    break
                if item is None:
                    last = True
                else:
                    group.append(item)
            self._commit(group)
            if last:
                return

    def _commit(self, group: list[tuple[Job[Any], asyncio.Future[Any]]]) -> None:
        results: list[tuple[asyncio.Future[Any], Any, BaseException | None]] = []
        self._notes = []
        execute = self._connection.execute
        try:
            execute("BEGIN IMMEDIATE")
            for job, done in group:
                results.append((done, *self._run(job)))
            execute("COMMIT")
        except sqlite3.Error as error:
            if self._connection.in_transaction:
                execute("ROLLBACK")
            self._notes = []
            results = [(done, None, _not_written(error)) for _, done in group]
        self._loop.call_soon_threadsafe(self._resolve, results, self._notes)

    def _run(self, job: Job[Any]) -> tuple[Any, BaseException | None]:
        noted = len(self._notes)
        execute = self._connection.execute
        execute("SAVEPOINT job")
        try:
            result = job(self._connection)
        except Exception as error:  # belongs to this job's caller; the others of the group are committed
            if not self._connection.in_transaction:
                raise  # a full disk: SQLite has undone the whole group
            execute("ROLLBACK TO job")
            execute("RELEASE job")
            del self._notes[noted:]
            return None, _not_written(error) if isinstance(error, sqlite3.OperationalError) else error
        execute("RELEASE job")
        return result, None

    def _resolve(
        self, results: list[tuple[asyncio.Future[Any], Any, BaseException | None]], notes: list[Any]
    ) -> None:
        self._on_commit(notes)
        for done, result, error in results:
            if done.cancelled():
                continue
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)


def _vacuum(connection: sqlite3.Connection) -> int:
    """The number of pages given back."""
    (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    pages = min(free, _VACUUM_PAGES)
    for _ in range(pages):
        connection.execute("PRAGMA incremental_vacuum(1)")  # the module steps it once, which frees one page
    return pages


def _not_written(error: sqlite3.Error) -> StoreError:
    return StoreError(f"The store can't be written: {error}.")


def _lock(path: Path) -> Any:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path.with_name(path.name + ".lock"), "w")  # noqa: SIM115 (held until close)
    except OSError as error:
        raise StoreError(f"The store {path} can't be opened: {error.strerror}.") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise StoreError(f"Another gateway is using the store {path}: end it, or give another --store.") from error
    return file


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=256)
    connection.execute("PRAGMA busy_timeout = 10000")
    return connection


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
    except sqlite3.DatabaseError as error:
        raise StoreError(f"{path} is not a store of HarnessRL ({error}): give another --store.") from error
    if version > len(MIGRATIONS):
        raise StoreError(
            f"The store {path} has schema {version}, this version of HarnessRL knows up to {len(MIGRATIONS)}: "
            "update HarnessRL, or give another --store."
        )
    for number, script in enumerate(MIGRATIONS[version:], version + 1):
        connection.executescript(f"BEGIN; {script}; PRAGMA user_version = {number}; COMMIT;")
