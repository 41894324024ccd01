"""The interface of Agent Lightning v1.0 and our additions, over the ASGI app."""

import asyncio
from typing import Any

import httpx
import pytest
from gateway_kit import KEY, client_of

from harnessrl.gateway.app import Gateway

JSON = {"content-type": "application/json"}


async def create(http: httpx.AsyncClient, **fields: Any) -> str:
    response = await http.post("/api/rollouts", json=[{"input": {"x": 1}, **fields}])
    assert response.status_code == 201, response.text
    return response.json()[0]["rollout_id"]


async def event(
    http: httpx.AsyncClient, rollout_id: str, kind: str, data: Any, attempt: str = "0"
) -> httpx.Response:
    body = {"event_type": kind, "data": data}
    return await http.post(f"/api/rollouts/{rollout_id}/attempt/{attempt}/events", json=body)


async def patch(http: httpx.AsyncClient, rollout_id: str, **status: Any) -> httpx.Response:
    return await http.patch(f"/api/rollouts/{rollout_id}", json={"status": status})


async def test_a_rollout_has_v1s_shape(http: httpx.AsyncClient):
    response = await http.post("/api/rollouts", json=[{"input": [1], "metadata": {"batch_idx": 1, "extra": "e"}}])
    (rollout,) = response.json()
    assert set(rollout) == {"rollout_id", "input", "is_train", "config", "metadata", "status"}
    assert set(rollout["status"]) == {
        *("state", "k8s_job_name", "last_attempt_id", "error_message", "version", "created_at", "updated_at")
    }
    assert rollout["config"] == {"timeout_seconds": 3600, "local": None, "k8s": None}
    assert rollout["metadata"] == {"batch_idx": 1, "sample_idx_in_batch": None, "extra": "e"}
    detail = (await http.get(f"/api/rollouts/{rollout['rollout_id']}")).json()
    assert detail == {"rollout": rollout, "attempts": []}


async def test_a_known_id_returns_the_stored_rollout(http: httpx.AsyncClient):
    await create(http, rollout_id="mine")
    await patch(http, "mine", state="running")
    response = await http.post("/api/rollouts", json=[{"input": "other", "rollout_id": "mine"}, {"input": 2}])
    assert response.status_code == 201
    assert (response.json()[0]["input"], response.json()[0]["status"]["state"]) == ({"x": 1}, "running")


@pytest.mark.parametrize("rollout_id", ["a b", "ä€😀", "a%2Fb", "?x=1#y", "..."])
async def test_unusual_ids_are_addressable(http: httpx.AsyncClient, rollout_id: str):
    await create(http, rollout_id=rollout_id)
    response = await http.get(httpx.URL("/api/rollouts/").join(_quoted(rollout_id)))
    assert response.json()["rollout"]["rollout_id"] == rollout_id


def _quoted(text: str) -> str:
    return "/api/rollouts/" + "".join(f"%{byte:02X}" for byte in text.encode())


@pytest.mark.parametrize("rollout_id", ["a/b", "terminal", "stream", "consumed", "..", "x" * 201, "a\n", 5, ["a"]])
async def test_unaddressable_ids_are_refused(http: httpx.AsyncClient, rollout_id: Any):
    response = await http.post("/api/rollouts", json=[{"input": 1}, {"input": 1, "rollout_id": rollout_id}])
    assert response.status_code == 422
    assert (await http.get("/api/rollouts?state_in=queuing")).json() == [], "all or none"


async def test_patch_follows_the_states(http: httpx.AsyncClient):
    rollout_id = await create(http)
    changed = (await patch(http, rollout_id, state="running", k8s_job_name="job")).json()["status"]
    assert (changed["state"], changed["k8s_job_name"], changed["version"]) == ("running", "job", 2)
    refused = [await patch(http, rollout_id, state="queuing"), await patch(http, rollout_id, state="running")]
    assert [r.status_code for r in refused] == [409, 409]
    invalid = [await patch(http, rollout_id, state="cancelled"), await patch(http, rollout_id, cancel=True)]
    assert [r.status_code for r in invalid] == [422, 422]
    assert (await patch(http, rollout_id)).json()["status"]["version"] == 2
    assert (await http.patch(f"/api/rollouts/{rollout_id}", json={})).json()["status"]["version"] == 2
    assert (await patch(http, rollout_id, state="succeeded")).json()["status"]["version"] == 3
    assert (await patch(http, rollout_id, state="failed")).status_code == 409
    assert (await patch(http, rollout_id, error_message="late")).json()["status"]["error_message"] == "late"
    assert (await patch(http, "unknown", state="running")).status_code == 404


async def test_lists_filter_by_state(http: httpx.AsyncClient):
    ids = [await create(http) for _ in range(3)]
    await patch(http, ids[1], state="running")

    async def listed(query: str) -> list[str]:
        return [r["rollout_id"] for r in (await http.get(f"/api/rollouts?{query}")).json()]

    assert await listed("state_in=queuing&state_in=running&limit=100000") == ids
    assert await listed("state_in=running") == [ids[1]]
    assert await listed("state_in=queuing&limit=1") == [ids[0]]
    for query in ("", "state_in=lost", "state_in=queuing&limit=-1", f"state_in=queuing&limit={2**70}"):
        assert (await http.get(f"/api/rollouts?{query}")).status_code == 422


async def test_terminal_pages_in_the_order_of_completion(http: httpx.AsyncClient):
    done = []
    for name, is_train in (("a", True), ("b", False), ("c", True)):
        done.append(await create(http, input={"data_id": name}, is_train=is_train))
    for rollout_id in reversed(done):
        await patch(http, rollout_id, state="running")
        await patch(http, rollout_id, state="succeeded")
    first = (await http.get("/api/rollouts/terminal?limit=2")).json()
    assert first["items"] == [
        {"rollout_id": done[2], "state": "succeeded", "data_id": "c", "is_train": True},
        {"rollout_id": done[1], "state": "succeeded", "data_id": "b", "is_train": False},
    ]
    assert (first["next_after"], first["total_terminal"]) == (2, 3)
    assert (await http.get("/api/rollouts/terminal?after=3")).json() == {
        "items": [],
        "next_after": 3,
        "total_terminal": 3,
    }
    for query in ("after=-1", "limit=-1", f"after={2**70}"):
        assert (await http.get(f"/api/rollouts/terminal?{query}")).status_code == 422


async def test_deletion_is_silent_and_final(http: httpx.AsyncClient):
    rollout_id = await create(http)
    await event(http, rollout_id, "note", {})
    for _ in range(2):
        response = await http.delete(f"/api/rollouts/{rollout_id}")
        assert (response.status_code, response.content) == (204, b"")
    for path in ("", "/events", "/calls"):
        assert (await http.get(f"/api/rollouts/{rollout_id}{path}")).status_code == 404


async def test_events_of_the_last_attempt_and_the_triplet_form(http: httpx.AsyncClient):
    rollout_id = await create(http)

    async def request(prompt: list[int], sampled: list[int]) -> None:
        response = {"prompt_token_ids": prompt, "choices": [{"token_ids": sampled}]}
        data = {"response": response, "server": {"model": "m", "version": 3}}
        assert (await event(http, rollout_id, "model_request", data)).status_code == 200

    await request([1, 2], [10])
    posted = await event(http, rollout_id, "reward", {"value": 0.5, "extra": "dropped", "source": "s"})
    assert (posted.status_code, posted.json()["attempt_id"]) == (200, "0")
    await request([3, 4], [20])
    await request([1, 2], [30])
    await event(http, rollout_id, "other", {"kept": {"whole": 1}}, attempt="unusual")
    url = f"/api/rollouts/{rollout_id}"
    raw = (await http.get(f"{url}/events?event_type=model_request")).json()
    assert [e["data"]["response"]["choices"][0]["token_ids"] for e in raw] == [[10], [20], [30]]
    trimmed = (await http.get(f"{url}/events?format=triplet")).json()
    assert [e["data"] for e in trimmed] == [
        {"value": 0.5, "source": "s"},
        *(
            {
                "prompt_token_ids": prompt,
                "response_token_ids": sampled,
                "response_log_probs": None,
                "server": {"model": "m", "version": 3},
            }
            for prompt, sampled in (([3, 4], [20]), ([1, 2], [30]))
        ),
    ]
    assert (await http.get(url)).json()["attempts"] == ["0", "unusual"]
    await patch(http, rollout_id, last_attempt_id="unusual")
    assert [e["data"] for e in (await http.get(f"{url}/events")).json()] == [{"kept": {"whole": 1}}]


@pytest.mark.parametrize("value", [None, "1", True, [1]])
async def test_a_reward_is_a_finite_number(http: httpx.AsyncClient, value: Any):
    rollout_id = await create(http)
    assert (await event(http, rollout_id, "reward", {"value": value})).status_code == 422


@pytest.mark.parametrize("where", [{"turn": [1]}, {"turn": "1"}, {"call_id": [1]}, {"call_id": 1}])
async def test_a_reward_names_its_call_by_id_or_turn(http: httpx.AsyncClient, where: dict[str, Any]):
    rollout_id = await create(http)
    assert (await event(http, rollout_id, "reward", {"value": 1.0} | where)).status_code == 422


async def test_an_ended_rollout_takes_no_more_events(http: httpx.AsyncClient):
    rollout_id = await create(http)
    await patch(http, rollout_id, state="failed")
    assert (await event(http, rollout_id, "reward", {"value": 1})).status_code == 409
    judged = await create(http, config={"reward_from": "evaluator"})
    await patch(http, judged, state="failed")
    assert (await event(http, judged, "note", {})).status_code == 409
    assert (await event(http, judged, "reward", {"value": 1})).status_code == 200


BAD_BODIES = {
    "NaN": b'[{"input": NaN}]',
    "infinity": b'[{"input": -Infinity}]',
    "surrogate": rb'[{"input": "\ud800"}]',
    "utf-8": b'[{"input": "\xff"}]',
    "half": b'[{"input": ',
    "empty": b"",
    "deep": b'[{"input": ' + b"[" * 50_000 + b"]" * 50_000 + b"}]",
    "too deep": b'[{"input": ' + b"[" * 199 + b"]" * 199 + b"}]",
    "object": b'{"input": 1}',
    "no input": b"[{}]",
    "timeout": b'[{"input": 1, "config": {"timeout_seconds": -1}}]',
    "priority": b'[{"input": 1, "config": {"priority": 99999999999999999999}}]',
}


async def test_what_is_accepted_can_be_given_back(http: httpx.AsyncClient):
    deep = b"[" * 197 + b"]" * 197
    body = b'[{"input": %s, "metadata": {"x": %s}}]' % (deep, deep)
    created = await http.post("/api/rollouts", content=body, headers=JSON)
    url = f"/api/rollouts/{created.json()[0]['rollout_id']}"
    posted = await http.post(
        f"{url}/attempt/0/events", content=b'{"event_type": "x", "data": {"x": %s}}' % deep, headers=JSON
    )
    answers = [created, posted, *[await http.get(url + path) for path in ("", "/events", "/events?format=triplet")]]
    assert all(answer.is_success and deep in answer.content for answer in answers)


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES.keys())
async def test_bad_bodies_are_the_callers_fault(http: httpx.AsyncClient, body: bytes):
    response = await http.post("/api/rollouts", content=body, headers=JSON)
    assert response.status_code == 422, response.text
    assert response.json()["detail"]
    rollout_id = await create(http)
    url = f"/api/rollouts/{rollout_id}/attempt/0/events"
    assert (await http.post(url, content=body, headers=JSON)).status_code == 422


async def test_wrong_type_and_huge_bodies_are_refused(http: httpx.AsyncClient):
    refused = await http.post("/api/rollouts", content=b"[]", headers={"content-type": "text/plain"})
    assert refused.status_code == 415
    huge = b"[" + b" " * (17 << 20) + b"]"
    assert (await http.post("/api/rollouts", content=huge, headers=JSON)).status_code == 413

    async def chunks():
        for _ in range(17):
            yield b" " * (1 << 20)

    assert (await http.post("/api/rollouts", content=chunks(), headers=JSON)).status_code == 413


async def test_models_are_upserted_listed_and_dropped(http: httpx.AsyncClient):
    one = {"model": "m", "endpoint": "http://a/v1", "version": 1}
    response = await http.post("/api/models", json=[one])
    assert (response.status_code, response.json()) == (201, [one])
    await http.post(
        "/api/models", json=[{**one, "version": 2}, {"model": "n", "endpoint": "http://b", "kind": "token"}]
    )
    listed = (await http.get("/api/models")).json()
    assert [(m["model"], m["version"], m.get("kind")) for m in listed] == [("m", 2, None), ("n", 0, "token")]
    assert (await http.post("/api/models", json=[{"model": "m", "endpoint": "b"}])).status_code == 422
    response = await http.delete("/api/models")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
    assert (await http.get("/api/models")).json() == []


async def test_pause_state_and_resume(http: httpx.AsyncClient):
    paused = {"paused": True, "retry_after_seconds": 9, "reason": "update", "inflight": 0}
    response = await http.post("/proxy/pause", json={"retry_after_seconds": 9, "reason": "update"})
    assert response.json() == paused == (await http.get("/proxy/state")).json()
    resumed = (await http.post("/proxy/resume")).json()
    assert (resumed["paused"], resumed["reason"]) == (False, None)
    assert (await http.post("/proxy/pause")).status_code == 422


async def test_a_claimed_rollout_runs_and_is_judged(gateway: Gateway, http: httpx.AsyncClient):
    rollout_id = await create(http)
    body = {"controller": "c", "lease_seconds": 30}
    claimed = (await http.post(f"/api/rollouts/{rollout_id}/claim", json=body)).json()
    assert claimed["attempt_id"] == "0" and "evaluator_key" in claimed
    assert (await http.post(f"/api/rollouts/{rollout_id}/claim", json=body)).status_code == 409
    async with client_of(gateway, claimed["agent_key"]) as agent:
        assert (await event(agent, rollout_id, "reward", {"value": 1.0})).status_code == 200
    renewal = {"controller": "c", "lease_seconds": 30, "rollout_ids": [rollout_id, "other"]}
    kept = (await http.post("/api/leases", json=renewal)).json()
    assert kept == {"kept": [rollout_id], "held_seconds": {rollout_id: 0}}
    ended = await http.post(f"/api/rollouts/{rollout_id}/attempt/0/end", json={"ok": True})
    assert ended.json()["status"]["state"] == "succeeded"
    async with client_of(gateway, claimed["agent_key"]) as agent:
        assert (await event(agent, rollout_id, "note", {})).status_code == 401


async def test_v1s_open_paths(gateway: Gateway):
    async with client_of(gateway, None) as anybody:
        healthz = await anybody.get("/healthz")
        assert (healthz.status_code, healthz.json()) == (200, {"status": "ok"})
        assert (await anybody.get("/docs")).status_code == 200
        assert "/api/rollouts" in (await anybody.get("/openapi.json")).json()["paths"]
        refused = await anybody.post("/api/rollouts", json=[])
        assert (refused.status_code, refused.json()) == (401, {"detail": "Invalid or missing API key"})
    for headers in ({"x-api-key": KEY}, {"authorization": f"bearer {KEY}"}):
        async with client_of(gateway, None) as client:
            response = await client.post("/api/rollouts", json=[], headers=headers)
            assert (response.status_code, response.json()) == (201, [])


async def test_many_writers_at_once(http: httpx.AsyncClient):
    rollout_id = await create(http)
    posts = [event(http, rollout_id, "note", {"n": n}) for n in range(200)]
    assert {r.status_code for r in await asyncio.gather(*posts)} == {200}
    stored = (await http.get(f"/api/rollouts/{rollout_id}/events")).json()
    assert sorted(e["data"]["n"] for e in stored) == list(range(200))


async def test_metrics_show_the_gateway(gateway: Gateway, http: httpx.AsyncClient):
    await asyncio.sleep(0.15)
    text = (await http.get("/metrics")).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["harnessrl_store_bytes"]) > 0
    assert float(values["harnessrl_event_loop_lag_seconds_count"]) >= 1
    assert {"harnessrl_inflight", "harnessrl_held", "harnessrl_store_backlog"} <= set(values)
