import asyncio
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from harnessrl.client import full_prompts
from harnessrl.gateway.store import CallRecord, Conflict, NotFound, StoreError
from harnessrl.gateway.store.sqlite import SqliteStore
from harnessrl.schemas import AttemptEnd, Endpoint, NewRollout, RolloutConfig, State, StatusPatch

EVENT_KEYS = {
    *("model", "model_version", "request", "response", "server", "latency_ms"),
    *("http_status", "status", "retry_count", "usage", "finish_reason"),
}


def record(call_id: str, rollout_id: str, prompt: list[int], sampled: list[int], **more: Any) -> CallRecord:
    fields: dict[str, Any] = {
        "call_id": call_id,
        "rollout_id": rollout_id,
        "attempt_id": "0",
        "mode": "train",
        "dialect": "chat",
        "model": "policy",
        "endpoint": "http://engine",
        "model_version": 3,
        "agent": None,
        "request": {"messages": [], "temperature": 1.0},
        "response": {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}}]},
        "prompt_ids": np.asarray(prompt, np.int32),
        "sampled_ids": np.asarray(sampled, np.int32),
        "logprobs": np.asarray([-0.5] * len(sampled), np.float32),
        "versions": [(3, len(sampled))],
        "temperature": 1.0,
        "continuity": "first",
        "parent": None,
        "started_at": 1.0,
        "latency_ms": 2.0,
        "http_status": 200,
        "status": "ok",
        "delivered": True,
        "trainable": True,
        "finish_reason": "stop",
    }
    return CallRecord(**{**fields, **more})


async def rollout(store: SqliteStore, **config: Any) -> str:
    (created,) = await store.create_rollouts([NewRollout(input={"x": 1}, config=RolloutConfig(**config))])
    return created.rollout_id


async def listed(store: SqliteStore, states: list[State], limit: int) -> list[str]:
    return [r["rollout_id"] for r in orjson.loads(await store.list_rollouts(states, limit))]


def plain(value: Any) -> Any:
    """As a client reads it."""
    dumped = orjson.dumps(value, default=lambda m: m.model_dump(), option=orjson.OPT_SERIALIZE_NUMPY)
    return orjson.loads(dumped)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def conversation(rollout_id: str, turns: int, tools: list[Any] | None = None) -> list[CallRecord]:
    """Calls of a conversation in which each continues the one before exactly."""
    calls: list[CallRecord] = []
    messages, context = [message("system", "s" * 600), message("user", "go")], list(range(100))
    for turn in range(turns):
        sampled = [1000 + turn] * 20
        request = {"messages": list(messages), "tools": tools or [], "temperature": 1.0}
        parent = calls[-1].call_id if calls else None
        call = record(f"{rollout_id}-{turn}", rollout_id, context, sampled, request=request, parent=parent)
        calls.append(replace(call, started_at=float(turn)))
        messages += [message("assistant", "a" * 60), message("tool", f"result {turn}")]
        context = [*context, *sampled, 7, turn]
    return calls


async def test_calls_come_back_whole_and_as_differences(store: SqliteStore):
    rollout_id = await rollout(store)
    sent = conversation(rollout_id, 5, tools=[{"name": "t", "description": "d" * 1000}])
    for call in sent:
        await store.add_call(call)
    events = plain(await store.events(rollout_id))
    assert [e["data"]["request"] for e in events] == [call.request for call in sent]
    assert [e["data"]["response"]["prompt_token_ids"] for e in events] == [c.prompt_ids.tolist() for c in sent]
    assert {frozenset(e["data"]) for e in events} == {frozenset(EVENT_KEYS)}
    choice = events[2]["data"]["response"]["choices"][0]
    assert choice["token_ids"] == sent[2].sampled_ids.tolist()
    assert choice["message"]["content"] == "hi"
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-0.5] * 20
    calls = await store.calls(rollout_id)
    assert [len(call.new_prompt_ids) for call in calls] == [100, 2, 2, 2, 2]
    assert [call.parent for call in calls] == [None, *(c.call_id for c in sent[:-1])]
    prompts = full_prompts(calls)
    assert all(prompts[c.call_id].tolist() == c.prompt_ids.tolist() for c in sent)


async def test_records_for_the_proxys_memory_are_what_was_given(store: SqliteStore):
    rollout_id = await rollout(store)
    sent = conversation(rollout_id, 3)
    sent[1].arrays["experts"] = np.arange(40, dtype=np.int16).reshape(20, 2)
    sent[2] = replace(sent[2], logprobs=None, error={"message": "m"}, usage={"total_tokens": 3}, delivered=False)
    for call in sent:
        await store.add_call(call)
    got = await store.call_records(rollout_id, "0")
    for a, b in zip(sent, got, strict=True):
        assert plain(_fields(a)) == plain(_fields(b))
    assert got[1].arrays["experts"].dtype == np.int16
    calls = plain(await store.calls(rollout_id))
    assert calls[1]["arrays"] == {"experts": np.arange(40).reshape(20, 2).tolist()}
    assert "arrays" not in calls[0]


def _fields(call: CallRecord) -> dict[str, Any]:
    return {name: getattr(call, name) for name in CallRecord.__slots__}


async def test_a_chain_goes_on_after_a_restart_and_branches(tmp_path: Path):
    store = await SqliteStore.open(tmp_path / "s.db")
    rollout_id = await rollout(store)
    sent = conversation(rollout_id, 4)
    for call in sent[:3]:
        await store.add_call(call)
    await store.close()
    store = await SqliteStore.open(tmp_path / "s.db")
    branch = replace(sent[3], call_id="branch", parent=sent[0].call_id, started_at=9.0)
    await store.add_call(sent[3])
    await store.add_call(branch)
    calls = await store.calls(rollout_id)
    prompts = full_prompts(calls)
    assert prompts["branch"].tolist() == prompts[sent[3].call_id].tolist() == sent[3].prompt_ids.tolist()
    assert [len(call.new_prompt_ids) for call in calls] == [100, 2, 2, 2, 46]
    await store.close()


async def test_what_a_kill_may_have_cut_is_not_delivered(store: SqliteStore, tmp_path: Path):
    running, ended = await rollout(store), await rollout(store)
    for call in (*conversation(running, 2), *conversation(ended, 1)):
        await store.add_call(call)
    await store.patch_status(ended, StatusPatch(state="failed"))
    for name in ("store.db", "store.db-wal"):  # as a kill would leave them
        shutil.copy(tmp_path / name, tmp_path / f"killed-{name}")
    killed = await SqliteStore.open(tmp_path / "killed-store.db")
    assert [call.delivered for call in await killed.calls(running)] == [True, False]
    assert [call.delivered for call in await killed.calls(ended)] == [True]
    await killed.set_delivered(f"{running}-1", True)
    await killed.close()
    again = await SqliteStore.open(tmp_path / "killed-store.db")
    assert all(call.delivered for call in await again.calls(running)), "it was closed properly"
    await again.close()


async def test_a_long_rollout_costs_its_final_length(store: SqliteStore):
    rollout_id = await rollout(store)
    before = await store.size_bytes()
    tools = [{"name": "t", "description": "d" * 50_000}]
    for call in conversation(rollout_id, 200, tools=tools):
        await store.add_call(call)
    final = 4 * (100 + 200 * 22) + 4 * 200 * 20 + 50_000
    assert await store.size_bytes() - before < final + 200 * 2500


async def test_error_calls_keep_the_upstreams_error(store: SqliteStore):
    rollout_id = await rollout(store)
    error = {"message": "no", "type": "server_error"}
    await store.add_call(
        record("c", rollout_id, [], [], logprobs=None, response={"error": error}, http_status=400, status="error")
    )
    (event,) = plain(await store.events(rollout_id))
    assert (event["data"]["response"], event["data"]["http_status"]) == ({"error": error}, 400)


async def test_a_call_id_is_stored_once(store: SqliteStore):
    rollout_id = await rollout(store)
    call = record("c", rollout_id, [1], [2])
    await asyncio.gather(store.add_call(call), store.add_call(call))
    assert len(await store.calls(rollout_id)) == 1


async def test_only_one_controller_gets_a_rollout(store: SqliteStore):
    rollout_id = await rollout(store)
    claims = await asyncio.gather(
        *(store.claim(rollout_id, f"c{i}", 30) for i in range(20)), return_exceptions=True
    )
    won = [c for c in claims if not isinstance(c, BaseException)]
    assert len(won) == 1 and won[0][1] == "0" and won[0][0].status.state == "running"
    assert all(isinstance(c, Conflict) for c in claims if isinstance(c, BaseException))


async def test_infra_failures_are_tried_again_with_a_new_attempt(store: SqliteStore):
    rollout_id = await rollout(store, max_attempts=2)
    await store.claim(rollout_id, "c", 30)
    ended = await store.end_attempt(rollout_id, "0", AttemptEnd(ok=False, error_message="no image"))
    assert (ended.status.state, ended.status.failure_kind) == ("queuing", None)
    with pytest.raises(Conflict):
        await store.add_event(rollout_id, "0", "note", {})
    _, attempt = await store.claim(rollout_id, "c", 30)
    assert attempt == "1"
    again = await store.end_attempt(rollout_id, "0", AttemptEnd(ok=True))
    assert again.status.state == "running", "the end of an attempt that has ended changes nothing"
    ended = await store.end_attempt(rollout_id, "1", AttemptEnd(ok=False, error_message="no image"))
    assert (ended.status.state, ended.status.failure_kind) == ("failed", "infra")
    with pytest.raises(NotFound):
        await store.end_attempt(rollout_id, "2", AttemptEnd(ok=True))


async def test_a_lease_that_runs_out_gives_the_rollout_back(store: SqliteStore):
    lost, kept = await rollout(store, max_attempts=2), await rollout(store)
    await store.claim(lost, "dead", 0.05)
    await store.claim(kept, "alive", 0.05)
    await store.add_held_seconds(kept, 1.5)
    assert (await store.renew("alive", [kept, lost, "unknown"], 30)).held_seconds == {kept: 1.5}
    await asyncio.sleep(0.1)
    assert await store.requeue_expired() == [lost]
    assert (await store.get_rollout(lost)).status.state == "queuing"
    assert (await store.renew("dead", [lost], 30)).kept == []
    assert (await store.get_rollout(kept)).status.held_seconds == 1.5


async def test_access_follows_the_state(store: SqliteStore):
    rollout_id = await rollout(store, local={"command": ["x"], "evaluate": ["y"]})
    assert (await store.access(rollout_id)).reward_from == "evaluator"
    await store.claim(rollout_id, "c", 30)
    access = await store.access(rollout_id)
    assert access.open("0") and access.state == "running"
    await store.end_attempt(rollout_id, "0", AttemptEnd(ok=True))
    assert not (await store.access(rollout_id)).open("0")
    await store.delete_rollout(rollout_id)
    with pytest.raises(NotFound):
        await store.access(rollout_id)


async def test_higher_priority_first_then_age(store: SqliteStore):
    ids = [await rollout(store, priority=p) for p in (0, 5, 0, 5)]
    assert await listed(store, ["queuing"], 3) == [ids[1], ids[3], ids[0]]


async def test_listing_queued_ones_uses_an_index(store: SqliteStore, tmp_path: Path):
    await rollout(store)
    with sqlite3.connect(tmp_path / "store.db") as db:
        plan = db.execute(
            "EXPLAIN QUERY PLAN SELECT * FROM rollouts WHERE state = 'queuing' ORDER BY rank, id LIMIT 500"
        ).fetchall()
    assert [row[3] for row in plan] == ["SEARCH rollouts USING INDEX rollouts_by_state (state=?)"]


async def test_every_change_is_streamed_once_and_from_a_cursor(store: SqliteStore):
    first = await rollout(store)
    stream = store.changes(None)
    rollout_id = await rollout(store)
    await store.claim(rollout_id, "c", 30)
    await store.patch_status(rollout_id, StatusPatch(state="failed"))
    live = [await anext(stream) for _ in range(3)]
    assert [(i, state) for _, i, state in live] == [(rollout_id, s) for s in ("queuing", "running", "failed")]
    replayed = store.changes(0)
    assert [(await anext(replayed))[1] for _ in range(4)] == [first, rollout_id, rollout_id, rollout_id]
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await store.patch_status(first, StatusPatch(state="running"))
    assert (await asyncio.wait_for(waiting, 5))[1:] == (first, "running")


async def test_terminal_pages_survive_deletion(store: SqliteStore):
    ids = [await rollout(store) for _ in range(3)]
    for rollout_id in reversed(ids):
        await store.patch_status(rollout_id, StatusPatch(state="failed"))
    await store.delete_rollout(ids[1])
    page = await store.terminal(0, 100)
    assert [item.rollout_id for item in page.items] == [ids[2], ids[0]]
    assert (page.next_after, page.total_terminal) == (3, 3)
    assert (await store.terminal(3, 100)).next_after == 3


async def test_one_bad_write_does_not_spoil_the_others_of_its_group(store: SqliteStore):
    rollout_id = await rollout(store)
    results = await asyncio.gather(
        store.add_event(rollout_id, "0", "note", {"n": 1}),
        store.add_event("unknown", "0", "note", {}),
        store.add_call(replace(record("bad", rollout_id, [1], [2]), response={"x": object()})),
        store.add_event(rollout_id, "0", "note", {"n": 2}),
        return_exceptions=True,
    )
    assert [type(r).__name__ for r in results] == ["Event", "NotFound", "TypeError", "Event"]
    assert [e.data for e in await store.events(rollout_id)] == [{"n": 1}, {"n": 2}]


async def test_retention_removes_the_oldest_consumed_ones(store: SqliteStore):
    ids = [await rollout(store) for _ in range(4)]
    for rollout_id in ids[:3]:
        await store.add_event(rollout_id, "0", "note", {"x": "y" * 100_000})
        await store.patch_status(rollout_id, StatusPatch(state="failed"))
    await store.mark_consumed([ids[0], ids[1], ids[3], "unknown"])
    assert await store.retain(3600, None) == 0
    size = await store.size_bytes()
    assert await store.retain(None, size - 50_000) == 1
    assert await store.retain(0, None) == 1
    assert await listed(store, ["queuing", "failed"], 10) == ids[2:], "what was not consumed or has not ended stays"
    assert await store.size_bytes() < size - 150_000


async def test_retention_makes_the_file_smaller(tmp_path: Path):
    store = await SqliteStore.open(tmp_path / "s.db")
    rollout_id = await rollout(store)
    await store.add_event(rollout_id, "0", "note", {"x": "y" * 10_000_000})
    await store.patch_status(rollout_id, StatusPatch(state="failed"))
    await store.mark_consumed([rollout_id])
    await store.retain(0, None)
    await store.close()
    assert (tmp_path / "s.db").stat().st_size < 1_000_000


async def test_everything_is_there_after_a_restart(tmp_path: Path):
    store = await SqliteStore.open(tmp_path / "s.db")
    rollout_id = await rollout(store)
    await store.put_endpoints([Endpoint(model="m", endpoint="http://a", version=1)])
    await store.put_endpoints([Endpoint(model="m", endpoint="http://a", version=2, kind="token")])
    await store.put_setting("pause", {"reason": "r"})
    await store.patch_status(rollout_id, StatusPatch(state="failed", error_message="e"))
    await store.close()
    store = await SqliteStore.open(tmp_path / "s.db")
    assert [e.version for e in await store.endpoints()] == [2]
    assert await store.get_setting("pause") == {"reason": "r"}
    assert (await store.get_rollout(rollout_id)).status.error_message == "e"
    assert (await store.terminal(0, 1)).total_terminal == 1
    stream = store.changes(None)
    other = await rollout(store)
    assert (await anext(stream))[1] == other
    await store.close()


async def test_a_newer_schema_a_foreign_file_and_a_second_gateway_are_refused(tmp_path: Path, store: SqliteStore):
    newer, foreign = tmp_path / "newer.db", tmp_path / "foreign.db"
    with sqlite3.connect(newer) as db:
        db.execute("PRAGMA user_version = 99")
    foreign.write_bytes(b"not a database at all" * 100)
    for path, words in ((newer, "schema 99"), (foreign, "not a store"), (tmp_path / "store.db", "Another gateway")):
        with pytest.raises(StoreError, match=words):
            await SqliteStore.open(path)


async def test_a_full_disk_is_told_and_passes(store: SqliteStore):
    rollout_id = await rollout(store)
    (pages,) = await store._db.write(lambda db: db.execute("PRAGMA page_count").fetchone())
    await store._db.write(lambda db: db.execute(f"PRAGMA max_page_count = {pages}").fetchone())
    with pytest.raises(StoreError, match="full"):
        await store.add_event(rollout_id, "0", "note", {"x": "y" * 100_000})
    await store._db.write(lambda db: db.execute("PRAGMA max_page_count = 1000000").fetchone())
    await store.add_event(rollout_id, "0", "note", {"x": "y" * 100_000})
    assert len(await store.events(rollout_id)) == 1
