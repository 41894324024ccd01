"""What is removed: rollouts that are deleted, and the oldest that the trainer is done with."""

import sqlite3
import time
from collections.abc import Sequence

from harnessrl.gateway.store.base import Base, writes

__all__ = ["Retention"]

_REMOVE_AT_ONCE = 50
"""Rollouts that one transaction of `retain` removes."""


class Retention(Base):
    @writes
    def delete_rollout(self, db: sqlite3.Connection, rollout_id: str) -> None:
        self._delete(db, rollout_id)

    def _delete(self, db: sqlite3.Connection, rollout_id: str) -> None:
        row = db.execute("SELECT id FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
        if row is None:
            return
        entries = [i for (i,) in db.execute("SELECT id FROM entries WHERE rollout = ? AND data IS NULL", row)]
        for entry in entries:
            for table in ("arrays", "payloads", "calls"):
                db.execute(f"DELETE FROM {table} WHERE entry = ?", (entry,))
        self._calls.forget(entries)
        db.execute("DELETE FROM entries WHERE rollout = ?", row)
        db.execute("DELETE FROM fields WHERE rollout = ?", row)
        db.execute("DELETE FROM summaries WHERE rollout = ?", row)
        db.execute("DELETE FROM rollouts WHERE id = ?", row)
        self._note_change(db, rollout_id, "deleted")

    @writes
    def mark_consumed(self, db: sqlite3.Connection, rollout_ids: Sequence[str]) -> None:
        db.executemany(
            "UPDATE rollouts SET consumed = 1 WHERE rollout_id = ? AND ended IS NOT NULL",
            [(rollout_id,) for rollout_id in rollout_ids],
        )

    async def retain(self, keep_seconds: float | None, keep_bytes: int | None) -> int:
        def job(db: sqlite3.Connection) -> int:
            removed = 0
            consumed = db.execute(
                "SELECT rollout_id, updated_at FROM rollouts WHERE consumed ORDER BY id LIMIT ?", (_REMOVE_AT_ONCE,)
            ).fetchall()
            for rollout_id, ended_at in consumed:
                too_old = keep_seconds is not None and ended_at < time.time() - keep_seconds
                too_large = keep_bytes is not None and _used_bytes(db) > keep_bytes
                if too_old or too_large:
                    self._delete(db, rollout_id)
                    removed += 1
            oldest = (
                "SELECT coalesce(min(created_at), 9e99) FROM rollouts WHERE id = (SELECT min(id) FROM rollouts)"
            )
            if removed:
                db.execute(
                    "DELETE FROM changes WHERE cursor < "
                    f"(SELECT cursor FROM changes WHERE at >= ({oldest}) ORDER BY cursor LIMIT 1)"
                )
            return removed

        total = 0
        while removed := await self._db.write(job):
            total += removed
        if total:
            await self._db.vacuum()
        return total

    async def size_bytes(self) -> int:
        return await self._db.read(_used_bytes)


def _used_bytes(db: sqlite3.Connection) -> int:
    pages, free, size = (
        db.execute(f"PRAGMA {what}").fetchone()[0] for what in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size
