"""The store on SQLite. Reads never wait for writes, and nothing here scans the finished rollouts."""

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from harnessrl.gateway.store import browse
from harnessrl.gateway.store.base import reads, writes
from harnessrl.gateway.store.entries import Entries
from harnessrl.gateway.store.retention import Retention
from harnessrl.gateway.store.rollouts import Rollouts
from harnessrl.gateway.store.runs import Runs
from harnessrl.schemas import Endpoint, Json

__all__ = ["SqliteStore"]

_IN_USE = "in use"
"""Still true when a gateway was killed."""
_CUT_BY_A_CRASH = """
UPDATE calls SET delivered = 0 WHERE entry IN (
  SELECT entries.id FROM entries JOIN rollouts ON rollouts.id = rollout
  WHERE data IS NULL AND state IN ('queuing', 'running')
  AND entries.id > (SELECT max(id) FROM entries) - 10000
  AND timestamp > (SELECT timestamp FROM entries ORDER BY id DESC LIMIT 1) - 1
) AND entry NOT IN (SELECT parent FROM calls WHERE parent IS NOT NULL)
"""
"""A call of the last second before a kill is durable, but its answer may not have gone out: it counts as not
delivered (invariant 3) until a later call contains the answer."""


class SqliteStore(Rollouts, Entries, Runs, Retention):
    @classmethod
    async def open(cls, path: Path) -> "SqliteStore":
        store = cls(path)
        (cursor,) = await store._one("SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'changes'")
        store._cursor = cursor
        if await store.get_setting(_IN_USE):
            await store._write(_CUT_BY_A_CRASH)
        await store._record_cut_calls()
        await store.put_setting(_IN_USE, True)
        return store

    async def close(self) -> None:
        await self.put_setting(_IN_USE, False)
        await self._db.close()

    async def endpoints(self) -> list[Endpoint]:
        rows = await self._db.read(lambda db: db.execute("SELECT value FROM endpoints ORDER BY id").fetchall())
        return [Endpoint.model_validate_json(value) for (value,) in rows]

    @writes
    def put_endpoints(self, db: sqlite3.Connection, endpoints: Sequence[Endpoint]) -> None:
        for e in endpoints:
            db.execute(
                "INSERT INTO endpoints (model, endpoint, value) VALUES (?,?,?) "
                "ON CONFLICT (model, endpoint) DO UPDATE SET value = excluded.value",
                (e.model, e.endpoint, orjson.dumps(e.model_dump())),
            )

    async def delete_endpoints(self) -> None:
        await self._write("DELETE FROM endpoints")

    async def get_setting(self, name: str) -> Any:
        row = await self._one("SELECT value FROM settings WHERE name = ?", name)
        return orjson.loads(row[0]) if row else None

    async def put_setting(self, name: str, value: Any) -> None:
        await self._write("INSERT OR REPLACE INTO settings VALUES (?,?)", (name, orjson.dumps(value)))

    @reads
    def find(self, db: sqlite3.Connection, search: browse.Search) -> Json:
        return browse.find(db, search)

    @reads
    def find_groups(self, db: sqlite3.Connection, search: browse.Search) -> Json:
        return browse.find_groups(db, search)

    @reads
    def facets(self, db: sqlite3.Connection, run: str | None) -> Json:
        return browse.facets(db, run)

    async def counts(self) -> Json:
        return await self._db.read(browse.counts)
