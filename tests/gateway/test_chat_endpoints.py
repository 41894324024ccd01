"""Chat endpoints: OpenAI servers that return token ids, passed through as v1.0 does."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web
from proxy_kit import Proxied, proxied

from harnessrl.schemas import Endpoint

ASK: Any = {"model": "any", "messages": [{"role": "user", "content": "Go"}], "temperature": 0.2, "top_p": 0.5}


def answer(prompt: list[int], ids: list[int], text: str = "fine") -> dict[str, Any]:
    content = [{"token": str(i), "logprob": -0.5, "bytes": None, "top_logprobs": []} for i in ids]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "logprobs": {"content": content},
        "finish_reason": "stop",
        "token_ids": ids,
    }
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
    head = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "prompt_token_ids": prompt}
    return {**head, "choices": [choice], "usage": usage}


@asynccontextmanager
async def upstream(
    reply: Callable[[dict[str, Any]], Any], tmp_path: Path
) -> AsyncIterator[tuple[Proxied, list[Any]]]:
    asked: list[Any] = []

    async def serve(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        asked.append(body)
        said = reply(body)
        if isinstance(said, web.StreamResponse):
            return said
        if not body.get("stream"):
            return web.json_response(said)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        choice = said["choices"][0]
        for position, token in enumerate(choice["token_ids"]):
            chunk = {k: v for k, v in said.items() if k not in ("choices", "prompt_token_ids")}
            last = position == len(choice["token_ids"]) - 1
            part = {
                "index": 0,
                "delta": {"content": choice["message"]["content"] if position == 0 else ""},
                "logprobs": {"content": choice["logprobs"]["content"][position : position + 1]},
                "token_ids": [token],
                "finish_reason": "stop" if last else None,
            }
            chunk |= {"object": "chat.completion.chunk", "choices": [part]}
            if position == 0:
                chunk["prompt_token_ids"] = said["prompt_token_ids"]
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    async with proxied(tmp_path, Endpoint(model="policy-model", endpoint=url, version=3)) as gateway:
        yield gateway, asked
    await runner.cleanup()


def client_of(gateway: Proxied, mode: str = "train") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=gateway.base(mode), api_key="k", max_retries=0)


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_goes_up_and_what_is_recorded(tmp_path: Path, streamed: bool) -> None:
    async with upstream(lambda _: answer([1, 2, 3], [4, 5]), tmp_path) as (gateway, asked):
        got: Any = await client_of(gateway).chat.completions.create(**ASK, stream=streamed)
        text = (
            "".join([c.choices[0].delta.content or "" async for c in got])
            if streamed
            else got.choices[0].message.content
        )
        assert text == "fine"
        sent = asked[0]
        assert (sent["model"], sent["return_token_ids"], sent["logprobs"]) == ("policy-model", True, True)
        assert (sent["temperature"], sent["top_p"]) == (1.0, 1.0)
        (call,) = await gateway.calls()
        assert (call.sampled_ids, call.logprobs, call.versions) == ([4, 5], [-0.5, -0.5], [(3, 2)])
        assert call.new_prompt_ids == [1, 2, 3] and call.delivered and call.trainable


async def test_the_engines_own_prompts_are_exact_or_not(tmp_path: Path) -> None:
    replies = [answer([1, 2], [3], "a"), answer([1, 2, 3, 4], [5], "b"), answer([9, 9], [6], "c")]
    async with upstream(lambda _: replies.pop(0), tmp_path) as (gateway, _):
        messages: Any = [{"role": "user", "content": "Go"}]
        for _ in range(3):
            got = await client_of(gateway).chat.completions.create(model="m", messages=messages)
            messages += [got.choices[0].message, {"role": "user", "content": "on"}]
        calls = await gateway.calls()
        assert [c.continuity for c in calls] == ["first", "exact", "rendered(engine)"]
        assert [c.parent for c in calls[1:]] == [c.call_id for c in calls[:2]]


@pytest.mark.parametrize(
    "broken",
    [
        lambda a: a.pop("prompt_token_ids"),
        lambda a: a["choices"][0].update(token_ids=[1]),
        lambda a: a["choices"][0].update(token_ids=["x", "y"]),
        lambda a: a["choices"][0]["logprobs"]["content"][0].update(logprob=None),
    ],
)
async def test_tokens_that_can_not_be_trusted_make_the_rollout_unusable_not_the_harness_fail(
    tmp_path: Path, broken: Callable[[Any], Any]
) -> None:
    said = answer([1, 2, 3], [4, 5])
    broken(said)
    async with upstream(lambda _: said, tmp_path) as (gateway, _):
        got = await client_of(gateway).chat.completions.create(**ASK)
        assert got.choices[0].message.content == "fine"
        (call,) = await gateway.calls()
        assert call.capture_failed and not call.trainable and call.untrainable_reason


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        (web.Response(text="<html>oops</html>", content_type="text/html"), 502),
        (web.Response(text="[1,2,3]", content_type="application/json"), 502),
        (web.Response(text='{"choices":null}', content_type="application/json"), 502),
        (web.Response(text='{"choices":[{"logprobs":NaN}]}', content_type="application/json"), 502),
        (web.json_response({"error": {"message": "no", "type": "bad"}}, status=400), 400),
    ],
    ids=["html", "list", "null", "nan", "400"],
)
async def test_what_is_no_answer_is_a_clear_error(tmp_path: Path, reply: Any, status: int) -> None:
    async with upstream(lambda _: reply, tmp_path) as (gateway, _):
        with pytest.raises(openai.APIStatusError) as caught:
            await client_of(gateway).chat.completions.create(**ASK)
        assert caught.value.status_code == status
        (call,) = await gateway.calls()
        assert call.error is not None and not call.trainable and not call.capture_failed
