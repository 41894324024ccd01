"""kill -9 at random points under load: what was acknowledged is there, and nothing is there by half."""

import asyncio
import contextlib
import random
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from gateway_kit import Serve

KILLS = 30
WORKERS = 8
PROMPT, SAMPLED = 500, 100


@dataclass
class Acknowledged:
    """What the gateway said yes to; `tried` holds what was asked for, answered or not."""

    rollouts: set[str] = field(default_factory=set)
    batches_tried: list[list[str]] = field(default_factory=list)
    claimed: set[str] = field(default_factory=set)
    events: dict[str, list[int]] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    calls_tried: dict[str, int] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)


async def worker(http: httpx.AsyncClient, said: Acknowledged, name: str) -> None:
    for n in range(10_000):
        batch = [f"{name}-{n}-{i}" for i in range(3)]
        said.batches_tried.append(batch)
        await _ok(http.post("/api/rollouts", json=[{"input": {"id": i}, "rollout_id": i} for i in batch]))
        said.rollouts.update(batch)
        mine = batch[0]
        url = f"/api/rollouts/{mine}"
        await _ok(http.post(f"{url}/claim", json={"controller": "c", "lease_seconds": 600}))
        said.claimed.add(mine)
        for number in range(2):
            body = {"event_type": "reward", "data": {"value": number, "filler": "x" * 3000}}
            await _ok(http.post(f"{url}/attempt/0/events", json=body))
            said.events.setdefault(mine, []).append(number)
        said.calls_tried[mine] = 1
        chat = f"/proxy/rollout/{mine}/attempt/0/mode/train/openai/v1/chat/completions"
        await _ok(http.post(chat, json={"messages": [{"role": "user", "content": mine}]}))
        said.calls[mine] = 1
        ended = await _ok(http.post(f"{url}/attempt/0/end", json={"ok": n % 3 != 0}))
        said.ended[mine] = ended.json()["status"]["state"]


async def _ok(request) -> httpx.Response:
    response = await request
    assert response.is_success, response.text
    return response


async def load(url: str, said: Acknowledged, name: str) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=30) as http, asyncio.TaskGroup() as group:
        for w in range(WORKERS):
            group.create_task(_until_lost(worker(http, said, f"{name}-{w}")))


async def _until_lost(work) -> None:
    with contextlib.suppress(httpx.TransportError):
        await work


async def check(url: str, said: Acknowledged) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        for batch in said.batches_tried:
            found = [await http.get(f"/api/rollouts/{i}") for i in batch]
            assert len({r.status_code for r in found}) == 1, "a batch is there as a whole or not at all"
            if found[0].status_code == 404:
                assert said.rollouts.isdisjoint(batch)
                continue
            assert [r.json()["rollout"]["input"]["id"] for r in found] == batch
            await _check_rollout(http, found[0].json()["rollout"], said)
        terminal = (await http.get("/api/rollouts/terminal?limit=100000")).json()
        ids = [item["rollout_id"] for item in terminal["items"]]
        assert len(ids) == len(set(ids)) == terminal["total_terminal"]
        assert said.ended.keys() <= set(ids)


async def _check_rollout(http: httpx.AsyncClient, rollout: dict, said: Acknowledged) -> None:
    name, state = rollout["rollout_id"], rollout["status"]["state"]
    if name in said.ended:
        assert state == said.ended[name]
    elif name in said.claimed:
        assert state in ("running", "succeeded", "failed")
    events = (await http.get(f"/api/rollouts/{name}/events")).json()
    rewards = [e["data"] for e in events if e["event_type"] == "reward"]
    numbers = [reward["value"] for reward in rewards]
    assert all(reward["filler"] == "x" * 3000 for reward in rewards)
    assert numbers == list(range(len(numbers))) and len(numbers) >= len(said.events.get(name, []))
    calls = [e["data"]["response"] for e in events if e["event_type"] == "model_request"]
    assert len(calls) <= said.calls_tried.get(name, 0)
    whole = [response for response in calls if "error" not in response]
    assert said.calls.get(name, 0) <= len(whole)
    for response in whole:
        choice = response["choices"][0]
        lengths = [
            len(x) for x in (response["prompt_token_ids"], choice["token_ids"], choice["logprobs"]["content"])
        ]
        assert lengths == [PROMPT, SAMPLED, SAMPLED]


@pytest.mark.slow
def test_kill_9_under_load(serve: Serve, tmp_path: Path, engine_url: str):
    rng = random.Random(7)
    everything = 0
    gateway = serve("--key", "", "--model", "policy")
    endpoint = {"model": "policy", "endpoint": f"{engine_url}/{PROMPT}x{SAMPLED}/0/v1"}
    httpx.post(f"{gateway.url}/api/models", json=[endpoint]).raise_for_status()
    for kill in range(KILLS):
        said = Acknowledged()

        async def under_load(said=said, name=f"k{kill}", url=gateway.url, victim=gateway) -> None:
            loading = asyncio.create_task(load(url, said, name))
            await asyncio.sleep(rng.uniform(0.05, 0.7))
            victim.kill()
            await loading

        asyncio.run(under_load())
        gateway = serve("--key", "", "--model", "policy")
        asyncio.run(check(gateway.url, said))
        everything += sum(map(len, (said.rollouts, said.claimed, said.events, said.calls, said.ended)))
    assert everything > 10 * KILLS
    assert gateway.terminate() == 0
    with contextlib.closing(sqlite3.connect(tmp_path / "store.db")) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        calls = "SELECT count(*) FROM entries WHERE data IS NULL"
        whole = "SELECT count(*) FROM entries JOIN calls ON calls.entry = id JOIN payloads ON payloads.entry = id"
        assert db.execute(calls).fetchone() == db.execute(whole).fetchone()


@pytest.mark.slow
def test_calls_that_a_kill_cuts_are_failed_calls(serve: Serve, engine_url: str):
    gateway = serve("--key", "", "--model", "policy")
    endpoint = {"model": "policy", "endpoint": f"{engine_url}/{PROMPT}x{SAMPLED}/2500/v1"}
    httpx.post(f"{gateway.url}/api/models", json=[endpoint]).raise_for_status()
    rollouts = [{"input": i, "rollout_id": f"r{i}"} for i in range(3)]
    httpx.post(f"{gateway.url}/api/rollouts", json=rollouts).raise_for_status()
    path = "/proxy/rollout/r{}/attempt/0/mode/train/openai/v1/chat/completions"
    ask = {"messages": [{"role": "user", "content": "Go"}]}

    async def cut() -> None:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=30) as http:
            calls = [asyncio.create_task(http.post(path.format(i), json=ask)) for i in range(3)]
            await asyncio.sleep(1.2)
            assert not any(call.done() for call in calls)
            gateway.kill()
            await asyncio.wait(calls)

    asyncio.run(cut())
    for _ in range(2):  # a second start changes nothing
        gateway = serve("--key", "", "--model", "policy")
        for i in range(3):
            (call,) = httpx.get(f"{gateway.url}/api/rollouts/r{i}/calls").json()
            assert (call["untrainable_reason"], call["delivered"], call["trainable"]) == ("cut", False, False)
            assert not call["capture_failed"] and not call["sampled_ids"], "the rollout stays usable"
        assert gateway.terminate() == 0
    gateway = serve("--key", "", "--model", "policy")
    httpx.post(gateway.url + path.format(0), json=ask, timeout=30).raise_for_status()
    assert [c["trainable"] for c in httpx.get(f"{gateway.url}/api/rollouts/r0/calls").json()] == [False, True]
