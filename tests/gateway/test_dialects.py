"""Each dialect by its official client: whole and streamed answers are equal, replays continue exactly."""

import json
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from families import TOKENIZER as FAMILY_TOKENIZER
from proxy_kit import TINY, TOKENIZER, Proxied, ScriptedEngine, proxied, served

from harnessrl.gateway.chat import renderer
from harnessrl.gateway.settings import Settings

CALL = '<tool_call>\n{ "name": "bash",  "arguments": {"command": "echo h\\u00e9", "timeout": 50.0}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
A_TOOLS: Any = [{"name": "bash", "description": "run", "input_schema": SCHEMA}]
R_TOOLS: Any = [
    {"type": "function", "name": "bash", "parameters": SCHEMA, "strict": False},
    {"type": "web_search"},
    {"type": "custom", "name": "patch", "description": "edit"},
]


def claude(gateway: Proxied, **options: Any) -> anthropic.AsyncAnthropic:
    url = gateway.base(family="anthropic")
    return anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0, **options)


def gpt(gateway: Proxied, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=gateway.base(), api_key="k", max_retries=0, **options)


@pytest.mark.parametrize("streamed", [False, True])
async def test_anthropic_conversation(tmp_path: Path, streamed: bool) -> None:
    replies = ["  I look, 日本. " + CALL + CALL, CALL, "Done"]
    async with ScriptedEngine(TOKENIZER, replies) as engine, proxied(tmp_path, engine.endpoint(TINY)) as gateway:
        client = claude(gateway)
        messages: Any = [{"role": "user", "content": [{"type": "text", "text": "Go"}]}]
        system: Any = [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1;"},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        ]
        for turn in range(3):
            ask: Any = {"model": "any", "max_tokens": 500, "messages": messages, "tools": A_TOOLS, "system": system}
            if streamed:
                async with client.messages.stream(**ask) as stream:
                    answer = await stream.get_final_message()
            else:
                answer = await client.messages.create(**ask)
            assert answer.usage.output_tokens == len(engine.sampled[-1])
            assert answer.usage.input_tokens == len(engine.requests[-1]["token_ids"])
            calls = [b for b in answer.content if b.type == "tool_use"]
            assert answer.stop_reason == ("tool_use" if calls else "end_turn")
            content: Any = [b.model_dump(exclude_none=True) for b in answer.content]
            for block in content:
                if block["type"] == "tool_use":  # as Claude Code: keys in the schema's order, 50.0 as 50
                    block["input"] = {"timeout": 50, "command": block["input"]["command"]}
            messages.append({"role": "assistant", "content": content})
            results: Any = [{"type": "tool_result", "tool_use_id": c.id, "content": "hé"} for c in calls]
            if results:
                results[-1]["cache_control"] = {"type": "ephemeral"}
                messages.append({"role": "user", "content": results})
            system[0]["text"] += str(turn)
        first, second, third = await gateway.calls()
        assert [c.continuity for c in (first, second, third)] == ["first", "exact", "exact"]
        assert all(c.delivered and c.dialect == "anthropic_messages" for c in (first, second, third))
        assert messages[1]["content"][0] == {"type": "text", "text": "  I look, 日本."}
        assert len(messages[1]["content"]) == 3
        assert (await client.messages.count_tokens(model="m", messages=messages[:1])).input_tokens > 5


@pytest.mark.parametrize("streamed", [False, True])
async def test_responses_conversation(tmp_path: Path, streamed: bool) -> None:
    patch = '<tool_call>{"name": "patch", "arguments": {"input": "*** Begin"}}</tool_call>'
    replies = ["I look, 日本. " + CALL + CALL, patch, "Done"]
    async with ScriptedEngine(TOKENIZER, replies) as engine, proxied(tmp_path, engine.endpoint(TINY)) as gateway:
        client = gpt(gateway)
        items: Any = [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
            {"role": "user", "content": "Go"},
        ]
        for _ in range(3):
            ask: Any = {"model": "any", "input": items, "tools": R_TOOLS, "store": False}
            if streamed:
                kinds: list[str] = []
                numbers: list[int] = []
                async with client.responses.stream(**ask) as stream:
                    async for event in stream:
                        kinds.append(event.type)
                        numbers.append(event.sequence_number)
                    answer = await stream.get_final_response()
                assert kinds[:2] == ["response.created", "response.in_progress"]
                assert kinds[-1] == "response.completed" and numbers == list(range(len(numbers)))
            else:
                answer = await client.responses.create(**ask)
            assert answer.usage is not None and answer.usage.output_tokens == len(engine.sampled[-1])
            for item in answer.output:
                items.append(item.model_dump(exclude_none=True))
            for item in answer.output:
                if item.type == "function_call":
                    items.append({"type": "function_call_output", "call_id": item.call_id, "output": "hé"})
                elif item.type == "custom_tool_call":
                    assert item.input == "*** Begin"
                    items.append({"type": "custom_tool_call_output", "call_id": item.call_id, "output": "ok"})
        assert items[-1]["content"][0]["text"] == "Done"
        calls = await gateway.calls()
        assert [c.continuity for c in calls] == ["first", "exact", "exact"]
        assert all(c.delivered for c in calls)


@pytest.mark.parametrize("streamed", [False, True])
async def test_completions_go_on_from_their_text(tmp_path: Path, streamed: bool) -> None:
    async with (
        ScriptedEngine(TOKENIZER, ["one two", "three"], end=None) as engine,
        proxied(tmp_path, engine.endpoint(TINY)) as gateway,
    ):
        prompt = "Count: "
        for _ in range(2):
            answer: Any = await gpt(gateway).completions.create(model="m", prompt=prompt, stream=streamed)
            text = "".join([c.choices[0].text async for c in answer]) if streamed else answer.choices[0].text
            prompt += text + " and "
        assert prompt == "Count: one two and three and "
        assert [c.continuity for c in await gateway.calls()] == ["first", "exact"]


async def test_reasoning_goes_out_and_comes_back_in_each_dialect(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(renderer, "load_tokenizer", lambda _: FAMILY_TOKENIZER)
    renderer._load.cache_clear()
    reply = "<think>\nHm, 日本.\n</think>\n\n" + CALL
    async with (
        ScriptedEngine(FAMILY_TOKENIZER, lambda _: reply) as engine,
        proxied(tmp_path, engine.endpoint("qwen", renderer={"name": "qwen3"})) as gateway,
    ):
        ask: Any = [{"role": "user", "content": "Go"}]
        async with claude(gateway).messages.stream(
            model="m", max_tokens=500, messages=ask, tools=A_TOOLS
        ) as stream:
            thought, call = (await stream.get_final_message()).content
        assert thought.type == "thinking" and thought.thinking == "Hm, 日本." and thought.signature
        assert call.type == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "ok"}
        replay: Any = [
            *ask,
            {"role": "assistant", "content": [thought.model_dump(), call.model_dump()]},
            {"role": "user", "content": [result]},
        ]
        await claude(gateway).messages.create(model="m", max_tokens=500, messages=replay, tools=A_TOOLS)
        answer = await gpt(gateway).responses.create(model="m", input="Go", tools=R_TOOLS)
        assert [item.type for item in answer.output] == ["reasoning", "function_call"]
        items: Any = [{"role": "user", "content": "Go"}, *(i.model_dump(exclude_none=True) for i in answer.output)]
        items.append({"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "ok"})
        await gpt(gateway).responses.create(model="m", input=items, tools=R_TOOLS)
        whole = await gpt(gateway).chat.completions.create(model="m", messages=ask)
        assert whole.choices[0].message.reasoning_content == "Hm, 日本."  # type: ignore[attr-defined]
        calls = await gateway.calls()
        assert [c.continuity for c in calls] == ["first", "exact", "first", "exact", "first"]
    renderer._load.cache_clear()


async def test_other_paths_are_answered_in_the_dialects_shape(tmp_path: Path) -> None:
    async with ScriptedEngine(TOKENIZER, []) as engine, proxied(tmp_path, engine.endpoint(TINY)) as gateway:
        assert [m.id async for m in gpt(gateway).models.list()] == ["policy", "policy-model"]
        assert (await gpt(gateway).models.retrieve("policy")).id == "policy"
        assert [m.id async for m in claude(gateway).models.list()] == ["policy", "policy-model"]
        with pytest.raises(openai.NotFoundError) as caught:
            await gpt(gateway).embeddings.create(model="m", input="x")
        assert "No such path" in str(caught.value)
        with pytest.raises(anthropic.NotFoundError):
            await claude(gateway).messages.batches.list()
        async with aiohttp.ClientSession() as session:
            for url in (gateway.base(), gateway.base(family="anthropic")):
                async with session.head(url) as response:
                    assert response.status == 200
            async with session.get(
                gateway.base() + "/responses", headers={"upgrade": "websocket", "connection": "upgrade"}
            ) as response:
                assert response.status == 426


async def test_errors_are_what_each_client_expects(tmp_path: Path) -> None:
    async with (
        ScriptedEngine(TOKENIZER, [], max_model_len=30) as engine,
        proxied(tmp_path, engine.endpoint(TINY)) as gateway,
    ):
        long: Any = [{"role": "user", "content": "word " * 50}]
        with pytest.raises(anthropic.BadRequestError) as said:
            await claude(gateway).messages.create(model="m", max_tokens=5, messages=long)
        assert "prompt is too long" in str(said.value)
        with pytest.raises(openai.BadRequestError) as caught:
            await gpt(gateway).responses.create(model="m", input=long)
        assert caught.value.code == "context_length_exceeded"
        image: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        with pytest.raises(openai.BadRequestError, match="reads text only"):
            await gpt(gateway).chat.completions.create(model="m", messages=image)
        engine.fail = lambda _: "die"
        engine._reply = lambda _: "one two three"
        engine.max_model_len = 8192
        gateway.gateway.proxy._engines.forget()
        with pytest.raises(anthropic.InternalServerError):
            await claude(gateway).messages.create(model="m", max_tokens=50, messages=long)
        with pytest.raises(anthropic.APIStatusError):
            async with claude(gateway).messages.stream(model="m", max_tokens=50, messages=long) as stream:
                await stream.get_final_message()


async def test_forced_tools_are_a_prefix_of_context(tmp_path: Path) -> None:
    async with (
        ScriptedEngine(TOKENIZER, ['{"command": "ls"}}\n</tool_call>'] * 2) as engine,
        proxied(tmp_path, engine.endpoint(TINY)) as gateway,
    ):
        for streamed in (False, True):
            ask: Any = {"model": "m", "max_tokens": 500, "messages": [{"role": "user", "content": "Go"}]}
            ask |= {"tools": A_TOOLS, "tool_choice": {"type": "tool", "name": "bash"}}
            if streamed:
                async with claude(gateway).messages.stream(**ask) as stream:
                    answer = await stream.get_final_message()
            else:
                answer = await claude(gateway).messages.create(**ask)
            (call,) = answer.content
            assert call.type == "tool_use" and call.input == {"command": "ls"}
        prompt = engine.requests[0]["token_ids"]
        assert TOKENIZER.decode(prompt).endswith('assistant\n<tool_call>\n{"name": "bash", "arguments": ')
        assert [c.sampled_ids for c in await gateway.calls()] == engine.sampled


async def test_prefill_continues_the_text(tmp_path: Path) -> None:
    async with (
        ScriptedEngine(TOKENIZER, [" world", "ok"]) as engine,
        proxied(tmp_path, engine.endpoint(TINY)) as gateway,
    ):
        messages: Any = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "Hello"}]
        answer = await claude(gateway).messages.create(model="m", max_tokens=50, messages=messages)
        assert answer.content[0].text == " world"  # type: ignore[union-attr]
        messages = [messages[0], {"role": "assistant", "content": "Hello world"}, {"role": "user", "content": "on"}]
        await claude(gateway).messages.create(model="m", max_tokens=50, messages=messages)
        assert [c.continuity for c in await gateway.calls()] == ["rendered(prefill)", "exact"]


async def test_sampling_is_known_and_what_was_overridden_is_said(tmp_path: Path) -> None:
    async with (
        ScriptedEngine(TOKENIZER, lambda _: "x") as engine,
        proxied(tmp_path, engine.endpoint(TINY), engine.endpoint(TINY, model="judge", trainable=False)) as gateway,
    ):
        asked: Any = {"messages": [{"role": "user", "content": "Go"}], "temperature": 0.2, "top_p": 0.5, "seed": 3}
        asked |= {"presence_penalty": 1, "logit_bias": {"5": 1}, "max_tokens": 99999}
        seen: dict[str, str] = {}
        async with aiohttp.ClientSession() as session:
            for name, mode, model in (("train", "train", "x"), ("val", "val", "x"), ("judge", "train", "judge")):
                url = gateway.base(mode) + "/chat/completions"
                async with session.post(url, json={**asked, "model": model}) as response:
                    seen[name] = response.headers["x-harnessrl-overridden"]
        train, val, judge = (r["sampling_params"] for r in engine.requests)
        assert (train["temperature"], train["top_p"], train["presence_penalty"]) == (1.0, 1.0, 0.0)
        assert "seed" not in train and train["logprobs"] == 1 and train["repetition_penalty"] == 1.0
        for free in (val, judge):
            assert (free["temperature"], free["top_p"], free["seed"]) == (0.2, 0.5, 3)
        assert seen["train"].startswith(
            "logit_bias ignored, temperature=1, top_p=1, presence_penalty=0, seed ignored"
        )
        assert seen["val"].startswith("logit_bias ignored, max_tokens=")
        calls = await gateway.calls()
        assert [c.trainable for c in calls] == [True, True, False]
        events = await gateway.gateway.store.events(gateway.rollout_id, "0", "model_request")
        assert "top_p=1" in json.dumps(events[0].data["request"]["harnessrl"]["notes"])


async def test_agents_are_known_by_name(tmp_path: Path) -> None:
    async with (
        ScriptedEngine(TOKENIZER, lambda _: "x") as engine,
        proxied(tmp_path, engine.endpoint(TINY), agent=("planner=You plan",)) as gateway,
    ):
        ask: Any = {"messages": [{"role": "user", "content": "Go"}]}
        await gpt(gateway).chat.completions.create(model="policy/writer", **ask)
        await gpt(gateway, default_headers={"x-agent-name": "checker"}).chat.completions.create(model="m", **ask)
        await gpt(gateway).chat.completions.create(model="m", **ask)
        plan: Any = [{"role": "system", "content": "You plan."}, *ask["messages"]]
        await gpt(gateway).chat.completions.create(model="m", messages=plan)
        assert [c.agent for c in await gateway.calls()] == ["writer", "checker", None, "planner"]


async def test_serve_speaks_the_same_without_rollouts() -> None:
    from harnessrl.gateway.served import ServeApp

    async with ScriptedEngine(TOKENIZER, ["one", "two", "three"]) as engine:
        app = ServeApp(engine.endpoint(TINY), Settings(store=Path()))
        async with served(app) as url:
            client = openai.AsyncOpenAI(base_url=f"{url}/openai/v1", api_key="k")
            messages: Any = [{"role": "user", "content": "Go"}]
            for expected in ("first", "exact"):
                raw = await client.chat.completions.with_raw_response.create(model="m", messages=messages)
                assert raw.headers["x-harnessrl-continuity"] == expected
                messages += [raw.parse().choices[0].message, {"role": "user", "content": "on"}]
            other = anthropic.AsyncAnthropic(base_url=f"{url}/anthropic", api_key="k")
            await other.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "Hi"}])
            assert [m.id async for m in client.models.list()] == ["policy", "policy-model"]
