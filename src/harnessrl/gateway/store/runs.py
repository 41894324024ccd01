"""What trainers report of their runs."""

import sqlite3
from collections.abc import AsyncIterator, Sequence

import orjson

from harnessrl.gateway.store.base import Base, Changed, reads, writes
from harnessrl.schemas import Run, RunRecord

__all__ = ["Runs"]


class Runs(Base):
    @writes
    def add_run_records(self, db: sqlite3.Connection, run_id: str, records: Sequence[RunRecord]) -> None:
        db.executemany(
            "INSERT INTO run_records (run_id, kind, at, data) VALUES (?,?,?,?)",
            [(run_id, record.kind, record.at, orjson.dumps(record.data)) for record in records],
        )
        self._db.note(Changed(None, None))

    @reads
    def runs(self, db: sqlite3.Connection) -> list[Run]:
        ids = db.execute("SELECT run_id FROM run_records GROUP BY run_id ORDER BY min(id) DESC").fetchall()
        return [_run(db, run_id) for (run_id,) in ids]

    async def run_records(self, run_id: str, after: int) -> list[RunRecord]:
        rows = await self._db.read(
            lambda db: db.execute(
                "SELECT id, kind, at, data FROM run_records WHERE run_id = ? AND id > ? ORDER BY id",
                (run_id, after),
            ).fetchall()
        )
        return [RunRecord(id=i, kind=kind, at=at, data=orjson.loads(data)) for i, kind, at, data in rows]

    async def follow_run(self, run_id: str, after: int) -> AsyncIterator[RunRecord]:
        while True:
            changed = self._changed
            records = await self.run_records(run_id, after)
            for record in records:
                assert record.id is not None
                after = record.id
                yield record
            if not records:
                await changed.wait()


def _run(db: sqlite3.Connection, run_id: str) -> Run:
    first, last = (
        db.execute(f"SELECT at FROM run_records WHERE run_id = ? ORDER BY id {way} LIMIT 1", (run_id,)).fetchone()[
            0
        ]
        for way in ("ASC", "DESC")
    )
    newest = dict(
        db.execute(
            "SELECT kind, max(id) FROM run_records WHERE run_id = ? AND kind IN ('start', 'end') GROUP BY kind",
            (run_id,),
        ).fetchall()
    )
    start = db.execute("SELECT data FROM run_records WHERE id = ?", (newest.get("start"),)).fetchone()
    return Run(
        run_id=run_id,
        started_at=first,
        last_at=last,
        start=orjson.loads(start[0]) if start else {},
        ended=newest.get("end", 0) > newest.get("start", 0),
    )
