"""Rollouts and their attempts: who may run them, and how they end."""

import sqlite3
import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal

import orjson

from harnessrl.gateway.store import Conflict, NotFound
from harnessrl.gateway.store.base import Base, reads, writes
from harnessrl.gateway.store.judge import Evidence, judge
from harnessrl.gateway.store.rows import ROLLOUT, access_of, data_id, key_of, read_row, rollout_of, summarize, wire
from harnessrl.schemas import (
    TERMINAL,
    AttemptEnd,
    LeaseState,
    NewRollout,
    Rollout,
    RolloutConfig,
    State,
    StatusPatch,
    TerminalItem,
    TerminalPage,
)

__all__ = ["Rollouts"]

_ALLOWED: dict[str, frozenset[State]] = {
    "queuing": frozenset({"running", "failed"}),
    "running": frozenset({"succeeded", "failed"}),
}


class Rollouts(Base):
    @writes
    def create_rollouts(self, db: sqlite3.Connection, new: Sequence[NewRollout]) -> list[Rollout]:
        return [self._create(db, item) for item in new]

    def _create(self, db: sqlite3.Connection, new: NewRollout) -> Rollout:
        rollout_id, now = new.rollout_id or uuid.uuid4().hex, time.time()
        added = db.execute(
            "INSERT OR IGNORE INTO rollouts "
            "(rollout_id, input, is_train, config, metadata, state, rank, created_at, updated_at) "
            "VALUES (?,?,?,?,?,'queuing',?,?,?)",
            (
                rollout_id,
                orjson.dumps(new.input),
                new.is_train,
                orjson.dumps(new.config.model_dump()),
                orjson.dumps(new.metadata.model_dump()),
                -(new.config.priority or 0),
                now,
                now,
            ),
        ).rowcount
        if added:
            self._note_change(db, rollout_id, "queuing")
        return rollout_of(db, rollout_id)

    @reads
    def get_rollout(self, db: sqlite3.Connection, rollout_id: str) -> Rollout:
        return rollout_of(db, rollout_id)

    @reads
    def list_rollouts(self, db: sqlite3.Connection, states: Sequence[State], limit: int) -> bytes:
        found: list[tuple[Any, ...]] = []
        for state in set(states):
            found += db.execute(
                f"SELECT rank, id, {ROLLOUT} FROM rollouts WHERE state = ? ORDER BY rank, id LIMIT ?",
                (state, limit),
            )
        found.sort(key=lambda row: row[:2])
        return orjson.dumps([wire(row[2:]) for row in found[:limit]])

    @reads
    def terminal(self, db: sqlite3.Connection, after: int, limit: int) -> TerminalPage:
        total = _counter(db, "ended")
        rows = db.execute(
            "SELECT ended, rollout_id, state, input, is_train FROM rollouts WHERE ended > ? ORDER BY ended LIMIT ?",
            (after, limit),
        ).fetchall()
        items = [
            TerminalItem(rollout_id=r[1], state=r[2], data_id=data_id(orjson.loads(r[3])), is_train=bool(r[4]))
            for r in rows
        ]
        next_after = rows[-1][0] if len(rows) == limit else max(after, total)
        return TerminalPage(items=items, next_after=next_after, total_terminal=total)

    @writes
    def patch_status(self, db: sqlite3.Connection, rollout_id: str, patch: StatusPatch) -> Rollout:
        changed = patch.model_dump(exclude_unset=True)
        state = access_of(db, rollout_id).state
        target = changed.pop("state", None)
        if target is not None and target not in _ALLOWED.get(state, ()):
            raise Conflict(f"A rollout that is {state} can't become {target}")
        if target is not None:
            self._enter(db, rollout_id, target)
        for column, value in changed.items():
            db.execute(f"UPDATE rollouts SET {column} = ? WHERE rollout_id = ?", (value, rollout_id))
        if target is not None or changed:
            _touch(db, rollout_id)
        return rollout_of(db, rollout_id)

    @writes
    def claim(
        self, db: sqlite3.Connection, rollout_id: str, controller: str, lease_seconds: float
    ) -> tuple[Rollout, str]:
        access = access_of(db, rollout_id)
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
        return rollout_of(db, rollout_id), attempt_id

    @writes
    def renew(
        self, db: sqlite3.Connection, controller: str, rollout_ids: Sequence[str], lease_seconds: float
    ) -> LeaseState:
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

    @writes
    def end_attempt(self, db: sqlite3.Connection, rollout_id: str, attempt_id: str, end: AttemptEnd) -> Rollout:
        access = access_of(db, rollout_id)
        if not attempt_id.isdecimal() or int(attempt_id) >= access.tries:
            raise NotFound(f"The rollout has no attempt {attempt_id}")
        if access.open(attempt_id):
            self._end(db, rollout_id, attempt_id, end)
        return rollout_of(db, rollout_id)

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
            summarize(db, rollout_id)
        self._note_change(db, rollout_id, state)

    async def add_held_seconds(self, rollout_id: str, seconds: float) -> None:
        await self._write(
            "UPDATE rollouts SET held_seconds = coalesce(held_seconds, 0) + ? WHERE rollout_id = ?",
            (seconds, rollout_id),
        )


def _evidence(db: sqlite3.Connection, rollout_id: str, attempt_id: str) -> Evidence:
    config_json, tries = read_row(db, rollout_id, "config, tries")
    config = RolloutConfig.model_validate_json(config_json)
    attempt = (key_of(db, rollout_id), attempt_id)
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
        reward_from=access_of(db, rollout_id).reward_from,
        evaluated=config.evaluated,
        tries_left=(config.max_attempts or 1) - tries,
    )


def _touch(db: sqlite3.Connection, rollout_id: str) -> None:
    db.execute(
        "UPDATE rollouts SET version = version + 1, updated_at = ? WHERE rollout_id = ?", (time.time(), rollout_id)
    )


def _counter(db: sqlite3.Connection, name: str) -> int:
    row = db.execute("SELECT value FROM settings WHERE name = ?", (f"count.{name}",)).fetchone()
    return int(row[0]) if row else 0


def _count(db: sqlite3.Connection, name: str) -> int:
    """The next of the numbers 1, 2, … of a counter."""
    number = _counter(db, name) + 1
    db.execute("INSERT OR REPLACE INTO settings VALUES (?,?)", (f"count.{name}", str(number).encode()))
    return number
