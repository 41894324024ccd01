"""What happened in an attempt: events, and calls as v1.0's events and as they are."""

import sqlite3
import time
from collections.abc import Sequence
from contextlib import suppress

import orjson

from harnessrl.gateway.store import CallRecord, Conflict, NotFound, UnderWay
from harnessrl.gateway.store.base import Base, reads, writes
from harnessrl.gateway.store.calls import Chain, call_of, cut_call, read_calls, record_of, whole_request
from harnessrl.gateway.store.rows import access_of, key_of, last_attempt, summarize
from harnessrl.gateway.store.v1 import model_request
from harnessrl.schemas import TERMINAL, Call, Event, Json

__all__ = ["Entries"]


class Entries(Base):
    @reads
    def attempts(self, db: sqlite3.Connection, rollout_id: str) -> list[str]:
        rows = db.execute(
            "SELECT attempt_id FROM entries WHERE rollout = ? GROUP BY attempt_id ORDER BY min(id)",
            (key_of(db, rollout_id),),
        )
        return [attempt_id for (attempt_id,) in rows]

    @writes
    def add_event(
        self,
        db: sqlite3.Connection,
        rollout_id: str,
        attempt_id: str,
        event_type: str,
        data: Json,
        late: bool = False,
    ) -> Event:
        access, now = access_of(db, rollout_id), time.time()
        if not late and not access.open(attempt_id):
            raise Conflict(f"Attempt {attempt_id} has ended: it takes no more events")
        _add_entry(db, key_of(db, rollout_id), attempt_id, event_type, now, orjson.dumps(data))
        if access.state in TERMINAL:
            summarize(db, rollout_id)
        return Event(event_type=event_type, rollout_id=rollout_id, attempt_id=attempt_id, timestamp=now, data=data)

    @reads
    def events(
        self, db: sqlite3.Connection, rollout_id: str, attempt_id: str | None = None, event_type: str | None = None
    ) -> list[Event]:
        key, attempt = key_of(db, rollout_id), attempt_id or last_attempt(db, rollout_id)
        rows = db.execute(
            "SELECT id, event_type, timestamp, data FROM entries WHERE rollout = ? AND attempt_id = ? ORDER BY id",
            (key, attempt),
        ).fetchall()
        rows = [row for row in rows if event_type in (None, row[1])]
        calls = read_calls(db, key, attempt) if any(row[3] is None for row in rows) else {}
        chain = Chain()
        whole: dict[int, Json] = {}
        for entry, call in calls.items():
            prompt, messages = chain.add(call)
            whole[entry] = model_request(
                call.facts,
                call.http_status,
                whole_request(call, messages),
                call.response,
                prompt,
                call.sampled_ids,
                call.logprobs,
            )
        return [
            Event(
                event_type=kind,
                rollout_id=rollout_id,
                attempt_id=attempt,
                timestamp=at,
                data=whole[entry] if data is None else orjson.loads(data),
            )
            for entry, kind, at, data in rows
        ]

    @writes
    def add_call(self, db: sqlite3.Connection, call: CallRecord) -> None:
        if not access_of(db, call.rollout_id).open(call.attempt_id):
            raise Conflict(f"Attempt {call.attempt_id} has ended: it takes no more calls")
        if db.execute("SELECT 1 FROM calls WHERE call_id = ?", (call.call_id,)).fetchone():
            return
        key = key_of(db, call.rollout_id)
        entry = _add_entry(db, key, call.attempt_id, "model_request", time.time(), None)
        self._calls.insert(db, key, entry, call)

    @writes
    def note_under_way(self, db: sqlite3.Connection, begun: Sequence[UnderWay], ended: Sequence[str]) -> None:
        db.executemany("INSERT OR IGNORE INTO under_way VALUES (?,?,?,?,?,?)", begun)
        db.executemany("DELETE FROM under_way WHERE call_id = ?", [(call_id,) for call_id in ended])

    async def _record_cut_calls(self) -> None:
        """What was under way when the gateway was last ended is a failed call, if its attempt goes on."""
        cut = await self._db.read(lambda db: db.execute("SELECT * FROM under_way").fetchall())
        for call in map(UnderWay._make, cut):
            with suppress(NotFound, Conflict):
                await self.add_call(cut_call(call))
        await self._write("DELETE FROM under_way")

    async def set_delivered(self, call_id: str, delivered: bool) -> None:
        await self._write("UPDATE calls SET delivered = ? WHERE call_id = ?", (delivered, call_id))

    @reads
    def calls(self, db: sqlite3.Connection, rollout_id: str, attempt_id: str | None = None) -> list[Call]:
        attempt = attempt_id or last_attempt(db, rollout_id)
        calls = read_calls(db, key_of(db, rollout_id), attempt)
        ids = {entry: call.call_id for entry, call in calls.items()}
        in_order = sorted(calls.values(), key=lambda call: call.facts["started_at"])
        return [
            call_of(call, rollout_id, attempt, index, ids[call.parent] if call.parent else None)
            for index, call in enumerate(in_order)
        ]

    @reads
    def call_records(self, db: sqlite3.Connection, rollout_id: str, attempt_id: str) -> list[CallRecord]:
        calls = read_calls(db, key_of(db, rollout_id), attempt_id)
        ids = {entry: call.call_id for entry, call in calls.items()}
        chain = Chain()
        return [
            record_of(call, rollout_id, attempt_id, ids[call.parent] if call.parent else None, chain)
            for call in calls.values()
        ]


def _add_entry(
    db: sqlite3.Connection, rollout: int, attempt_id: str, event_type: str, at: float, data: bytes | None
) -> int:
    entry = db.execute(
        "INSERT INTO entries (rollout, attempt_id, event_type, timestamp, data) VALUES (?,?,?,?,?)",
        (rollout, attempt_id, event_type, at, data),
    ).lastrowid
    assert entry is not None
    return entry
