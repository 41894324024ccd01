"""Reading many rollouts at once: filters, groups, counts. Everything is answered from two narrow tables."""

import sqlite3
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, Field

from harnessrl.schemas import Json, State

__all__ = ["Filter", "Search", "counts", "facets", "find", "find_groups"]

_FROM = "FROM rollouts r LEFT JOIN summaries s ON s.rollout = r.id"
_SORTS = {
    "created": "r.created_at",
    "updated": "r.updated_at",
    "seconds": "r.updated_at - r.created_at",
    "reward": "s.reward",
    "calls": "s.calls",
    "sampled": "s.sampled",
    "version": "s.version_max",
}
_GROUP_SORTS = {
    "created": "min(r.created_at)",
    "reward": "avg(s.reward)",
    "spread": "max(s.reward) - min(s.reward)",
}
_COLUMNS = (
    "rollout_id, group_id, is_train, state, failure_kind, error_message, created_at, updated_at, held_seconds, "
    "last_attempt_id, input, reward, calls, sampled, agents, dialects, version_min, version_max"
)
_LIVE_CALLS = (
    "(SELECT count(*) FROM entries e WHERE e.rollout = r.id AND e.attempt_id = coalesce(r.last_attempt_id, '0') "
    "AND e.event_type = 'model_request')"
)
_MOST_FACETS = 50


class Filter(BaseModel):
    """What is None doesn't matter."""

    run: str | None = None
    """A run's id: rollouts of its groups."""
    group: str | None = None
    state: State | Literal["unfinished"] | None = None
    is_train: bool | None = None
    task: str | None = None
    """Text that the task, as JSON, or the rollout's id contains, in any case."""
    reward_min: float | None = None
    reward_max: float | None = None
    agent: str | None = None
    dialect: str | None = None
    version: int | None = None
    """A policy version that sampled some of its tokens."""
    failure: Literal["agent", "infra"] | None = None
    reason: str | None = None
    """The error message, whole."""


class Search(Filter):
    sort: Literal["created", "updated", "seconds", "reward", "spread", "calls", "sampled", "version"] = "created"
    descending: bool = True
    limit: Annotated[int, Field(ge=1, le=500)] = 50
    offset: Annotated[int, Field(ge=0, le=2**62)] = 0


def find(db: sqlite3.Connection, search: Search) -> Json:
    """`total`, and the `items` of one page."""
    where, values = _where(search)
    order = _SORTS.get(search.sort, _SORTS["created"])
    direction = "DESC" if search.descending else "ASC"
    (total,) = db.execute(f"SELECT count(*) {_FROM} WHERE {where}", values).fetchone()
    ids = [
        rollout
        for (rollout,) in db.execute(
            f"SELECT r.id {_FROM} WHERE {where} ORDER BY {order} {direction} NULLS LAST, r.id {direction} "
            "LIMIT ? OFFSET ?",
            (*values, search.limit, search.offset),
        )
    ]
    return {"total": total, "items": list(_items(db, ids))}


def find_groups(db: sqlite3.Connection, search: Search) -> Json:
    """As `find`, by group; each with all of its rollouts, also those that the filter leaves out."""
    where, values = _where(search)
    where += " AND r.group_id IS NOT NULL"
    order = _GROUP_SORTS.get(search.sort, _GROUP_SORTS["created"])
    direction = "DESC" if search.descending else "ASC"
    (total,) = db.execute(f"SELECT count(DISTINCT r.group_id) {_FROM} WHERE {where}", values).fetchone()
    groups = [
        group
        for (group,) in db.execute(
            f"SELECT r.group_id {_FROM} WHERE {where} GROUP BY r.group_id "
            f"ORDER BY {order} {direction} NULLS LAST, r.group_id {direction} LIMIT ? OFFSET ?",
            (*values, search.limit, search.offset),
        )
    ]
    items = []
    for group in groups:
        ids = [i for (i,) in db.execute("SELECT id FROM rollouts WHERE group_id = ? ORDER BY id", (group,))]
        items.append({"group_id": group, "rollouts": list(_items(db, ids))})
    return {"total": total, "items": items}


def facets(db: sqlite3.Connection, run: str | None) -> Json:
    """What there is to filter by, most frequent first."""
    where, values = _where(Filter(run=run))

    def counted(what: str, also: str = "1") -> list[Any]:
        rows = db.execute(
            f"SELECT {what}, count(*) AS n {_FROM} WHERE {where} AND {also} "
            f"GROUP BY {what} ORDER BY n DESC LIMIT ?",
            (*values, _MOST_FACETS),
        )
        return [list(row) for row in rows]

    def names(column: str) -> list[str]:
        return sorted(
            {name for listed, _ in counted(column, f"{column} IS NOT NULL") for name in orjson.loads(listed)}
        )

    low, high = db.execute(f"SELECT min(version_min), max(version_max) {_FROM} WHERE {where}", values).fetchone()
    return {
        "states": dict(counted("r.state")),
        "reasons": counted("r.failure_kind, r.error_message", "r.failure_kind IS NOT NULL"),
        "agents": names("s.agents"),
        "dialects": names("s.dialects"),
        "versions": [low, high],
    }


def counts(db: sqlite3.Connection) -> Json:
    """Rollouts by state, and who runs them."""
    states = dict(db.execute("SELECT state, count(*) FROM rollouts GROUP BY state").fetchall())
    oldest = db.execute("SELECT min(created_at) FROM rollouts WHERE state = 'queuing'").fetchone()[0]
    controllers = db.execute(
        "SELECT controller, count(*), min(lease_until) FROM rollouts WHERE lease_until IS NOT NULL "
        "GROUP BY controller ORDER BY controller"
    ).fetchall()
    return {
        "states": states,
        "oldest_queuing_at": oldest,
        "controllers": [
            {"name": name, "running": running, "lease_until": until} for name, running, until in controllers
        ],
    }


def _where(wanted: Filter) -> tuple[str, list[Any]]:
    conditions: list[tuple[str, Any]] = []

    def also(value: Any, condition: str, *values: Any) -> None:
        if value is not None:
            conditions.append((condition, values or (value,)))

    # '.' follows '-' in order, so this range is the ids that begin with `run-`.
    also(wanted.run, "r.group_id >= ? AND r.group_id < ?", f"{wanted.run}-", f"{wanted.run}.")
    also(wanted.group, "r.group_id = ?")
    if wanted.state == "unfinished":
        also("running", "r.state IN ('queuing', ?)")
    else:
        also(wanted.state, "r.state = ?")
    also(wanted.is_train, "r.is_train = ?")
    also(wanted.reward_min, "s.reward >= ?")
    also(wanted.reward_max, "s.reward <= ?")
    also(wanted.agent, "EXISTS (SELECT 1 FROM json_each(s.agents) WHERE value = ?)")
    also(wanted.dialect, "EXISTS (SELECT 1 FROM json_each(s.dialects) WHERE value = ?)")
    also(wanted.version, "? BETWEEN s.version_min AND s.version_max")
    also(wanted.failure, "r.failure_kind = ?")
    also(wanted.reason, "r.error_message = ?")
    if wanted.task:
        text = wanted.task.lower()
        also(text, "(instr(lower(CAST(r.input AS TEXT)), ?) OR instr(lower(r.rollout_id), ?))", text, text)
    where = " AND ".join(condition for condition, _ in conditions) or "1"
    return where, [value for _, values in conditions for value in values]


def _items(db: sqlite3.Connection, ids: list[int]) -> Iterator[Json]:
    names = _COLUMNS.split(", ")
    for rollout in ids:
        row = db.execute(f"SELECT {_COLUMNS}, {_LIVE_CALLS} {_FROM} WHERE r.id = ?", (rollout,)).fetchone()
        item: Json = dict(zip(names, row, strict=False))
        item["input"] = orjson.Fragment(item["input"])
        item["is_train"] = bool(item["is_train"])
        item["calls"] = row[-1] if item["calls"] is None else item["calls"]
        for name in ("agents", "dialects"):
            item[name] = orjson.loads(item[name] or "[]")
        yield item
