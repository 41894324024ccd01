"""A call in the tables: its difference to the call that it continues (invariant 16).

Token ids and messages are stored from where they part from the parent's, large fields of the request (tools,
system text) once per rollout, arrays as int32 and float32. `Chain` puts calls together again.
"""

import sqlite3
from collections import OrderedDict
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import orjson

from harnessrl.gateway.store import CallRecord, UnderWay
from harnessrl.schemas import Call, Json

__all__ = ["CallWriter", "Chain", "StoredCall", "call_of", "cut_call", "read_calls"]

_LISTS = ("messages", "input")
"""Where a dialect's request keeps its history."""
_LARGE = 512
"""Bytes of JSON from which a field of the request is kept apart."""
_TAILS_BYTES = 16 << 20
_COLUMNS = {
    *("call_id", "rollout_id", "attempt_id", "parent", "request", "response", "prompt_ids", "sampled_ids"),
    *("logprobs", "arrays", "http_status", "delivered"),
}
_FACTS = tuple(f.name for f in fields(CallRecord) if f.name not in _COLUMNS)


class _Tail(NamedTuple):
    """What a following call may share."""

    context: np.ndarray
    digests: list[bytes]

    def bytes(self) -> int:
        return self.context.nbytes + 50 * len(self.digests)


@dataclass(slots=True)
class StoredCall:
    """A row of `calls` with its lists and arrays, still as differences."""

    entry: int
    call_id: str
    parent: int | None
    shared_ids: int
    prompt_ids: np.ndarray
    sampled_ids: np.ndarray
    logprobs: np.ndarray | None
    shared_messages: int
    messages: list[Any]
    request: Json
    response: Json
    facts: Json
    http_status: int
    delivered: bool
    arrays: dict[str, np.ndarray]


class Chain:
    """Whole prompts and messages of calls that are given parents first."""

    def __init__(self) -> None:
        self._contexts: dict[int, np.ndarray] = {}
        self._messages: dict[int, list[Any]] = {}

    def add(self, call: StoredCall) -> tuple[np.ndarray, list[Any]]:
        """(prompt ids, messages) of `call`, whole."""
        prompt, messages = call.prompt_ids, call.messages
        if call.parent is not None:
            prompt = np.concatenate([self._contexts[call.parent][: call.shared_ids], prompt])
            messages = self._messages[call.parent][: call.shared_messages] + messages
        self._contexts[call.entry] = np.concatenate([prompt, call.sampled_ids])
        self._messages[call.entry] = messages
        return prompt, messages

    def tail(self, entry: int) -> _Tail:
        return _Tail(self._contexts[entry], [_digest(orjson.dumps(m)) for m in self._messages[entry]])


class CallWriter:
    """Writes calls; belongs to the writer thread. Keeps the ends of live chains in bounded memory."""

    def __init__(self) -> None:
        self._tails: OrderedDict[int, _Tail] = OrderedDict()
        self._bytes = 0

    def insert(self, db: sqlite3.Connection, rollout: int, entry: int, call: CallRecord) -> None:
        parent, tail = self._parent(db, rollout, call)
        prompt = np.ascontiguousarray(call.prompt_ids, dtype=np.int32)
        sampled = np.ascontiguousarray(call.sampled_ids, dtype=np.int32)
        request, name, messages, large = _split(call.request)
        dumped = [orjson.dumps(m) for m in messages]
        shared_ids = shared_messages = 0
        if tail is not None:
            digests = [_digest(m) for m in dumped]
            shared_ids = _common(tail.context, prompt)
            shared_messages = _common_items(tail.digests, digests)
            self._keep(entry, _Tail(np.concatenate([prompt, sampled]), digests), instead_of=parent)
        logprobs = None if call.logprobs is None else np.ascontiguousarray(call.logprobs, dtype=np.float32)
        db.execute(
            "INSERT INTO calls VALUES (?,?,?,?,?,?,?)",
            (entry, call.call_id, parent, shared_ids, shared_messages, call.http_status, call.delivered),
        )
        db.execute(
            "INSERT INTO payloads VALUES (?,?,?,?,?,?,?,?)",
            (
                entry,
                prompt[shared_ids:].data,
                sampled.data,
                None if logprobs is None else logprobs.data,
                b"[" + b",".join(dumped[shared_messages:]) + b"]",
                orjson.dumps({"small": request, "large": {k: d for k, (d, _) in large.items()}, "list": name}),
                orjson.dumps(call.response, option=orjson.OPT_SERIALIZE_NUMPY),
                orjson.dumps({name: getattr(call, name) for name in _FACTS}),
            ),
        )
        for digest, value in large.values():
            db.execute("INSERT OR IGNORE INTO fields VALUES (?,?,?)", (rollout, digest, value))
        for array_name, array in call.arrays.items():
            whole = np.ascontiguousarray(array)
            shape = orjson.dumps(array.shape)
            db.execute(
                "INSERT INTO arrays VALUES (?,?,?,?,?)", (entry, array_name, whole.dtype.str, shape, whole.data)
            )

    def _parent(self, db: sqlite3.Connection, rollout: int, call: CallRecord) -> tuple[int | None, _Tail | None]:
        if call.parent is None:
            return None, None
        row = db.execute(
            "SELECT entry FROM calls JOIN entries ON entries.id = entry WHERE call_id = ? AND rollout = ? "
            "AND attempt_id = ?",
            (call.parent, rollout, call.attempt_id),
        ).fetchone()
        if row is None:
            return None, None
        return row[0], self._tails.get(row[0]) or _rebuild_tail(db, row[0])

    def _keep(self, entry: int, tail: _Tail, instead_of: int | None) -> None:
        if instead_of is not None and (old := self._tails.pop(instead_of, None)):
            self._bytes -= old.bytes()
        self._tails[entry] = tail
        self._bytes += tail.bytes()
        while self._bytes > _TAILS_BYTES:
            _, old = self._tails.popitem(last=False)
            self._bytes -= old.bytes()

    def forget(self, entries: list[int]) -> None:
        for entry in entries:
            if old := self._tails.pop(entry, None):
                self._bytes -= old.bytes()


def read_calls(db: sqlite3.Connection, rollout: int, attempt_id: str) -> dict[int, StoredCall]:
    """The calls of an attempt by entry, in the order of their arrival, so parents first."""
    rows = db.execute(
        f"{_SELECTED} JOIN entries ON entries.id = entry WHERE rollout = ? AND attempt_id = ? ORDER BY entry",
        (rollout, attempt_id),
    ).fetchall()
    large = dict(db.execute("SELECT digest, value FROM fields WHERE rollout = ?", (rollout,)))
    calls = {row[0]: _stored(row, large) for row in rows}
    arrays = db.execute(
        "SELECT entry, name, dtype, shape, value FROM arrays JOIN entries ON entries.id = entry "
        "WHERE rollout = ? AND attempt_id = ?",
        (rollout, attempt_id),
    )
    for entry, name, dtype, shape, value in arrays:
        calls[entry].arrays[name] = np.frombuffer(value, dtype).reshape(orjson.loads(shape))
    return calls


def whole_request(call: StoredCall, messages: list[Any]) -> Json:
    """The request as it was recorded, from `read_calls` and `Chain.add`."""
    name = call.request["list"]
    whole = {**call.request["small"], **call.request["large"]}
    return whole if name is None else {**whole, name: messages}


def call_of(call: StoredCall, rollout_id: str, attempt_id: str, index: int, parent: str | None) -> Call:
    facts = call.facts
    return Call(
        call_id=call.call_id,
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        index=index,
        parent=parent,
        shared=call.shared_ids,
        new_prompt_ids=call.prompt_ids.tolist(),
        sampled_ids=call.sampled_ids.tolist(),
        logprobs=None if call.logprobs is None else call.logprobs.tolist(),
        delivered=call.delivered,
        arrays={name: array.tolist() for name, array in call.arrays.items()} or None,
        **{name: facts[name] for name in facts.keys() & Call.model_fields.keys()},
    )


def record_of(call: StoredCall, rollout_id: str, attempt_id: str, parent: str | None, chain: Chain) -> CallRecord:
    prompt, messages = chain.add(call)
    facts = {**call.facts, "versions": [(v, n) for v, n in call.facts["versions"]]}
    return CallRecord(
        call_id=call.call_id,
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        request=whole_request(call, messages),
        response=call.response,
        prompt_ids=prompt,
        sampled_ids=call.sampled_ids,
        logprobs=call.logprobs,
        parent=parent,
        http_status=call.http_status,
        delivered=call.delivered,
        arrays=call.arrays,
        **facts,
    )


def cut_call(call: UnderWay) -> CallRecord:
    """A call that the end of the gateway cut: nobody has its whole answer, so nothing to train on is missing."""
    record = CallRecord(**call._asdict(), model="", endpoint="", model_version=0, agent=None, request={})
    record.fail(503, "cut", {"message": "the gateway ended while this call was under way"})
    return record


_SELECTED = (
    "SELECT entry, call_id, parent, shared_ids, prompt_ids, sampled_ids, logprobs, shared_messages, messages, "
    "request, response, facts, http_status, delivered FROM calls JOIN payloads USING (entry)"
)


def _stored(row: tuple[Any, ...], large: dict[str, bytes]) -> StoredCall:
    request = orjson.loads(row[9])
    request["large"] = {k: orjson.loads(large[d]) for k, d in request["large"].items() if d in large}
    return StoredCall(
        entry=row[0],
        call_id=row[1],
        parent=row[2],
        shared_ids=row[3],
        prompt_ids=np.frombuffer(row[4], np.int32),
        sampled_ids=np.frombuffer(row[5], np.int32),
        logprobs=None if row[6] is None else np.frombuffer(row[6], np.float32),
        shared_messages=row[7],
        messages=orjson.loads(row[8]),
        request=request,
        response=orjson.loads(row[10]),
        facts=orjson.loads(row[11]),
        http_status=row[12],
        delivered=bool(row[13]),
        arrays={},
    )


def _rebuild_tail(db: sqlite3.Connection, entry: int) -> _Tail:
    calls: list[StoredCall] = []
    ancestor: int | None = entry
    while ancestor is not None:
        row = db.execute(f"{_SELECTED} WHERE entry = ?", (ancestor,)).fetchone()
        calls.append(_stored(row, {}))
        ancestor = calls[-1].parent
    chain = Chain()
    for call in reversed(calls):
        chain.add(call)
    return chain.tail(entry)


def _split(request: Json) -> tuple[Json, str | None, list[Any], dict[str, tuple[str, bytes]]]:
    """(small fields, name of the history, history, large fields as (digest, JSON))."""
    name = next((n for n in _LISTS if isinstance(request.get(n), list)), None)
    small: Json = {}
    large: dict[str, tuple[str, bytes]] = {}
    for key, value in request.items():
        if key == name:
            continue
        if isinstance(value, str | list | dict) and len(value) > 0:
            dumped = orjson.dumps(value)
            if len(dumped) >= _LARGE:
                large[key] = (_digest(dumped).hex(), dumped)
                continue
        small[key] = value
    return small, name, request[name] if name else [], large


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


def _common(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


def _common_items(a: list[bytes], b: list[bytes]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
