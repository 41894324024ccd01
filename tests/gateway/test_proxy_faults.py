"""Pauses, cuts, engines that fail, and harnesses that leave."""

import asyncio
import time
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import httpx
import numpy as np
import openai
import pytest
from proxy_kit import TINY, TOKENIZER, Proxied, ScriptedEngine, contexts, proxied

from harnessrl.client import full_prompts
from harnessrl.schemas import Pause

ASK: Any = {"model": "any", "messages": [{"role": "user", "content": "Go"}]}


def client_of(gateway: Proxied, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=gateway.base(), api_key="k", max_retries=0, **options)


async def test_a_cut_call_goes_on_under_the_new_weights(tmp_path: Path) -> None:
    text = "one two three four five six seven eight nine ten"
    ids = [*TOKENIZER.encode(text), TOKENIZER.convert_tokens_to_ids("<|im_end|>")]

    def reply(body: dict) -> list[int]:
        return ids[len(body["token_ids"]) - prompt_len :]

    async with (
        ScriptedEngine(TOKENIZER, reply, delay=0.02) as engine,
        proxied(tmp_path, engine.endpoint(TINY, version=3)) as gateway,
    ):
        prompt_len = 0
        engine._reply = lambda body: ids
        await client_of(gateway).chat.completions.create(**ASK)
        prompt_len = len(engine.requests[0]["token_ids"])
        engine._reply = reply
        asking = asyncio.create_task(client_of(gateway).chat.completions.create(**ASK))
        while len(engine.sampled) < 2 or len(engine.sampled[1]) < 4:
            await asyncio.sleep(0.01)
        await gateway.gateway.gate.pause(Pause(rest="cut"))
        while gateway.gateway.gate.inflight:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        assert not asking.done()
        await gateway.register(engine.endpoint(TINY, version=4))
        await gateway.gateway.gate.resume()
        answer = await asking
        assert answer.choices[0].message.content == text
        call = (await gateway.calls())[1]
        assert call.sampled_ids == ids
        (first, kept), (second, rest) = call.versions
        assert (first, second, kept + rest) == (3, 4, len(ids)) and 4 <= kept < len(ids)
        resumed = engine.requests[-1]
        assert resumed["token_ids"][prompt_len:] == ids[:kept]
        sent = [request["sampling_params"]["max_tokens"] for request in engine.requests[-2:]]
        assert sent[0] - sent[1] == kept
        assert call.prefilled_again == len(resumed["token_ids"])
        assert call.held_ms > 50
        assert ((await gateway.gateway.store.get_rollout(gateway.rollout_id)).status.held_seconds or 0) > 0.05


async def test_an_engine_that_stops_calls_itself_is_asked_again(tmp_path: Path) -> None:
    async with (
        ScriptedEngine(TOKENIZER, lambda _: "one two three") as engine,
        proxied(tmp_path, engine.endpoint(TINY)) as gateway,
    ):
        engine.fail = lambda n: "abort" if n == 0 else None
        await client_of(gateway).chat.completions.create(**ASK)
        (call,) = await gateway.calls()
        assert call.sampled_ids == engine.sampled[0] + engine.sampled[1]
        kept = len(engine.sampled[0])
        assert engine.requests[1]["token_ids"] == engine.requests[0]["token_ids"] + call.sampled_ids[:kept]


async def test_a_pause_holds_whole_and_streamed_requests(tmp_path: Path) -> None:
    async with (
        ScriptedEngine(TOKENIZER, lambda _: "fine") as engine,
        proxied(tmp_path, engine.endpoint(TINY), keepalive_seconds=0.1) as gateway,
    ):
        await gateway.gateway.gate.pause(Pause(reason="update"))
        whole = asyncio.create_task(client_of(gateway).chat.completions.create(**ASK))
        async with aiohttp.ClientSession() as session:
            url = gateway.base() + "/chat/completions"
            async with session.post(url, json={**ASK, "stream": True}) as response:
                assert (await response.content.readline()) == b": keepalive\n"
                assert not engine.requests and not whole.done()
                await gateway.gateway.gate.resume()
                text = await response.text()
        assert '"content":"f' in text and text.endswith("data: [DONE]\n\n")
        assert (await whole).choices[0].message.content == "fine"
        assert all(c.delivered and c.held_ms > 50 for c in await gateway.calls())


async def test_after_hold_seconds_it_is_429_as_in_v1(tmp_path: Path) -> None:
    async with (
        ScriptedEngine(TOKENIZER, []) as engine,
        proxied(tmp_path, engine.endpoint(TINY), hold_seconds=0.05) as gateway,
    ):
        await gateway.gateway.gate.pause(Pause(retry_after_seconds=9, reason="update"))
        with pytest.raises(openai.RateLimitError) as caught:
            await client_of(gateway).chat.completions.create(**ASK)
        assert caught.value.response.headers["retry-after"] == "9"
        assert caught.value.response.headers["x-agl-paused"] == "true"
        assert caught.value.response.json() == {"error": "gateway paused", "reason": "update"}


async def test_failures_before_the_first_token_are_tried_again(tmp_path: Path) -> None:
    async with (
        ScriptedEngine(TOKENIZER, lambda _: "fine") as engine,
        proxied(tmp_path, engine.endpoint(TINY)) as gateway,
    ):
        engine.fail = lambda n: ("500", "429", None)[n]
        answer = await client_of(gateway).chat.completions.create(**ASK)
        assert answer.choices[0].message.content == "fine" and len(engine.requests) == 3
        assert len(await gateway.calls()) == 1


async def test_an_engine_that_dies_in_mid_answer_is_an_error_and_no_training_data(tmp_path: Path) -> None:
    async with (
        ScriptedEngine(TOKENIZER, lambda _: "one two three four") as engine,
        proxied(tmp_path, engine.endpoint(TINY)) as gateway,
    ):
        engine.fail = lambda n: "die" if n < 2 else None
        with pytest.raises(openai.InternalServerError):
            await client_of(gateway).chat.completions.create(**ASK)
        with pytest.raises(openai.APIError):
            async for _ in await client_of(gateway).chat.completions.create(**ASK, stream=True):
                pass
        await client_of(gateway).chat.completions.create(**ASK)
        broken, streamed, fine = await gateway.calls()
        for call in (broken, streamed):
            assert not call.delivered and not call.trainable and call.error is not None
            assert len(call.sampled_ids) == 2
        assert fine.delivered and fine.trainable


@pytest.mark.parametrize("fault", ["short", "nan", "html"])
async def test_answers_without_usable_tokens_are_502(tmp_path: Path, fault: str) -> None:
    async with (
        ScriptedEngine(TOKENIZER, lambda _: "one two") as engine,
        proxied(tmp_path, engine.endpoint(TINY)) as gateway,
    ):
        engine.fail = lambda n: fault
        with pytest.raises(openai.InternalServerError) as caught:
            await client_of(gateway).chat.completions.create(**ASK)
        assert caught.value.status_code == 502
        (call,) = await gateway.calls()
        assert not call.trainable


async def test_a_harness_that_leaves_stops_the_engine_and_its_retry_is_one_training_call(tmp_path: Path) -> None:
    async with (
        ScriptedEngine(TOKENIZER, lambda _: "one two three four", delay=0.05) as engine,
        proxied(tmp_path, engine.endpoint(TINY)) as gateway,
    ):
        with pytest.raises(openai.APITimeoutError):
            await client_of(gateway, timeout=0.15).chat.completions.create(**ASK)
        stream = await client_of(gateway).chat.completions.create(**ASK, stream=True)
        async for _ in stream:
            break
        await stream.close()
        deadline = time.monotonic() + 3
        while engine.aborted < 2 and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert engine.aborted == 2
        await client_of(gateway).chat.completions.create(**ASK)
        *left, answered = await gateway.calls()
        assert len(left) == 2 and answered.delivered and answered.trainable
        assert all(not c.delivered and not c.trainable for c in left)
        prompts = full_prompts([*left, answered])
        assert all(np.array_equal(p, prompts[answered.call_id]) for p in prompts.values())


async def test_two_identical_requests_at_once_are_both_kept(tmp_path: Path) -> None:
    async with (
        ScriptedEngine(TOKENIZER, ["one", "two", "end", "end"], delay=0.01) as engine,
        proxied(tmp_path, engine.endpoint(TINY)) as gateway,
    ):
        client = client_of(gateway)
        answers = await asyncio.gather(*(client.chat.completions.create(**ASK) for _ in range(2)))
        assert {a.choices[0].message.content for a in answers} == {"one", "two"}
        for answer in answers:
            messages = [*ASK["messages"], answer.choices[0].message, {"role": "user", "content": "on"}]
            await client.chat.completions.create(model="any", messages=messages)
        calls = await gateway.calls()
        assert [c.continuity for c in calls] == ["first", "first", "exact", "exact"]
        assert all(c.delivered for c in calls)
        assert {c.parent for c in calls[2:]} == {c.call_id for c in calls[:2]}


async def test_n_answers_are_n_calls(tmp_path: Path) -> None:
    async with (
        ScriptedEngine(TOKENIZER, ["one", "two"]) as engine,
        proxied(tmp_path, engine.endpoint(TINY)) as gateway,
    ):
        answer = await client_of(gateway).chat.completions.create(**ASK, n=2)
        assert [c.message.content for c in answer.choices] == ["one", "two"]
        assert len(await gateway.calls()) == 2


async def test_a_new_gateway_goes_on_from_what_the_old_one_recorded(tmp_path: Path) -> None:
    messages: Any = [{"role": "user", "content": "Go"}]
    async with ScriptedEngine(TOKENIZER, ["one", "two"]) as engine:
        async with proxied(tmp_path, engine.endpoint(TINY)) as gateway:
            rollout_id = gateway.rollout_id
            answer = await client_of(gateway).chat.completions.create(model="m", messages=messages)
        async with proxied(tmp_path, engine.endpoint(TINY)) as gateway:
            gateway.rollout_id = rollout_id
            messages += [answer.choices[0].message, {"role": "user", "content": "on"}]
            await client_of(gateway).chat.completions.create(model="m", messages=messages)
            first, second = await gateway.calls()
            assert (first.continuity, second.continuity, second.parent) == ("first", "exact", first.call_id)
            whole = contexts([first, second])
            assert np.array_equal(whole[second.call_id][: len(whole[first.call_id])], whole[first.call_id])


async def test_a_dead_endpoint_is_left_and_its_rollouts_move(tmp_path: Path) -> None:
    async with ScriptedEngine(TOKENIZER, lambda _: "fine") as engine:
        dead = engine.endpoint(TINY).model_copy(update={"endpoint": "http://127.0.0.1:9"})
        async with proxied(tmp_path, dead, engine.endpoint(TINY), health_seconds=0.2) as gateway:
            for _ in range(8):
                await gateway.new_rollout()
                answer = await client_of(gateway).chat.completions.create(**ASK)
                assert answer.choices[0].message.content == "fine"


@pytest.mark.parametrize("loss", ["unreachable", "deleted", "never there"])
async def test_calls_wait_while_no_engine_is_there(tmp_path: Path, loss: str) -> None:
    """As where a trainer with its engine is started again."""
    engine = ScriptedEngine(TOKENIZER, lambda _: "fine")
    await engine.__aenter__()
    asking: list[asyncio.Task[Any]] = []
    async with proxied(tmp_path, engine.endpoint(TINY), health_seconds=0.1, keepalive_seconds=0.1) as gateway:
        if loss != "never there":
            await client_of(gateway).chat.completions.create(**ASK)
        if loss != "unreachable":
            await gateway.register()
        await engine.__aexit__()
        for _ in range(3):
            asking.append(asyncio.create_task(client_of(gateway).chat.completions.create(**ASK)))
        stream = client_of(gateway).chat.completions.create(**ASK, stream=True)
        asking.append(asyncio.create_task(all_of(stream)))
        async with asyncio.timeout(60):
            while gateway.gateway.gate.held < len(asking):
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.6)
        assert not any(task.done() for task in asking)
        await engine.__aenter__()
        if loss != "unreachable":
            await gateway.register(engine.endpoint(TINY, version=7))
        await asyncio.wait_for(asyncio.gather(*asking), 60)
        waited = (await gateway.calls())[-len(asking) :]
        assert all(c.delivered and c.held_ms > 500 for c in waited)
        held = (await gateway.gateway.store.get_rollout(gateway.rollout_id)).status.held_seconds
        assert held is not None and held > 0.5
    await engine.__aexit__()


async def test_without_an_engine_the_wait_ends_in_503(tmp_path: Path) -> None:
    async with proxied(tmp_path, hold_seconds=0.05) as gateway:
        with pytest.raises(openai.InternalServerError) as caught:
            await client_of(gateway).chat.completions.create(**ASK)
        assert (caught.value.status_code, caught.value.code) == (503, "no_model_server")
        assert caught.value.response.headers["retry-after"] == "5"


async def all_of(asking: Any) -> None:
    async for _ in await asking:
        pass


@pytest.mark.slow
async def test_clients_with_their_own_time_outs_outlast_a_long_update_and_a_lost_engine(tmp_path: Path) -> None:
    """A request is held for 76 seconds through an update, another for 20 while its engine is away."""

    async def update(gateway: Proxied, engine: ScriptedEngine) -> None:
        ours = openai.AsyncOpenAI(base_url=gateway.base(), api_key="k")
        theirs = anthropic.AsyncAnthropic(base_url=gateway.base(family="anthropic"), api_key="k")
        await gateway.gateway.gate.pause(Pause())
        ask = {**ASK, "max_tokens": 20}
        asking = [
            asyncio.create_task(all_of(ours.chat.completions.create(**ask, stream=True))),
            asyncio.create_task(all_of(theirs.messages.create(**ask, stream=True))),
            asyncio.create_task(ours.chat.completions.create(**ask)),
            asyncio.create_task(ours.responses.create(model="any", input="Go")),
        ]
        await asyncio.sleep(76)
        assert not engine.requests and not any(task.done() for task in asking)
        await gateway.register(engine.endpoint(TINY, version=1))
        await gateway.gateway.gate.resume()
        await asyncio.wait_for(asyncio.gather(*asking), 20)
        calls = await gateway.calls()
        assert len(calls) == len(asking) and all(c.delivered and c.held_ms > 75_000 for c in calls)
        assert {version for c in calls for version, _ in c.versions} == {1}

    async def loss(gateway: Proxied, engine: ScriptedEngine) -> None:
        await engine.__aexit__()
        asking = asyncio.create_task(
            openai.AsyncOpenAI(base_url=gateway.base(), api_key="k").chat.completions.create(**ASK)
        )
        await asyncio.sleep(20)
        await engine.__aenter__()
        await asyncio.wait_for(asking, 10)
        (call,) = await gateway.calls()
        assert call.delivered and call.held_ms > 15_000

    async def run(part: Any, store: Path) -> None:
        engine = ScriptedEngine(TOKENIZER, lambda _: "fine")
        await engine.__aenter__()
        async with proxied(store, engine.endpoint(TINY)) as gateway:
            await part(gateway, engine)
        await engine.__aexit__()

    async with asyncio.TaskGroup() as together:
        for part in (update, loss):
            together.create_task(run(part, tmp_path / part.__name__))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["too large", "many messages"])
async def test_a_huge_request_holds_nobody_up(tmp_path: Path, kind: str) -> None:
    """50 MB are refused before they are read; what may come in is worked on beside the event loop."""
    many = b'{"messages":[' + b",".join([b'{"role":"user","content":"lorem ipsum"}'] * 120_000) + b"]}"
    body, status = (b"x" * 50_000_000, 413) if kind == "too large" else (many, 400)
    async with (
        ScriptedEngine(TOKENIZER, lambda _: "fine") as engine,
        proxied(tmp_path, engine.endpoint(TINY)) as gateway,
        httpx.AsyncClient(timeout=60) as http,
    ):
        lags: list[float] = []

        async def watch() -> None:
            while True:
                busy = time.thread_time()
                await asyncio.sleep(0.002)
                lags.append(time.thread_time() - busy)

        watching = asyncio.create_task(watch())
        response = await http.post(gateway.base() + "/chat/completions", content=body)
        watching.cancel()
        assert response.status_code == status, response.text
        assert max(lags) < 0.1, "seconds of the event loop's thread between two of its turns"


async def test_attempts_that_ended_take_no_calls_and_leave_the_memory(tmp_path: Path) -> None:
    from harnessrl.schemas import StatusPatch

    async with (
        ScriptedEngine(TOKENIZER, lambda _: "fine") as engine,
        proxied(tmp_path, engine.endpoint(TINY)) as gateway,
    ):
        await client_of(gateway).chat.completions.create(**ASK)
        for state in ("running", "succeeded"):
            await gateway.gateway.store.patch_status(gateway.rollout_id, StatusPatch(state=state))
        with pytest.raises(openai.ConflictError):
            await client_of(gateway).chat.completions.create(**ASK)
        deadline = time.monotonic() + 5
        live = gateway.gateway.proxy._attempts._live
        while live and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        assert not live
