"""When an engine registers it is asked whether its log-probabilities heed the temperature (invariant 10)."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from aiohttp import web
from proxy_kit import TINY, TOKENIZER, Proxied, ScriptedEngine, proxied
from structlog.testing import capture_logs

from harnessrl.schemas import Endpoint, Pause


async def registered(gateway: Proxied, *endpoints: Endpoint) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        answer = await http.post("/api/models", json=[endpoint.model_dump() for endpoint in endpoints])
        assert answer.status_code == 201


async def ask(gateway: Proxied) -> Any:
    async with openai.AsyncOpenAI(base_url=gateway.base(), api_key="k", max_retries=0) as client:
        return await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Go"}])


def warnings(logs: Sequence[Any]) -> list[str]:
    return [line["event"] for line in logs if line["log_level"] == "warning"]


async def asked(engine: "ScriptedEngine | ChatEngine") -> int:
    """Requests, once no more come."""
    seen = -1
    while seen != len(engine.requests) or not seen:
        seen = len(engine.requests)
        await asyncio.sleep(0.05)
    return seen


class ChatEngine:
    """An OpenAI server whose log-probabilities may know of the temperature, or not be had."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.scaled = False
        self.refuses = False
        self.url = ""

    def endpoint(self, _: str = "", version: int = 0) -> Endpoint:
        return Endpoint(model="policy-model", endpoint=self.url, version=version)

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        if self.refuses and "top_logprobs" in body:
            return web.json_response({"error": {"message": "no top_logprobs"}}, status=400)
        power = 1 / body["temperature"] if self.scaled else 1
        top = [{"token": t, "logprob": power * p} for t, p in (("a", -0.5), ("b", -1.25))]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "a"},
            "logprobs": {"content": [{**top[0], "top_logprobs": top}]},
            "finish_reason": "length",
            "token_ids": [1],
        }
        return web.json_response({"choices": [choice], "prompt_token_ids": [1, 2]})


@asynccontextmanager
async def chat_engine() -> AsyncIterator[ChatEngine]:
    engine, app = ChatEngine(), web.Application()
    app.router.add_post("/v1/chat/completions", engine.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield engine
    await runner.cleanup()


def engine_of(kind: str) -> Any:
    return chat_engine() if kind == "chat" else ScriptedEngine(TOKENIZER, lambda _: "x")


@pytest.mark.parametrize("kind", ["token", "chat"])
async def test_one_that_ignores_temperature_is_held_to_temperature_1(tmp_path: Path, kind: str) -> None:
    async with engine_of(kind) as engine, proxied(tmp_path) as gateway:
        with capture_logs() as logs:
            await registered(gateway, engine.endpoint(TINY))
            probes = await asked(engine)
            assert (await ask(gateway)).choices[0].message.content
            for version in (1, 2):
                await registered(gateway, engine.endpoint(TINY, version=version))
            await asyncio.sleep(0.1)
        (warning,) = warnings(logs)
        assert "--logprobs-mode processed_logprobs" in warning
        assert len(engine.requests) == probes + 1  # a new version of the weights is not asked again
        (call,) = await gateway.calls()
        assert call.trainable and call.temperature == 1.0


@pytest.mark.parametrize("kind", ["token", "chat"])
async def test_another_temperature_is_refused_until_the_engine_is_mended(tmp_path: Path, kind: str) -> None:
    async with engine_of(kind) as engine, proxied(tmp_path, train_temperature=0.7) as gateway:
        await registered(gateway, engine.endpoint(TINY))
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="processed_logprobs") as caught:
                await ask(gateway)
            assert (caught.value.status_code, caught.value.code) == (503, "logprobs_ignore_temperature")
        engine.scaled = True
        await ask(gateway)
        probes = len(engine.requests)
        await ask(gateway)
        assert len(engine.requests) == probes + 1
        assert [call.temperature for call in await gateway.calls()] == [0.7, 0.7]


async def test_an_engine_that_comes_later_is_asked_then_and_a_call_waits_for_that(tmp_path: Path) -> None:
    engine = ScriptedEngine(TOKENIZER, lambda _: "x")
    async with engine:  # learn its address
        pass
    async with proxied(tmp_path, train_temperature=0.7) as gateway:
        await registered(gateway, engine.endpoint(TINY))
        asking = asyncio.create_task(ask(gateway))
        await asyncio.sleep(0.3)
        assert not asking.done()
        engine.scaled = True
        async with engine:
            assert (await asking).choices[0].message.content == "x"
        assert gateway.gateway.gate.inflight == 0 and len(await gateway.calls()) == 1


async def test_it_is_asked_again_after_a_failure_but_not_while_the_weights_change(tmp_path: Path) -> None:
    async with ScriptedEngine(TOKENIZER, lambda _: "x") as engine, proxied(tmp_path) as gateway:
        await gateway.gateway.gate.pause(Pause())
        await registered(gateway, engine.endpoint(TINY))
        await asyncio.sleep(0.1)
        assert not engine.requests
        engine.fail = lambda n: "500" if n == 0 else None
        with capture_logs() as logs:
            await gateway.gateway.gate.resume()
            while not warnings(logs):
                await asyncio.sleep(0.01)
        assert len(engine.requests) > 1


async def test_one_that_does_not_say_is_not_taken_for_good(tmp_path: Path) -> None:
    async with chat_engine() as engine, proxied(tmp_path, train_temperature=0.7) as gateway:
        engine.refuses = engine.scaled = True
        await registered(gateway, engine.endpoint())
        with pytest.raises(openai.InternalServerError, match="not known") as caught:
            await ask(gateway)
        assert caught.value.code == "logprobs_not_probed"
        engine.refuses = False
        await ask(gateway)


async def test_helpers_and_engines_that_are_gone_are_left_alone(tmp_path: Path) -> None:
    async with ScriptedEngine(TOKENIZER, lambda _: "x") as engine, proxied(tmp_path) as gateway:
        await registered(gateway, engine.endpoint(TINY, model="judge", trainable=False))
        await gateway.gateway.gate.pause(Pause())
        await registered(gateway, engine.endpoint(TINY))
        await gateway.register()
        await gateway.gateway.gate.resume()
        await asyncio.sleep(0.5)
        assert not engine.requests


async def test_the_embedded_engine_heeds_temperature(tmp_path: Path) -> None:
    import torch

    from harnessrl.engine.embedded import EmbeddedEngine
    from harnessrl.engine.model import load_model
    from harnessrl.engine.server import serve

    torch.set_num_threads(1)
    engine = EmbeddedEngine(load_model(TINY), max_batch=4, max_len=512)
    engine.start()
    server = serve(engine, model="policy-model")
    endpoint = Endpoint(
        model="policy-model", endpoint=server.url, kind="token", tokenizer=TINY, renderer={"name": "chatml"}
    )
    try:
        async with proxied(tmp_path, train_temperature=0.7) as gateway:
            with capture_logs() as logs:
                await registered(gateway, endpoint)
                await ask(gateway)
            assert not warnings(logs)
            (call,) = await gateway.calls()
            assert call.temperature == 0.7 and call.trainable
    finally:
        server.close()
        engine.stop()
