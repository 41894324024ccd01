"""The official `openai` client against the gateway and a scripted engine."""

from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from proxy_kit import TINY, TOKENIZER, ScriptedEngine, contexts, proxied

from harnessrl.client import full_prompts

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
]
CALL = '<tool_call>\n{ "name": "bash",  "arguments": {"command": "echo h\\u00e9"}}\n</tool_call>'


async def test_a_conversation_with_tools_is_captured_exactly(tmp_path: Path) -> None:
    replies = ["I look. " + CALL, CALL + "\n" + CALL, "Done: 42 "]
    async with ScriptedEngine(TOKENIZER, replies) as engine, proxied(tmp_path, engine.endpoint(TINY)) as gateway:
        client = openai.AsyncOpenAI(base_url=gateway.base(), api_key="k")
        messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go"}]
        for _ in range(3):
            answer = await client.chat.completions.create(
                model="any", messages=messages, tools=TOOLS, temperature=0.1
            )
            message = answer.choices[0].message
            messages.append(message)
            for call in message.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "hé"})
        calls = await gateway.calls()
        assert [c.continuity for c in calls] == ["first", "exact", "exact"]
        assert all(c.delivered and c.trainable and c.temperature == 1.0 for c in calls)
        assert [c.sampled_ids for c in calls] == engine.sampled
        prompts, whole = full_prompts(calls), contexts(calls)
        for call, request in zip(calls, engine.requests, strict=True):
            assert prompts[call.call_id].tolist() == request["token_ids"]
            assert len(call.logprobs or ()) == len(call.sampled_ids)
        for parent, child in zip(calls, calls[1:], strict=False):
            assert child.parent == parent.call_id
            begins = prompts[child.call_id][: len(whole[parent.call_id])]
            assert np.array_equal(begins, whole[parent.call_id])
        assert messages[-1].content == "Done: 42 "
        assert engine.requests[0]["sampling_params"]["temperature"] == 1.0


async def test_streamed_and_whole_answers_are_equal(tmp_path: Path) -> None:
    reply = "Höflich, 日本語. " + CALL + CALL
    async with (
        ScriptedEngine(TOKENIZER, lambda _: reply) as engine,
        proxied(tmp_path, engine.endpoint(TINY)) as gateway,
    ):
        client = openai.AsyncOpenAI(base_url=gateway.base(), api_key="k")
        ask: Any = {"model": "any", "messages": [{"role": "user", "content": "Go"}], "tools": TOOLS}
        whole = (await client.chat.completions.create(**ask)).choices[0]
        async with client.chat.completions.stream(**ask, stream_options={"include_usage": True}) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        streamed = final.choices[0]
        assert streamed.message.content == whole.message.content == "Höflich, 日本語."
        assert [c.function.arguments for c in streamed.message.tool_calls or ()] == [
            c.function.arguments
            for c in whole.message.tool_calls or ()  # type: ignore[union-attr]
        ]
        assert len(streamed.message.tool_calls or ()) == 2
        assert streamed.finish_reason == whole.finish_reason == "tool_calls"
        assert final.usage is not None and final.usage.completion_tokens == len(engine.sampled[0])
        assert all(c.delivered for c in await gateway.calls())


@pytest.mark.parametrize("words", [50, 500_000], ids=["rendered", "only counted"])
async def test_too_long_a_prompt_is_the_context_overflow_that_harnesses_know(tmp_path: Path, words: int) -> None:
    async with (
        ScriptedEngine(TOKENIZER, ["x"], max_model_len=20) as engine,
        proxied(tmp_path, engine.endpoint(TINY)) as gateway,
    ):
        client = openai.AsyncOpenAI(base_url=gateway.base(), api_key="k")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "word " * words}])
        assert caught.value.code == "context_length_exceeded"
        (call,) = await gateway.calls()
        assert (call.sampled_ids, call.trainable, call.untrainable_reason) == ([], False, "context_length_exceeded")


async def test_max_tokens_and_stop_sequences_cut_and_the_conversation_goes_on(tmp_path: Path) -> None:
    async with (
        ScriptedEngine(TOKENIZER, ["one two three four", "alpha STOP beta", "end"]) as engine,
        proxied(tmp_path, engine.endpoint(TINY)) as gateway,
    ):
        client = openai.AsyncOpenAI(base_url=gateway.base(), api_key="k")
        messages: Any = [{"role": "user", "content": "Go"}]
        limited: Any = ({"max_tokens": 5}, {"stop": "STOP"}, {})
        for limits in limited:
            answer = await client.chat.completions.create(model="any", messages=messages, **limits)
            messages += [answer.choices[0].message, {"role": "user", "content": "on"}]
        calls = await gateway.calls()
        assert [c.finish_reason for c in calls] == ["length", "stop", "stop"]
        assert messages[3].content == "alpha "
        assert [c.continuity for c in calls] == ["first", "exact", "exact"]
        whole, prompts = contexts(calls), full_prompts(calls)
        end = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
        for parent, child in zip(calls, calls[1:], strict=False):
            cut = len(whole[parent.call_id])
            assert prompts[child.call_id][cut] == end
