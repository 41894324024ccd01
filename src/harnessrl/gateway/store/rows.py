"""A rollout's row, and what is read from it."""

import sqlite3
from typing import Any

import orjson

from harnessrl.gateway.store import Access, NotFound
from harnessrl.gateway.store.schema import SUMMARIZE
from harnessrl.schemas import Json, Rollout, RolloutStatus

__all__ = [
    "ROLLOUT",
    "access_of",
    "data_id",
    "key_of",
    "last_attempt",
    "read_row",
    "rollout_of",
    "summarize",
    "wire",
]

_STATUS = (
    "state, k8s_job_name, last_attempt_id, error_message, version, created_at, updated_at, failure_kind, "
    "held_seconds"
)
_STATUS_NAMES = _STATUS.split(", ")
ROLLOUT = f"rollout_id, input, is_train, config, metadata, {_STATUS}"
_ACCESS = (
    "state, tries, json_extract(config, '$.reward_from'), "
    "'array' IN (json_type(config, '$.local.evaluate'), json_type(config, '$.k8s.evaluate'))"
)


def read_row(db: sqlite3.Connection, rollout_id: str, columns: str) -> tuple[Any, ...]:
    """Raises `NotFound`."""
    row = db.execute(f"SELECT {columns} FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
    if row is None:
        raise NotFound("Rollout not found")
    return row


def rollout_of(db: sqlite3.Connection, rollout_id: str) -> Rollout:
    return Rollout.model_validate_json(orjson.dumps(wire(read_row(db, rollout_id, ROLLOUT))))


def wire(row: tuple[Any, ...]) -> Json:
    """A row of `ROLLOUT` as the JSON of a `Rollout`; what is stored as JSON is not parsed."""
    status = dict(zip(_STATUS_NAMES, row[5:], strict=True))
    return {
        "rollout_id": row[0],
        "input": orjson.Fragment(row[1]),
        "is_train": bool(row[2]),
        "config": orjson.Fragment(row[3]),
        "metadata": orjson.Fragment(row[4]),
        "status": {k: v for k, v in status.items() if v is not None or k not in RolloutStatus.extensions},
    }


def access_of(db: sqlite3.Connection, rollout_id: str) -> Access:
    state, tries, reward_from, evaluated = read_row(db, rollout_id, _ACCESS)
    return Access(state, tries, reward_from or ("evaluator" if evaluated else "agent"))


def key_of(db: sqlite3.Connection, rollout_id: str) -> int:
    return read_row(db, rollout_id, "id")[0]


def last_attempt(db: sqlite3.Connection, rollout_id: str) -> str:
    return read_row(db, rollout_id, "last_attempt_id")[0] or "0"


def data_id(task: Any) -> str:
    return str(task.get("data_id") or task.get("instance_id") or "") if isinstance(task, dict) else ""


def summarize(db: sqlite3.Connection, rollout_id: str) -> None:
    db.execute(SUMMARIZE.format(which="rollout_id = ?"), (rollout_id,))
