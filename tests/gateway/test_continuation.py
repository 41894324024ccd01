"""Which requests go on from which calls: replays as real harnesses rewrite them, and what is a fork instead."""

import copy
import json
from typing import Any

import numpy as np
import pytest
from families import ALL_NAMES, FAMILIES, TINY, TOKENIZER, chat, family_chat
from hypothesis import given, settings
from hypothesis import strategies as st

from harnessrl.gateway.chat.canonical import Answer, ChatRequest, Usage
from harnessrl.gateway.chat.continuation import Memory, Prompt, _named
from harnessrl.gateway.chat.renderer import Chat
from harnessrl.gateway.chat.tokenizer import load_tokenizer
from harnessrl.gateway.dialects.openai_chat import OpenAIChat

TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{ "name": "f", "arguments": {"b": 50.0, "a": "h\\u00e9"}}\n</tool_call>'


class Attempt:
    """Conversations with a model that says what it is told to."""

    def __init__(self, model: Chat, end: str | None = "<|im_end|>"):
        self.chat = model
        self.memory = Memory()
        self.end = [] if end is None else [model.tokenizer.convert_tokens_to_ids(end)]
        self.count = 0

    def ask(self, messages: list[Any], said: str, tools: Any = TOOLS, cut: bool = False, **body: Any) -> Prompt:
        """The request's prompt; the answer is added to `messages` as the official client would."""
        request = parse(messages, tools, **body)
        prompt = self.memory.prompt(self.chat, request)
        ids = self.chat.tokenizer.encode(said) + ([] if cut else self.end)
        self.count += 1
        call_id = f"c{self.count}"
        whole = self.chat.parse(ids, prompt.ids, request.tools, call_id)
        answer = Answer(whole.content, whole.reasoning, whole.tool_calls, "stop", Usage(0, 0))
        parent = prompt.parent if prompt.continuity == "exact" else None
        sampled = np.asarray(ids, dtype=np.int32)
        self.memory.add(call_id, request, prompt.ids, parent, sampled, answer)
        messages.append(answer.message())
        self.context = np.concatenate([prompt.ids, sampled])
        return prompt


def parse(messages: list[Any], tools: Any = TOOLS, **body: Any) -> ChatRequest:
    return OpenAIChat().parse({"messages": messages, "tools": tools, **body})


def started(model: Chat | None = None) -> tuple[Attempt, list[Any]]:
    """Two turns: a tool call with its result, then another."""
    attempt = Attempt(model or chat("chatml"))
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go"}]
    attempt.ask(messages, "I look.\n" + CALL)
    messages.append({"role": "tool", "tool_call_id": messages[-1]["tool_calls"][0]["id"], "content": "42"})
    attempt.ask(messages, CALL + CALL)
    first, second = messages[-1]["tool_calls"]
    messages.append({"role": "tool", "tool_call_id": first["id"], "content": "one"})
    messages.append({"role": "tool", "tool_call_id": second["id"], "content": "two"})
    return attempt, messages


def nulls(messages: list[Any]) -> None:
    for m in messages:
        m |= {"refusal": None, "audio": None, "function_call": None}


def parts(messages: list[Any]) -> None:
    for m in messages:
        m["content"] = [{"type": "text", "text": m["content"], "cache_control": {"type": "ephemeral"}}]


def redumped(messages: list[Any]) -> None:
    for m in messages:
        for call in m.get("tool_calls", ()):
            arguments = json.loads(call["function"]["arguments"])
            arguments = {k: int(v) if isinstance(v, float) else v for k, v in reversed(arguments.items())}
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=True, indent=1)


def renamed_ids(messages: list[Any]) -> None:
    for m in messages:
        for call in m.get("tool_calls", ()):
            call["id"] = "x-" + call["id"]
        if "tool_call_id" in m:
            m["tool_call_id"] = "x-" + m["tool_call_id"]


def swapped_results(messages: list[Any]) -> None:
    messages[-1], messages[-2] = messages[-2], messages[-1]


def stripped(messages: list[Any]) -> None:
    for m in messages:
        m["content"] = m["content"].strip() or None


def emptied(messages: list[Any]) -> None:
    messages.insert(3, {"role": "assistant", "content": ""})
    messages.append({"role": "user", "content": " \n"})


@pytest.mark.parametrize(
    "replay", [nulls, parts, redumped, renamed_ids, swapped_results, stripped, emptied], ids=lambda f: f.__name__
)
def test_a_replay_of_the_same_meaning_continues_exactly(replay: Any) -> None:
    attempt, messages = started()
    context = attempt.context
    replay(messages)
    prompt = attempt.ask(messages, "Done")
    assert (prompt.continuity, prompt.parent) == ("exact", "c2")
    assert np.array_equal(prompt.ids[: len(context)], context)


def edit_answer(messages: list[Any]) -> None:
    messages[2]["content"] = "I rewrote that."


def add_argument(messages: list[Any]) -> None:
    messages[2]["tool_calls"][0]["function"]["arguments"] = '{"a": "hé", "b": 50, "c": 1}'


def insert_user(messages: list[Any]) -> None:
    messages.insert(2, {"role": "user", "content": "By the way"})


def other_answer(messages: list[Any]) -> None:
    messages[-3] = {"role": "assistant", "content": "Not what was said"}
    del messages[-2:]


def compact(messages: list[Any]) -> None:
    del messages[2:]
    messages.append({"role": "user", "content": "Summary of what was done"})


@pytest.mark.parametrize(
    ("change", "continuity"),
    [
        (edit_answer, "rendered(edited)"),
        (add_argument, "rendered(edited)"),
        (insert_user, "rendered(inserted)"),
        (other_answer, "rendered(edited)"),
        (compact, "rendered(compaction)"),
    ],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_another_meaning_is_a_fork_with_its_reason(change: Any, continuity: str) -> None:
    attempt, messages = started()
    change(messages)
    fresh = attempt.chat.render(parse(messages).messages, TOOLS)
    prompt = attempt.ask(messages, "Done")
    assert prompt.continuity == continuity
    assert prompt.ids.tolist() == fresh.tolist()


def test_system_tools_and_template_are_part_of_the_key() -> None:
    attempt, messages = started()
    other = copy.deepcopy(messages)
    other[0]["content"] = "Be long."
    assert attempt.ask(other, "x").continuity == "rendered(system_changed)"
    more = [*TOOLS, {"type": "function", "function": {"name": "g"}}]
    assert attempt.ask(copy.deepcopy(messages), "x", tools=more).continuity == "rendered(tools_changed)"
    options: Any = {"chat_template_kwargs": {"system": "x"}}
    assert attempt.ask(copy.deepcopy(messages), "x", **options).continuity == "rendered(template_changed)"
    assert attempt.ask(messages, "x").continuity == "exact"


def test_few_shot_examples_and_side_calls_are_first_calls() -> None:
    attempt = Attempt(chat("chatml"))
    shots: list[Any] = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2?"},
    ]
    assert attempt.ask(shots, "4", tools=None).continuity == "first"
    title: list[Any] = [{"role": "system", "content": "Title"}, {"role": "user", "content": "2+2?"}]
    assert attempt.ask(title, "Sums", tools=None).continuity == "first"
    shots.append({"role": "user", "content": "3+3?"})
    assert attempt.ask(shots, "6", tools=None).parent == "c1"


def test_interleaved_conversations_each_find_their_own_parent() -> None:
    attempt = Attempt(chat("chatml"))
    talks: list[list[Any]] = [[{"role": "user", "content": f"Task {i}"}] for i in range(3)]
    parents: dict[int, str] = {}
    for turn in range(4):
        for i, talk in enumerate(talks):
            prompt = attempt.ask(talk, f"Answer {turn}", tools=None)
            assert prompt.continuity == ("exact" if turn else "first")
            if turn:
                assert prompt.parent == parents[i]
            parents[i] = f"c{attempt.count}"
            talk.append({"role": "user", "content": "on"})


def test_an_answer_cut_by_length_continues_with_its_close_as_context() -> None:
    attempt = Attempt(chat("chatml"))
    messages: list[Any] = [{"role": "user", "content": "Go"}]
    attempt.ask(messages, "an answer that is", cut=True)
    context = attempt.context
    messages.append({"role": "user", "content": "on"})
    prompt = attempt.ask(messages, "end")
    assert prompt.continuity == "exact"
    assert TOKENIZER.decode(prompt.ids[len(context) :].tolist()).startswith("<|im_end|>\n<|im_start|>user\non")


def test_qwen3_drops_reasoning_at_a_new_question_unless_all_is_kept() -> None:
    for options, expected in (({}, "rendered(reasoning_dropped)"), ({"thinking_retention": "all"}, "exact")):
        attempt = Attempt(chat("qwen3", **options))
        messages: list[Any] = [{"role": "user", "content": "Go"}]
        attempt.ask(messages, "<think>\nHm.\n</think>\n\n" + CALL)
        messages.append({"role": "tool", "tool_call_id": messages[-1]["tool_calls"][0]["id"], "content": "42"})
        assert attempt.ask(messages, "<think>\nWell.\n</think>\n\nIt is 42.").continuity == "exact"
        del messages[-1]["reasoning_content"]
        messages.append({"role": "user", "content": "Sure?"})
        assert attempt.ask(messages, "Yes").continuity == expected


def after_answer(model: Chat, messages: list[Any], tools: Any) -> list[int]:
    """What the family's own rendering puts behind the end of the last answer."""
    variants = [copy.deepcopy(messages) for _ in "AB"]
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    for text, variant in zip("AB", variants, strict=True):
        if calls := variant[last].get("tool_calls"):
            calls[-1]["function"]["arguments"] = json.dumps({"a": text})
        else:
            variant[last]["content"] = text
    renderings = [
        model.render(_named(parse(variant, tools).messages), tools or []).tolist() for variant in variants
    ]
    same = next(n for n, (a, b) in enumerate(zip(*map(reversed, renderings), strict=False)) if a != b)
    behind = renderings[0][len(renderings[0]) - same :]
    return behind[1 + next(i for i, token in enumerate(behind) if token in ends_of(model)) :]


def ends_of(model: Chat) -> set[int]:
    harmony, think = map(model.tokenizer.convert_tokens_to_ids, ("<|end|>", "</think>"))
    return {*model.stop_ids, harmony, think} - {None}


def assert_closed(model: Chat, behind: list[int], cut: bool, expected: list[int]) -> None:
    """`behind` is what is expected; a cut answer is closed before that: reasoning, turn, and message."""
    close, new = behind[: len(behind) - len(expected)], behind[len(behind) - len(expected) :]
    assert new == expected
    assert bool(close) == cut and set(close) <= ends_of(model), model.tokenizer.decode(behind)


NEEDS_END = ("gemma4", "gemma4 thinking", "gpt-oss")
"""A call is closed by the token that ends the turn; without it there is none, or what follows is not its result."""


@pytest.mark.parametrize("name", ALL_NAMES)
def test_a_tool_cycle_is_exact_with_and_without_the_end_of_turn(name: str) -> None:
    family = FAMILIES[name]
    for end in (family.end,) if name in NEEDS_END else (family.end, None):
        attempt = Attempt(family_chat(name), end)
        messages: list[Any] = [{"role": "user", "content": "Go"}]
        context = np.zeros(0, dtype=np.int32)
        for turn in range(4):
            prompt = attempt.ask(messages, family.call)
            if turn:
                assert prompt.continuity == "exact", end
                behind = prompt.ids[len(context) :].tolist()
                assert_closed(attempt.chat, behind, end is None, after_answer(attempt.chat, messages[:-1], TOOLS))
            assert np.array_equal(prompt.ids[: len(context)], context)
            context = attempt.context
            (call,) = messages[-1]["tool_calls"]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"r{turn}"})


def test_a_renderer_of_another_family_is_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"'gemma4' does not work with the tokenizer .*<bos>.* Name the one"):
        Chat(load_tokenizer(str(TINY)), {"name": "gemma4"})


def test_kimi_names_results_by_the_id_that_the_model_gave() -> None:
    attempt = Attempt(family_chat("kimi-k2"))
    messages: list[Any] = [{"role": "user", "content": "Go"}]
    attempt.ask(messages, FAMILIES["kimi-k2"].block)
    messages.append({"role": "tool", "tool_call_id": messages[-1]["tool_calls"][0]["id"], "content": "42"})
    prompt = attempt.ask(messages, "Done")
    assert "f<|im_middle|>## Return of functions.f:0\n42<|im_end|>" in attempt.chat.tokenizer.decode(
        prompt.ids.tolist()
    )


TURN_ENDS = {
    **dict.fromkeys(("glm-4.5", "glm-5", "glm-5.1", "glm-5.3"), "<|user|>"),
    "gemma4": "<turn|>",
    "gpt-oss": "<|return|>",
}
"""Where a turn without a call ends otherwise than one with a call."""
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)


@pytest.mark.parametrize("name", ALL_NAMES)
@settings(max_examples=80, deadline=None)
@given(turns=st.lists(st.tuples(WORDS, WORDS, st.booleans()), min_size=2, max_size=4))
def test_continued_prompts_are_what_the_engine_has_seen(name: str, turns: list[tuple[str, str, bool]]) -> None:
    """For any conversation: each prompt is all that was sampled, then what the family renders behind an answer."""
    family = FAMILIES[name]
    attempt, messages = Attempt(family_chat(name), TURN_ENDS.get(name.split()[0], family.end)), []
    context, closed = np.zeros(0, dtype=np.int32), True
    for asked, said, cut in turns:
        messages.append({"role": "user", "content": asked})
        if not asked.strip():
            return
        prompt = attempt.ask(messages, family.thought + said, tools=None, cut=cut)
        assert np.array_equal(prompt.ids[: len(context)], context)
        if len(context):
            assert prompt.continuity == "exact"
            behind = prompt.ids[len(context) :].tolist()
            assert_closed(attempt.chat, behind, not closed, after_answer(attempt.chat, messages[:-1], None))
        context, closed = attempt.context, not cut


def test_memory_holds_a_conversation_once() -> None:
    attempt = Attempt(chat("chatml"))
    messages: list[Any] = [{"role": "user", "content": "Go"}]
    for _ in range(20):
        attempt.ask(messages, "word " * 50, tools=None)
        messages.append({"role": "user", "content": "on"})
    arrays = {
        id(c.context if c.context.base is None else c.context.base): c for c in attempt.memory._calls.values()
    }
    assert len(arrays) == 1
