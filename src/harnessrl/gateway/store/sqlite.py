"""The store on SQLite. Reads never wait for writes, and nothing here scans the finished rollouts."""

import asyncio
import sqlite3
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson

from harnessrl.gateway.store import Access, CallRecord, Conflict, NotFound, UnderWay, browse
from harnessrl.gateway.store.calls import CallWriter, Chain, call_of, cut_call, read_calls, record_of, whole_request
from harnessrl.gateway.store.database import Database
from harnessrl.gateway.store.judge import Evidence, judge
from harnessrl.gateway.store.schema import SUMMARIZE
from harnessrl.gateway.store.v1 import model_request
from harnessrl.schemas import (
    TERMINAL,
    AttemptEnd,
    Call,
    Change,
    Endpoint,
    Event,
    Json,
    LeaseState,
    NewRollout,
    Rollout,
    RolloutConfig,
    RolloutStatus,
    Run,
    RunRecord,
    State,
    StatusPatch,
    TerminalItem,
    TerminalPage,
)

__all__ = ["SqliteStore"]

_ACCESS_ENTRIES = 20_000
_CHANGES_PAGE = 1000
_REMOVE_AT_ONCE = 50
"""Rollouts that one transaction of `retain` removes."""
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
_ALLOWED: dict[str, frozenset[State]] = {
    "queuing": frozenset({"running", "failed"}),
    "running": frozenset({"succeeded", "failed"}),
}

_STATUS = (
    "state, k8s_job_name, last_attempt_id, error_message, version, created_at, updated_at, failure_kind, "
    "held_seconds"
)
_STATUS_NAMES = _STATUS.split(", ")
_ROLLOUT = f"rollout_id, input, is_train, config, metadata, {_STATUS}"


class _Changed(NamedTuple):
    """Noted by writes: `on_commit` forgets what memory knew of the rollout and wakes the streams."""

    rollout_id: str | None
    """None: nothing but a run's records changed."""
    cursor: int | None


class SqliteStore:
    def __init__(self, path: Path):
        """Opens or creates the file; raises `StoreError`. Must be called in the event loop."""
        self._calls = CallWriter()
        self._access: OrderedDict[str, Access] = OrderedDict()
        self._generation = 0
        self._cursor = 0
        self._changed = asyncio.Event()
        self._db = Database(path, self._committed)

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

    def backlog(self) -> int:
        """Writes that wait for their commit."""
        return self._db.backlog()

    # -------------------------------------------------------------------------------- rollouts

    async def create_rollouts(self, new: Sequence[NewRollout]) -> list[Rollout]:
        rows = [
            (
                item.rollout_id or uuid.uuid4().hex,
                orjson.dumps(item.input),
                item.is_train,
                orjson.dumps(item.config.model_dump()),
                orjson.dumps(item.metadata.model_dump()),
                -(item.config.priority or 0),
            )
            for item in new
        ]

        def job(db: sqlite3.Connection) -> list[Rollout]:
            return [self._create(db, row) for row in rows]

        return await self._db.write(job)

    def _create(self, db: sqlite3.Connection, row: tuple[Any, ...]) -> Rollout:
        now = time.time()
        added = db.execute(
            "INSERT OR IGNORE INTO rollouts "
            "(rollout_id, input, is_train, config, metadata, state, rank, created_at, updated_at) "
            "VALUES (?,?,?,?,?,'queuing',?,?,?)",
            (*row, now, now),
        ).rowcount
        if added:
            self._note_change(db, row[0], "queuing")
        return _rollout(db, row[0])

    async def get_rollout(self, rollout_id: str) -> Rollout:
        return await self._db.read(lambda db: _rollout(db, rollout_id))

    async def access(self, rollout_id: str) -> Access:
        if (known := self._access.get(rollout_id)) is not None:
            return known
        generation = self._generation
        found = await self._db.read(lambda db: _access(db, rollout_id))
        if generation == self._generation and found.state not in TERMINAL:
            self._access[rollout_id] = found
            if len(self._access) > _ACCESS_ENTRIES:
                self._access.popitem(last=False)
        return found

    async def attempts(self, rollout_id: str) -> list[str]:
        def job(db: sqlite3.Connection) -> list[str]:
            rows = db.execute(
                "SELECT attempt_id FROM entries WHERE rollout = ? GROUP BY attempt_id ORDER BY min(id)",
                (_key(db, rollout_id),),
            )
            return [attempt_id for (attempt_id,) in rows]

        return await self._db.read(job)

    async def list_rollouts(self, states: Sequence[State], limit: int) -> bytes:
        def job(db: sqlite3.Connection) -> bytes:
            found: list[tuple[Any, ...]] = []
            for state in set(states):
                found += db.execute(
                    f"SELECT rank, id, {_ROLLOUT} FROM rollouts WHERE state = ? ORDER BY rank, id LIMIT ?",
                    (state, limit),
                )
            found.sort(key=lambda row: row[:2])
            return orjson.dumps([_wire(row[2:]) for row in found[:limit]])

        return await self._db.read(job)

    async def terminal(self, after: int, limit: int) -> TerminalPage:
        def job(db: sqlite3.Connection) -> TerminalPage:
            total = _counter(db, "ended")
            rows = db.execute(
                "SELECT ended, rollout_id, state, input, is_train FROM rollouts WHERE ended > ? "
                "ORDER BY ended LIMIT ?",
                (after, limit),
            ).fetchall()
            items = [
                TerminalItem(rollout_id=r[1], state=r[2], data_id=_data_id(orjson.loads(r[3])), is_train=bool(r[4]))
                for r in rows
            ]
            next_after = rows[-1][0] if len(rows) == limit else max(after, total)
            return TerminalPage(items=items, next_after=next_after, total_terminal=total)

        return await self._db.read(job)

    async def patch_status(self, rollout_id: str, patch: StatusPatch) -> Rollout:
        changed = patch.model_dump(exclude_unset=True)

        def job(db: sqlite3.Connection) -> Rollout:
            state = _access(db, rollout_id).state
            target = changed.pop("state", None)
            if target is not None and target not in _ALLOWED.get(state, ()):
                raise Conflict(f"A rollout that is {state} can't become {target}")
            if target is not None:
                self._enter(db, rollout_id, target)
            for column, value in changed.items():
                db.execute(f"UPDATE rollouts SET {column} = ? WHERE rollout_id = ?", (value, rollout_id))
            if target is not None or changed:
                _touch(db, rollout_id)
            return _rollout(db, rollout_id)

        return await self._db.write(job)

    async def delete_rollout(self, rollout_id: str) -> None:
        await self._db.write(lambda db: self._delete(db, rollout_id))

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

    # -------------------------------------------------------------------------------- attempts

    async def claim(self, rollout_id: str, controller: str, lease_seconds: float) -> tuple[Rollout, str]:
        def job(db: sqlite3.Connection) -> tuple[Rollout, str]:
            access = _access(db, rollout_id)
            if access.state != "queuing":
                raise Conflict(f"The rollout is {access.state}, not queuing")
            attempt_id = str(access.tries)
            db.execute(
                "UPDATE rollouts SET tries = tries + 1, last_attempt_id = ?, controller = ?, lease_until = ?, "
                "k8s_job_name = NULL, held_seconds = NULL WHERE rollout_id = ?",
                (attempt_id, controller, time.time() + lease_seconds, rollout_id),
            )
            self._enter(db, rollout_id, "running")
            _touch(db, rollout_id)
            return _rollout(db, rollout_id), attempt_id

        return await self._db.write(job)

    async def renew(self, controller: str, rollout_ids: Sequence[str], lease_seconds: float) -> LeaseState:
        def job(db: sqlite3.Connection) -> LeaseState:
            until = time.time() + lease_seconds
            held: dict[str, float] = {}
            for rollout_id in rollout_ids:
                row = db.execute(
                    "UPDATE rollouts SET lease_until = ? WHERE rollout_id = ? AND controller = ? "
                    "AND state = 'running' RETURNING coalesce(held_seconds, 0)",
                    (until, rollout_id, controller),
                ).fetchone()
                if row is not None:
                    held[rollout_id] = row[0]
            return LeaseState(kept=list(held), held_seconds=held)

        return await self._db.write(job)

    async def end_attempt(self, rollout_id: str, attempt_id: str, end: AttemptEnd) -> Rollout:
        def job(db: sqlite3.Connection) -> Rollout:
            access = _access(db, rollout_id)
            if not attempt_id.isdecimal() or int(attempt_id) >= access.tries:
                raise NotFound(f"The rollout has no attempt {attempt_id}")
            if access.open(attempt_id):
                self._end(db, rollout_id, attempt_id, end)
            return _rollout(db, rollout_id)

        return await self._db.write(job)

    async def requeue_expired(self) -> list[str]:
        expired = "SELECT rollout_id, last_attempt_id, controller FROM rollouts WHERE lease_until < ?"

        def job(db: sqlite3.Connection) -> list[str]:
            rows = db.execute(expired, (time.time(),)).fetchall()
            for rollout_id, attempt_id, controller in rows:
                message = f"the controller {controller} was not heard of any more"
                self._end(
                    db, rollout_id, attempt_id, AttemptEnd(ok=False, error_message=message, failure_kind="infra")
                )
            return [rollout_id for rollout_id, _, _ in rows]

        if not await self._db.read(lambda db: db.execute(expired, (time.time(),)).fetchone()):
            return []
        return await self._db.write(job)

    def _end(self, db: sqlite3.Connection, rollout_id: str, attempt_id: str, end: AttemptEnd) -> None:
        verdict = judge(end, _evidence(db, rollout_id, attempt_id))
        self._enter(db, rollout_id, verdict.state)
        db.execute(
            "UPDATE rollouts SET failure_kind = ?, error_message = ? WHERE rollout_id = ?",
            (verdict.failure_kind, verdict.error_message, rollout_id),
        )
        _touch(db, rollout_id)

    def _enter(self, db: sqlite3.Connection, rollout_id: str, state: str) -> None:
        """Every change of state after the first."""
        db.execute("UPDATE rollouts SET state = ?, rank = 0 WHERE rollout_id = ?", (state, rollout_id))
        if state != "running":
            db.execute(
                "UPDATE rollouts SET lease_until = NULL, controller = NULL WHERE rollout_id = ?", (rollout_id,)
            )
        if state == "queuing":
            db.execute(
                "UPDATE rollouts SET rank = -coalesce(json_extract(config, '$.priority'), 0) WHERE rollout_id = ?",
                (rollout_id,),
            )
        if state in TERMINAL:
            db.execute("UPDATE rollouts SET ended = ? WHERE rollout_id = ?", (_count(db, "ended"), rollout_id))
            _summarize(db, rollout_id)
        self._note_change(db, rollout_id, state)

    async def add_held_seconds(self, rollout_id: str, seconds: float) -> None:
        await self._write(
            "UPDATE rollouts SET held_seconds = coalesce(held_seconds, 0) + ? WHERE rollout_id = ?",
            (seconds, rollout_id),
        )

    # -------------------------------------------------------------------------------- events, calls

    async def add_event(
        self, rollout_id: str, attempt_id: str, event_type: str, data: Json, late: bool = False
    ) -> Event:
        dumped = orjson.dumps(data)

        def job(db: sqlite3.Connection) -> Event:
            access = _access(db, rollout_id)
            if not late and not access.open(attempt_id):
                raise Conflict(f"Attempt {attempt_id} has ended: it takes no more events")
            now = time.time()
            _add_entry(db, _key(db, rollout_id), attempt_id, event_type, now, dumped)
            if access.state in TERMINAL:
                _summarize(db, rollout_id)
            return Event(
                event_type=event_type, rollout_id=rollout_id, attempt_id=attempt_id, timestamp=now, data=data
            )

        return await self._db.write(job)

    async def events(
        self, rollout_id: str, attempt_id: str | None = None, event_type: str | None = None
    ) -> list[Event]:
        def job(db: sqlite3.Connection) -> list[Event]:
            key, attempt = _key(db, rollout_id), attempt_id or _last_attempt(db, rollout_id)
            rows = db.execute(
                "SELECT id, event_type, timestamp, data FROM entries WHERE rollout = ? AND attempt_id = ? "
                "ORDER BY id",
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

        return await self._db.read(job)

    async def add_call(self, call: CallRecord) -> None:
        def job(db: sqlite3.Connection) -> None:
            if not _access(db, call.rollout_id).open(call.attempt_id):
                raise Conflict(f"Attempt {call.attempt_id} has ended: it takes no more calls")
            if db.execute("SELECT 1 FROM calls WHERE call_id = ?", (call.call_id,)).fetchone():
                return
            key = _key(db, call.rollout_id)
            entry = _add_entry(db, key, call.attempt_id, "model_request", time.time(), None)
            self._calls.insert(db, key, entry, call)

        await self._db.write(job)

    async def note_under_way(self, begun: Sequence[UnderWay], ended: Sequence[str]) -> None:
        def job(db: sqlite3.Connection) -> None:
            db.executemany("INSERT OR IGNORE INTO under_way VALUES (?,?,?,?,?,?)", begun)
            db.executemany("DELETE FROM under_way WHERE call_id = ?", [(call_id,) for call_id in ended])

        await self._db.write(job)

    async def _record_cut_calls(self) -> None:
        """What was under way when the gateway was last ended is a failed call, if its attempt goes on."""
        cut = await self._db.read(lambda db: db.execute("SELECT * FROM under_way").fetchall())
        for call in map(UnderWay._make, cut):
            with suppress(NotFound, Conflict):
                await self.add_call(cut_call(call))
        await self._write("DELETE FROM under_way")

    async def set_delivered(self, call_id: str, delivered: bool) -> None:
        await self._write("UPDATE calls SET delivered = ? WHERE call_id = ?", (delivered, call_id))

    async def calls(self, rollout_id: str, attempt_id: str | None = None) -> list[Call]:
        def job(db: sqlite3.Connection) -> list[Call]:
            attempt = attempt_id or _last_attempt(db, rollout_id)
            calls = read_calls(db, _key(db, rollout_id), attempt)
            ids = {entry: call.call_id for entry, call in calls.items()}
            in_order = sorted(calls.values(), key=lambda call: call.facts["started_at"])
            return [
                call_of(call, rollout_id, attempt, index, ids[call.parent] if call.parent else None)
                for index, call in enumerate(in_order)
            ]

        return await self._db.read(job)

    async def call_records(self, rollout_id: str, attempt_id: str) -> list[CallRecord]:
        def job(db: sqlite3.Connection) -> list[CallRecord]:
            calls = read_calls(db, _key(db, rollout_id), attempt_id)
            ids = {entry: call.call_id for entry, call in calls.items()}
            chain = Chain()
            return [
                record_of(call, rollout_id, attempt_id, ids[call.parent] if call.parent else None, chain)
                for call in calls.values()
            ]

        return await self._db.read(job)

    # -------------------------------------------------------------------------------- the rest

    async def endpoints(self) -> list[Endpoint]:
        rows = await self._db.read(lambda db: db.execute("SELECT value FROM endpoints ORDER BY id").fetchall())
        return [Endpoint.model_validate_json(value) for (value,) in rows]

    async def put_endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        def job(db: sqlite3.Connection) -> None:
            for e in endpoints:
                db.execute(
                    "INSERT INTO endpoints (model, endpoint, value) VALUES (?,?,?) "
                    "ON CONFLICT (model, endpoint) DO UPDATE SET value = excluded.value",
                    (e.model, e.endpoint, orjson.dumps(e.model_dump())),
                )

        await self._db.write(job)

    async def delete_endpoints(self) -> None:
        await self._write("DELETE FROM endpoints")

    async def get_setting(self, name: str) -> Any:
        row = await self._one("SELECT value FROM settings WHERE name = ?", name)
        return orjson.loads(row[0]) if row else None

    async def put_setting(self, name: str, value: Any) -> None:
        await self._write("INSERT OR REPLACE INTO settings VALUES (?,?)", (name, orjson.dumps(value)))

    async def add_run_records(self, run_id: str, records: Sequence[RunRecord]) -> None:
        def job(db: sqlite3.Connection) -> None:
            db.executemany(
                "INSERT INTO run_records (run_id, kind, at, data) VALUES (?,?,?,?)",
                [(run_id, record.kind, record.at, orjson.dumps(record.data)) for record in records],
            )
            self._db.note(_Changed(None, None))

        await self._db.write(job)

    async def runs(self) -> list[Run]:
        def job(db: sqlite3.Connection) -> list[Run]:
            ids = db.execute("SELECT run_id FROM run_records GROUP BY run_id ORDER BY min(id) DESC").fetchall()
            return [_run(db, run_id) for (run_id,) in ids]

        return await self._db.read(job)

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

    async def find(self, search: browse.Search) -> Json:
        return await self._db.read(lambda db: browse.find(db, search))

    async def find_groups(self, search: browse.Search) -> Json:
        return await self._db.read(lambda db: browse.find_groups(db, search))

    async def facets(self, run: str | None) -> Json:
        return await self._db.read(lambda db: browse.facets(db, run))

    async def counts(self) -> Json:
        return await self._db.read(browse.counts)

    async def mark_consumed(self, rollout_ids: Sequence[str]) -> None:
        def job(db: sqlite3.Connection) -> None:
            db.executemany(
                "UPDATE rollouts SET consumed = 1 WHERE rollout_id = ? AND ended IS NOT NULL",
                [(rollout_id,) for rollout_id in rollout_ids],
            )

        await self._db.write(job)

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

    # -------------------------------------------------------------------------------- inside

    async def _write(self, sql: str, arguments: tuple[Any, ...] = ()) -> None:
        await self._db.write(lambda db: db.execute(sql, arguments) and None)

    async def _one(self, sql: str, *arguments: Any) -> Any:
        return await self._db.read(lambda db: db.execute(sql, arguments).fetchone())

    def _note_change(self, db: sqlite3.Connection, rollout_id: str, state: str) -> None:
        added = db.execute(
            "INSERT INTO changes (rollout_id, state, at) VALUES (?,?,?)", (rollout_id, state, time.time())
        )
        self._db.note(_Changed(rollout_id, added.lastrowid))

    def _committed(self, notes: list[_Changed]) -> None:
        if not notes:
            return
        self._generation += 1
        for rollout_id, cursor in notes:
            if rollout_id is not None:
                self._access.pop(rollout_id, None)
            self._cursor = max(self._cursor, cursor or 0)
        self._changed.set()
        self._changed = asyncio.Event()


def _key(db: sqlite3.Connection, rollout_id: str) -> int:
    row = db.execute("SELECT id FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
    if row is None:
        raise NotFound("Rollout not found")
    return row[0]


def _last_attempt(db: sqlite3.Connection, rollout_id: str) -> str:
    row = db.execute("SELECT last_attempt_id FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
    if row is None:
        raise NotFound("Rollout not found")
    return row[0] or "0"


def _access(db: sqlite3.Connection, rollout_id: str) -> Access:
    row = db.execute(
        "SELECT state, tries, json_extract(config, '$.reward_from'), "
        "'array' IN (json_type(config, '$.local.evaluate'), json_type(config, '$.k8s.evaluate')) "
        "FROM rollouts WHERE rollout_id = ?",
        (rollout_id,),
    ).fetchone()
    if row is None:
        raise NotFound("Rollout not found")
    state, tries, reward_from, evaluated = row
    return Access(state, tries, reward_from or ("evaluator" if evaluated else "agent"))


def _evidence(db: sqlite3.Connection, rollout_id: str, attempt_id: str) -> Evidence:
    config_json, tries = db.execute(
        "SELECT config, tries FROM rollouts WHERE rollout_id = ?", (rollout_id,)
    ).fetchone()
    config = RolloutConfig.model_validate_json(config_json)
    attempt = (_key(db, rollout_id), attempt_id)
    rewarded = db.execute(
        "SELECT 1 FROM entries WHERE rollout = ? AND attempt_id = ? AND event_type = 'reward'", attempt
    ).fetchone()
    call = db.execute(
        "SELECT coalesce(http_status, 200) FROM entries LEFT JOIN calls ON entry = id "
        "WHERE rollout = ? AND attempt_id = ? AND event_type = 'model_request' ORDER BY id DESC LIMIT 1",
        attempt,
    ).fetchone()
    last_call: Literal["none", "answered", "failed"] = "none"
    if call is not None:
        last_call = "answered" if call[0] < 500 else "failed"
    return Evidence(
        last_call=last_call,
        rewarded=rewarded is not None,
        reward_from=_access(db, rollout_id).reward_from,
        evaluated=config.evaluated,
        tries_left=(config.max_attempts or 1) - tries,
    )


def _rollout(db: sqlite3.Connection, rollout_id: str) -> Rollout:
    row = db.execute(f"SELECT {_ROLLOUT} FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
    if row is None:
        raise NotFound("Rollout not found")
    return _from_row(row)


def _from_row(row: tuple[Any, ...]) -> Rollout:
    return Rollout.model_validate_json(orjson.dumps(_wire(row)))


def _wire(row: tuple[Any, ...]) -> Json:
    """A row of `_ROLLOUT` as the JSON of a `Rollout`; what is stored as JSON is not parsed."""
    status = dict(zip(_STATUS_NAMES, row[5:], strict=True))
    return {
        "rollout_id": row[0],
        "input": orjson.Fragment(row[1]),
        "is_train": bool(row[2]),
        "config": orjson.Fragment(row[3]),
        "metadata": orjson.Fragment(row[4]),
        "status": {k: v for k, v in status.items() if v is not None or k not in RolloutStatus.extensions},
    }


def _data_id(task: Any) -> str:
    return str(task.get("data_id") or task.get("instance_id") or "") if isinstance(task, dict) else ""


def _touch(db: sqlite3.Connection, rollout_id: str) -> None:
    db.execute(
        "UPDATE rollouts SET version = version + 1, updated_at = ? WHERE rollout_id = ?", (time.time(), rollout_id)
    )


def _add_entry(
    db: sqlite3.Connection, rollout: int, attempt_id: str, event_type: str, at: float, data: bytes | None
) -> int:
    entry = db.execute(
        "INSERT INTO entries (rollout, attempt_id, event_type, timestamp, data) VALUES (?,?,?,?,?)",
        (rollout, attempt_id, event_type, at, data),
    ).lastrowid
    assert entry is not None
    return entry


def _summarize(db: sqlite3.Connection, rollout_id: str) -> None:
    db.execute(SUMMARIZE.format(which="rollout_id = ?"), (rollout_id,))


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


def _counter(db: sqlite3.Connection, name: str) -> int:
    row = db.execute("SELECT value FROM settings WHERE name = ?", (f"count.{name}",)).fetchone()
    return int(row[0]) if row else 0


def _count(db: sqlite3.Connection, name: str) -> int:
    """The next of the numbers 1, 2, … of a counter."""
    number = _counter(db, name) + 1
    db.execute("INSERT OR REPLACE INTO settings VALUES (?,?)", (f"count.{name}", str(number).encode()))
    return number


def _used_bytes(db: sqlite3.Connection) -> int:
    pages, free, size = (
        db.execute(f"PRAGMA {what}").fetchone()[0] for what in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size
