"""The joined stream is the parsed whole, in any chunking, for each family of renderers."""

import numpy as np
import pytest
from families import FAMILIES, TOKENIZER, chat
from hypothesis import given, settings
from hypothesis import strategies as st

from harnessrl.gateway.chat.canonical import Delta, ToolCall
from harnessrl.gateway.chat.stream import Detokenizer, StopMatcher, Whole

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
PIECES = st.sampled_from(
    [
        *("Hello", " world", "\n", "\n\n", "  ", "é", "日本", "😀", "<", "<tool", "</", "{", "}", "a<b"),
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<minimax:tool_call>", "</minimax:tool_call>"),
        '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": 1.50}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {</tool_call>',
        "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        '<minimax:tool_call><invoke name="f"><parameter name="x">1</parameter></invoke></minimax:tool_call>',
        '{"name": "f", "parameters": {"x": 1}}',
    ]
)
TEXTS = st.lists(PIECES, max_size=10).map("".join)


def streamed(name: str, text: str, sizes: list[int], tools: list, stops: list[str]) -> tuple[Delta, Whole]:
    model = chat_of(name)
    prompt = model.render([{"role": "user", "content": "Go"}], tools)
    ids, sizes = TOKENIZER.encode(text), list(sizes)
    said: list[int] = []
    parser, words, matcher = model.stream(said, prompt, tools, "id"), Detokenizer(TOKENIZER), StopMatcher(stops)
    joined = Delta()
    while ids and matcher.matched is None:
        size = sizes.pop() if sizes else 1
        said += ids[:size]
        add(joined, parser.feed(matcher.feed(words.feed(ids[:size]))))
        ids = ids[size:]
    whole = model.parse(said, prompt, tools, "id")
    if matcher.matched is not None:
        whole.content = whole.content.partition(matcher.matched)[0]
        whole.reasoning = whole.reasoning.partition(matcher.matched)[0]
    add(joined, parser.finish(whole))
    return joined, whole


def add(joined: Delta, delta: Delta) -> None:
    joined.content += delta.content
    joined.reasoning += delta.reasoning
    joined.tool_calls += delta.tool_calls


CHATS: dict = {}


def chat_of(name: str):  # noqa: ANN201
    return CHATS.setdefault(name, chat(name))


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS, sizes=st.lists(st.integers(1, 7), max_size=30), tools=st.booleans())
def test_joined_stream_is_the_parsed_whole(name: str, text: str, sizes: list[int], tools: bool) -> None:
    joined, whole = streamed(name, text, sizes, TOOLS if tools else [], [])
    assert joined.content == whole.content
    assert joined.reasoning == whole.reasoning
    assert joined.tool_calls == whole.tool_calls


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, sizes=st.lists(st.integers(1, 7), max_size=30))
def test_a_stop_sequence_cuts_the_stream_and_the_whole_alike(text: str, sizes: list[int]) -> None:
    joined, whole = streamed("chatml", text, sizes, [], ["o w", "\n\n", "日"])
    assert joined.content == whole.content
    assert not any(stop in joined.content for stop in ("o w", "\n\n", "日"))


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40), sizes=st.lists(st.integers(1, 9), max_size=40))
def test_detokenizing_in_any_chunks_gives_the_whole_text(text: str, sizes: list[int]) -> None:
    ids, words, out = TOKENIZER.encode(text, split_special_tokens=True), Detokenizer(TOKENIZER), []
    expected = TOKENIZER.decode(ids)
    while ids:
        size = sizes.pop() if sizes else 1
        out.append(words.feed(ids[:size]))
        ids = ids[size:]
    assert "".join(out) == expected
    assert not any("\ufffd" in piece for piece in out) or "\ufffd" in text


def test_text_goes_out_before_the_end_and_calls_when_their_block_closes() -> None:
    text = 'Hello world, <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    model, said = chat_of("chatml"), []
    parser, words = model.stream(said, np.zeros(0, dtype=np.int32), TOOLS, "id"), Detokenizer(TOKENIZER)
    seen: list[tuple[str, list[ToolCall]]] = []
    for token in TOKENIZER.encode(text):
        said.append(token)
        delta = parser.feed(words.feed([token]))
        if delta:
            seen.append((delta.content, delta.tool_calls))
    assert "".join(content for content, _ in seen) == "Hello world,"
    assert len(seen) > 4
    assert [call.name for call in seen[-1][1]] == ["f"]


def test_a_malformed_block_is_delivered_as_its_raw_text() -> None:
    blocks = {"minimax-m2": "<minimax:tool_call>oops</minimax:tool_call>", "llama-3": "{oops}"}
    for name in FAMILIES:
        bad = blocks.get(name, "<tool_call>oops</tool_call>")
        thought = "" if name in ("chatml", "llama-3", "qwen3") else "</think>"
        _, whole = streamed(name, f"{thought}See {bad}", [], TOOLS, [])
        assert whole.tool_calls == [] and "oops" in whole.content and "See" in whole.content, name
