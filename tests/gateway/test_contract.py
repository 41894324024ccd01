"""Model calls as Agent Lightning v1.0 has them, at an engine that returns token ids (the rest: test_api.py)."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from aiohttp import web
from gateway_kit import KEY, client_of

from harnessrl.gateway.app import create_app
from harnessrl.gateway.settings import Settings

MODEL = "policy"
EVENT_KEYS = {
    *("model", "model_version", "request", "response", "server", "latency_ms"),
    *("http_status", "status", "retry_count", "usage", "finish_reason"),
}


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """As `harnessrl gateway --model policy --hold-seconds 0`."""
    settings = Settings(store=tmp_path / "store.db", key=KEY, model=MODEL, hold_seconds=0)
    async with create_app(settings) as app, client_of(app) as client:
        yield client


@asynccontextmanager
async def engine(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """The URL of an engine that answers so."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    await runner.cleanup()


async def rollout(http: httpx.AsyncClient) -> str:
    return (await http.post("/api/rollouts", json=[{"input": 1}])).json()[0]["rollout_id"]


async def register(http: httpx.AsyncClient, endpoint: str) -> None:
    await http.delete("/api/models")
    response = await http.post("/api/models", json=[{"model": MODEL, "endpoint": endpoint, "version": 3}])
    assert response.status_code == 201


async def call(http: httpx.AsyncClient, rollout_id: str, mode: str = "train", **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return await http.post(
        f"/proxy/rollout/{rollout_id}/attempt/0/mode/{mode}/openai/v1/chat/completions", json=body
    )


async def requests(http: httpx.AsyncClient, rollout_id: str, form: str = "") -> list[dict[str, Any]]:
    params = {"event_type": "model_request", **({"format": form} if form else {})}
    events = (await http.get(f"/api/rollouts/{rollout_id}/events", params=params)).json()
    return [event["data"] for event in events]


async def test_a_training_call_is_rewritten_answered_and_recorded(http: httpx.AsyncClient, engine_url: str):
    await register(http, f"{engine_url}/5x3/0/v1")
    rollout_id = await rollout(http)
    response = await call(http, rollout_id, temperature=0.123, model="other", user="kept")
    answer = response.json()
    ids = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    assert (response.status_code, *map(len, ids)) == (200, 5, 3)
    (data,) = await requests(http, rollout_id)
    assert data.keys() == EVENT_KEYS
    sent = data["request"]
    assert (sent["model"], sent["return_token_ids"], sent["logprobs"], sent["user"]) == (MODEL, True, True, "kept")
    assert sent["temperature"] == 1
    assert data["server"] == {"model": MODEL, "endpoint": f"{engine_url}/5x3/0/v1", "version": 3}
    assert (data["http_status"], data["status"], data["finish_reason"]) == (200, "ok", "stop")
    assert data["usage"] == answer["usage"]
    assert data["response"]["choices"][0]["message"] == answer["choices"][0]["message"]
    (triplet,) = await requests(http, rollout_id, "triplet")
    logprobs = triplet.pop("response_log_probs")
    assert triplet == {
        "prompt_token_ids": ids[0],
        "response_token_ids": ids[1],
        "server": {"model": MODEL, "version": 3},
        "http_status": 200,
        "status": "ok",
    }
    expected = [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]
    assert logprobs == pytest.approx(expected, rel=1e-6)


async def test_an_evaluation_call_asks_for_no_logprobs(http: httpx.AsyncClient, engine_url: str):
    await register(http, f"{engine_url}/5x3/0/v1")
    rollout_id = await rollout(http)
    assert (await call(http, rollout_id, "val")).status_code == 200
    (data,) = await requests(http, rollout_id)
    assert "logprobs" not in data["request"]


async def test_what_is_not_there_is_404_or_503(http: httpx.AsyncClient, engine_url: str):
    rollout_id = await rollout(http)
    assert (await call(http, rollout_id)).status_code == 503
    await register(http, f"{engine_url}/5x3/0/v1")
    assert (await call(http, rollout_id, "test")).status_code == 404
    assert (await call(http, "unknown")).status_code == 404
    path = f"/proxy/rollout/{rollout_id}/attempt/0/mode/train/openai/v1/embeddings"
    assert (await http.post(path, json={})).status_code == 404


async def test_an_engines_400_is_passed_on_and_recorded(http: httpx.AsyncClient):
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "too long", "type": "invalid_request_error"}}, status=400)

    rollout_id = await rollout(http)
    async with engine(refuse) as url:
        await register(http, url)
        response = await call(http, rollout_id)
    assert (response.status_code, response.json()["error"]["message"]) == (400, "too long")
    (triplet,) = await requests(http, rollout_id, "triplet")
    assert (triplet["prompt_token_ids"], triplet["response_token_ids"]) == ([], [])
    assert (triplet["http_status"], triplet["status"]) == (400, "error")
    assert triplet["error"] == response.json()["error"]


async def test_a_stream_that_was_not_asked_for_is_answered_whole(http: httpx.AsyncClient):
    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for n, word in enumerate(("a", "b")):
            logprobs = {"content": [{"token": word, "logprob": -0.5}]}
            choice = {"index": 0, "delta": {"content": word}, "token_ids": [n], "logprobs": logprobs}
            chunk = {"choices": [choice], **({"prompt_token_ids": [7]} if n == 0 else {})}
            await response.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    rollout_id = await rollout(http)
    async with engine(stream) as url:
        await register(http, url)
        response = await call(http, rollout_id)
    assert response.json()["choices"][0]["message"]["content"] == "ab"
    (triplet,) = await requests(http, rollout_id, "triplet")
    assert (triplet["prompt_token_ids"], triplet["response_token_ids"]) == ([7], [0, 1])


async def test_a_paused_gateway_says_so_at_once(http: httpx.AsyncClient, engine_url: str):
    await register(http, f"{engine_url}/5x3/0/v1")
    rollout_id = await rollout(http)
    await http.post("/proxy/pause", json={"retry_after_seconds": 9, "reason": "scale-down"})
    response = await call(http, rollout_id)
    assert (response.status_code, response.json()) == (429, {"error": "gateway paused", "reason": "scale-down"})
    assert (response.headers["retry-after"], response.headers["x-agl-paused"]) == ("9", "true")
    await http.post("/proxy/resume")
    assert (await call(http, rollout_id)).status_code == 200


async def test_a_call_needs_a_key_of_its_own_attempt(http: httpx.AsyncClient, engine_url: str):
    await register(http, f"{engine_url}/5x3/0/v1")
    mine, other = await rollout(http), await rollout(http)
    claimed = (await http.post(f"/api/rollouts/{mine}/claim", json={"controller": "c"})).json()
    http.headers["authorization"] = f"Bearer {claimed['agent_key']}"
    assert [(await call(http, i)).status_code for i in (mine, other)] == [200, 403]
    http.headers["authorization"] = f"Bearer {KEY}"
    await http.post(f"/api/rollouts/{mine}/attempt/0/end", json={"ok": False})
    assert (await call(http, mine)).status_code == 409
    http.headers["authorization"] = f"Bearer {claimed['agent_key']}"
    assert (await call(http, mine)).status_code == 401
    http.headers["authorization"] = ""
    assert (await call(http, mine)).status_code == 401
