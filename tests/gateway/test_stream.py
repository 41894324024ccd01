"""The joined stream is the parsed whole, in any chunking, for each family of renderers."""

import numpy as np
import pytest
from families import ALL_NAMES, FAMILIES, TOKENIZER, family_chat
from hypothesis import given, settings
from hypothesis import strategies as st

from harnessrl.gateway.chat.canonical import Delta, ToolCall
from harnessrl.gateway.chat.renderer import known_renderers
from harnessrl.gateway.chat.stream import Detokenizer, StopMatcher, Whole

HEADERS = "<｜hy_Assistant:opensource｜>"  # read over at the beginning, but not before a block
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
PIECES = (
    *("Hello", " world", "\n", "\n\n", "  ", "é", "日本", "😀", "<", "<tool", "</", "{", "}", "a<b"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<minimax:tool_call>", "</minimax:tool_call>"),
    '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"x": 1.50}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {</tool_call>',
    "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    '<minimax:tool_call><invoke name="f"><parameter name="x">1</parameter></invoke></minimax:tool_call>',
    '{"name": "f", "parameters": {"x": 1}}',
)


def texts(name: str) -> st.SearchStrategy[str]:
    family = FAMILIES[name]
    stops = family_chat(name).tokenizer.decode(family_chat(name).stop_ids)  # with them nothing goes on
    own = [
        family.thought,
        family.block,
        family.block[:-9],
        family.answer,
        *(m for m in family.markers if m not in stops + HEADERS),
    ]
    return st.lists(st.sampled_from(PIECES) | st.sampled_from(own), max_size=10).map("".join)


def streamed(name: str, text: str, sizes: list[int], tools: list, stops: list[str]) -> tuple[Delta, Whole]:
    model = family_chat(name)
    tokenizer = model.tokenizer
    prompt = model.render([{"role": "user", "content": "Go"}], tools)
    ids, sizes = tokenizer.encode(text), list(sizes)
    said: list[int] = []
    parser, words, matcher = model.stream(said, prompt, tools, "id"), Detokenizer(tokenizer), StopMatcher(stops)
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


def test_every_renderer_is_tested() -> None:
    assert {name.split()[0] for name in FAMILIES} == set(known_renderers()) - {"default"}


@pytest.mark.parametrize("name", ALL_NAMES)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(1, 7), max_size=30), tools=st.booleans())
def test_joined_stream_is_the_parsed_whole(name: str, data: st.DataObject, sizes: list[int], tools: bool) -> None:
    joined, whole = streamed(name, data.draw(texts(name)), sizes, TOOLS if tools else [], [])
    assert joined.content == whole.content
    assert joined.reasoning == whole.reasoning
    assert joined.tool_calls == whole.tool_calls


@settings(max_examples=150, deadline=None)
@given(text=texts("chatml"), sizes=st.lists(st.integers(1, 7), max_size=30))
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
    model, said = family_chat("chatml"), []
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


@pytest.mark.parametrize("name", ALL_NAMES)
def test_each_family_streams(name: str) -> None:
    model, family = family_chat(name), FAMILIES[name]
    said: list[int] = []
    prompt = model.render([{"role": "user", "content": "Go"}], TOOLS)
    parser, words = model.stream(said, prompt, TOOLS, "id"), model.detokenizer()
    text = "One, two, three, four, five, six, seven"
    pieces = []
    for token in model.tokenizer.encode(family.thought + family.answer + text):
        said.append(token)
        if delta := parser.feed(words.feed([token])):
            pieces.append(delta)
    assert "".join(delta.content for delta in pieces).endswith(text)
    assert len(pieces) > 6
    assert "Hm." not in family.thought or "".join(delta.reasoning for delta in pieces) == "Hm."


@pytest.mark.parametrize("name", ALL_NAMES)
def test_a_malformed_block_is_delivered_as_its_raw_text(name: str) -> None:
    family = FAMILIES[name]
    begun = family.block[:-2] if name == "gpt-oss" else family.block[: family.block.index("f") + 1]
    for bad in ("<tool_call>{oops}", begun + " oops}"):
        _, whole = streamed(name, f"{family.thought}{family.answer}See {bad}", [], TOOLS, [])
        assert whole.tool_calls == [] and "See" in whole.content and "oops" in whole.content
