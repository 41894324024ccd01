"""What the page shows: rollouts found by what they are, and one rollout as harness and trainer see it."""

import asyncio
import sqlite3
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from dashboard_kit import RUN, TOKENIZER, call, end, fill, made_run, start

from harnessrl.dashboard.trace import _texts
from harnessrl.gateway.store.schema import MIGRATIONS
from harnessrl.gateway.store.sqlite import SqliteStore

_TEXT = {"type": "output_text", "text": "Hello"}
GROUP = f"{RUN}-000001"


async def found(http: httpx.AsyncClient, **search: Any) -> list[str]:
    """The samples of the group that a search finds, in its order."""
    response = await http.get("/api/dashboard/rollouts", params=search)
    assert response.status_code == 200, response.text
    return [item["rollout_id"].rpartition("-")[2] for item in response.json()["items"]]


async def test_rollouts_are_found_by_what_they_are(store: SqliteStore, http: httpx.AsyncClient) -> None:
    await made_run(store)
    await start(store, "other-1", "another-run-1", is_train=False)
    up = {"sort": "created", "descending": False}
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"run": RUN}, ["0", "1", "2", "3"]),
        ({"run": "made"}, ["0", "1", "2", "3"]),
        ({"run": "nobody"}, []),
        ({"group": GROUP, "state": "succeeded"}, ["0", "1"]),
        ({"run": RUN, "state": "unfinished"}, ["3"]),
        ({"is_train": False}, ["1"]),
        ({"reward_min": 0.5}, ["0"]),
        ({"reward_max": 0.5}, ["1"]),
        ({"agent": "judge, too"}, ["0"]),
        ({"agent": "judge"}, []),
        ({"dialect": "openai_chat"}, ["0", "1", "2"]),
        ({"version": 7}, ["0", "1", "2"]),
        ({"version": 6}, []),
        ({"failure": "agent"}, ["2"]),
        ({"reason": "exit code 3"}, ["2"]),
        ({"task": "TASK IS made-0001-000001-1"}, ["1"]),
        ({"task": "other-1"}, ["1"]),
        ({"run": RUN, "limit": 2, "offset": 1}, ["1", "2"]),
        ({"run": RUN, "sort": "reward", "descending": True}, ["0", "1", "3", "2"]),
        ({"run": RUN, "sort": "calls"}, ["1", "2", "0", "3"]),
    ]
    for search, expected in cases:
        assert await found(http, **{**up, **search}) == expected, search
    facets = (await http.get("/api/dashboard/facets", params={"run": RUN})).json()
    assert facets == {
        "states": {"succeeded": 2, "running": 1, "failed": 1},
        "reasons": [["agent", "exit code 3", 1]],
        "agents": ["judge, too"],
        "dialects": ["openai_chat"],
        "versions": [7, 7],
    }
    groups = (await http.get("/api/dashboard/groups", params={"run": RUN, "state": "failed"})).json()
    assert groups["total"] == 1
    assert [r["reward"] for r in groups["items"][0]["rollouts"]] == [1.0, 0.0, None, None]
    assert (await http.get("/api/dashboard/rollouts", params={"sort": "x; DROP"})).status_code == 422


async def test_rewards_of_calls_add_up_and_late_ones_count(store: SqliteStore, http: httpx.AsyncClient) -> None:
    for rollout_id in ("summed", "late"):
        await start(store, rollout_id, "g")
        await store.add_call(call(rollout_id, 0, [1, 2], "a", []))
    for turn, value in ((0, 9.0), (0, 0.25), (1, 0.5)):  # the last of each call counts
        await store.add_event("summed", "0", "reward", {"value": value, "turn": turn})
    await end(store, "summed", None)
    await end(store, "late", 0.0)
    await store.add_event("late", "0", "reward", {"value": 0.75}, late=True)
    items = (await http.get("/api/dashboard/rollouts", params={"sort": "reward"})).json()["items"]
    assert [(i["rollout_id"], i["reward"]) for i in items] == [("late", 0.75), ("summed", 0.75)]


async def test_a_store_from_before_is_summed_up_when_it_is_opened(tmp_path: Path) -> None:
    new, old = await SqliteStore.open(tmp_path / "new.db"), sqlite3.connect(tmp_path / "old.db")
    await made_run(new)
    before = await new.facets(None)
    await new.close()
    old.executescript(f"PRAGMA auto_vacuum = INCREMENTAL; {MIGRATIONS[0]}; PRAGMA user_version = 1;")
    old.execute("ATTACH ? AS new", (str(tmp_path / "new.db"),))
    for (table,) in old.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'").fetchall():
        columns = ", ".join(row[1] for row in old.execute(f"PRAGMA main.table_info({table})"))
        old.execute(f"DELETE FROM main.{table}")
        old.execute(f"INSERT INTO main.{table} ({columns}) SELECT {columns} FROM new.{table}")
    old.commit()
    old.close()
    migrated = await SqliteStore.open(tmp_path / "old.db")
    assert await migrated.facets(None) == before
    await migrated.close()


async def test_one_rollout_as_the_harness_and_the_trainer_see_it(
    store: SqliteStore, http: httpx.AsyncClient
) -> None:
    await made_run(store)
    await end(store, f"{GROUP}-3", 0.0)  # the group is complete
    path = f"/api/dashboard/rollouts/{GROUP}-0"
    shown = (await http.get(path)).json()
    first, second, forked = shown["calls"]
    assert (shown["run_id"], shown["reward"], shown["attempts"]) == (RUN, 1.0, ["0"])
    assert [c["parent"] for c in shown["calls"]] == [-1, 0, -1]
    assert [c["row"] for c in shown["calls"]] == [0, 0, 1]
    assert shown["rows"][0]["calls"] == [0, 1]
    assert shown["rows"][0]["trained_tokens"] == len(first["sampled"]["ids"]) + len(second["sampled"]["ids"])
    assert (forked["continuity"], forked["common"], forked["agent"]) == (
        "rendered(compaction)",
        [0, 2],
        "judge, too",
    )
    # Rewards 1, 0, 0 (its agent failed) and 0: the best is above the mean, and all calls share its advantage.
    assert first["advantage"] == second["advantage"] == forked["advantage"] == pytest.approx(1.5, abs=1e-3)
    pool = shown["pool"]
    assert [pool[i]["content"] for i in second["messages"]] == ["1+1?", "CALC(1+1)", "RESULT(2)"]
    assert [pool[i]["content"] for i in second["answer"]] == ["ANSWER(2)"]
    assert second["shared"] == len(first["prompt"]["ids"]) + len(first["sampled"]["ids"])
    assert "".join(second["prompt"]["texts"]) == "RESULT(2)" and "".join(second["sampled"]["texts"]) == "ANSWER(2)"
    assert shown["logs"][0]["data"]["text"] == "agent began\n"
    failed = (await http.get(f"/api/dashboard/rollouts/{GROUP}-2")).json()
    assert failed["failure"] == "exit code 3" and failed["calls"][0]["advantage"] == pytest.approx(-0.5, abs=1e-3)
    assert (await http.get("/api/dashboard/rollouts/nobody")).status_code == 404


async def test_an_incomplete_group_has_no_advantages_yet(store: SqliteStore, http: httpx.AsyncClient) -> None:
    await made_run(store)
    shown = (await http.get(f"/api/dashboard/rollouts/{GROUP}-0")).json()
    assert [c["advantage"] for c in shown["calls"]] == [None] * 3 and len(shown["rows"]) == 2


@pytest.mark.parametrize(
    ("dialect", "request_", "response", "said"),
    [
        (
            "anthropic_messages",
            {"system": "Be brief.", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
            {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Hello"}]},
            ["Be brief.", "hi", "Hello"],
        ),
        (
            "openai_responses",
            {"instructions": "Be brief.", "input": "hi"},
            {
                "output": [
                    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello"}]}
                ]
            },
            ["Be brief.", "hi", "Hello"],
        ),
        ("openai_completions", {"prompt": "hi"}, {"choices": [{"text": "Hello"}]}, ["hi", "Hello"]),
        ("openai_chat", {"messages": "broken"}, {"choices": [{"message": {"content": "Hello"}}]}, ["Hello"]),
        ("unknown", {"messages": []}, {"x": 1}, []),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_every_dialect_reads_as_a_conversation(
    store: SqliteStore, http: httpx.AsyncClient, dialect: str, request_: Any, response: Any, said: list[str]
) -> None:
    await start(store, "r", "g")
    await store.add_call(call("r", 0, [1], "x", [], dialect=dialect, request=request_, response=response))
    shown = (await http.get("/api/dashboard/rollouts/r")).json()
    (only,) = shown["calls"]
    assert [shown["pool"][i]["content"] for i in [*only["messages"], *only["answer"]]] == said
    body = {
        name: [shown["pool"][i] for i in at] if isinstance(at, list) else shown["pool"][at]
        for name, at in only["request"].items()
    }
    assert body == request_


def test_tokens_that_share_a_character_show_it_once() -> None:
    text = "a é → 🧮 b"
    ids = TOKENIZER.encode(text)
    texts = _texts(TOKENIZER, ids)
    assert len(texts) == len(ids) and "".join(texts) == text
    cut = _texts(TOKENIZER, TOKENIZER.encode("🧮")[:-1])
    assert "\ufffd" in "".join(cut)


async def test_the_page_says_what_it_may_load(http: httpx.AsyncClient) -> None:
    for path in ("/", "/static/app.js", "/static/style.css", "/static/icon.svg"):
        response = await http.get(path)
        assert response.status_code == 200 and response.content
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
    assert (await http.get("/static/app.js")).headers["content-type"].startswith("text/javascript")
    for path in ("/static/none.js", "/static/..%2froutes.py"):
        assert (await http.get(path)).status_code == 404


async def test_system_says_who_is_there(store: SqliteStore, http: httpx.AsyncClient) -> None:
    await made_run(store)
    await http.post("/api/leases", json={"controller": "controller-1", "rollout_ids": []})
    await http.post(f"/api/runs/{RUN}/records", json=[])
    shown = (await http.get("/api/dashboard/system")).json()
    assert [e["answers"] for e in shown["endpoints"]] == [False]
    assert {(h["kind"], h["name"]) for h in shown["heard"]} == {("controller", "controller-1"), ("trainer", RUN)}
    assert shown["controllers"][0]["running"] == 1
    assert {f["name"] for f in shown["metrics"]} >= {"harnessrl_held", "harnessrl_store_bytes"}


async def test_ten_thousand_rollouts_are_filtered_in_a_moment(store: SqliteStore, http: httpx.AsyncClient) -> None:
    await fill(store, 10_000)
    searches: list[dict[str, Any]] = [
        {"state": "succeeded", "sort": "reward"},
        {"task": "task number 77", "sort": "updated"},
        {"agent": "solver", "reward_min": 0.5, "version": 3, "offset": 1000},
        {"reason": "exit code 7"},
    ]
    for path in ("/api/dashboard/rollouts", "/api/dashboard/groups"):
        for search in searches:
            await http.get(path, params=search)
            began = time.perf_counter()
            response = await http.get(path, params=search)
            print(
                f"{path} {search}: {1000 * (time.perf_counter() - began):.0f} ms, {response.json()['total']} found"
            )
            assert response.json()["total"] > 0


async def test_a_run_is_followed_from_afar(store: SqliteStore, http: httpx.AsyncClient) -> None:
    records = [
        {"kind": "start", "at": 1, "data": {"config": {"name": "x"}}},
        {"kind": "phase", "at": 2, "data": {}},
    ]
    assert (await http.post("/api/runs/x-1/records", json=records)).status_code == 204
    (run,) = (await http.get("/api/runs")).json()
    assert run["run_id"] == "x-1" and run["start"] == {"config": {"name": "x"}} and not run["ended"]
    assert run["heard_seconds_ago"] < 5 and (run["started_at"], run["last_at"]) == (1, 2)
    known = (await http.get("/api/runs/x-1/records", params={"after": 1})).json()
    assert [r["kind"] for r in known] == ["phase"]
    following = store.follow_run("x-1", known[0]["id"])
    coming = asyncio.ensure_future(anext(following))
    await asyncio.sleep(0.05)
    assert not coming.done()
    await http.post("/api/runs/x-1/records", json=[{"kind": "end", "at": 3, "data": {"state": "finished"}}])
    assert (await asyncio.wait_for(coming, 5)).kind == "end"
    assert (await http.get("/api/runs")).json()[0]["ended"]
    assert (await http.post("/api/runs/x-1/records", json=[{"kind": "joke", "at": 1}])).status_code == 422
