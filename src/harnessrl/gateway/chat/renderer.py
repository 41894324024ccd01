"""Which renderer serves a model, by explicit configuration, and what the gateway makes of it: a `Chat`."""

import json
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from renderers import Message, ParsedToolCall, Renderer, ToolCallParseStatus, config_from_name, create_renderer
from renderers.base import RENDERER_REGISTRY, _populate_registry
from renderers.configs import DefaultRendererConfig

from harnessrl.gateway.chat.canonical import ToolCall
from harnessrl.gateway.chat.chatml import TOOL_CLOSE, TOOL_OPEN, ChatML, ChatMLConfig
from harnessrl.gateway.chat.segments import HARMONY, INKLING, SegmentParser
from harnessrl.gateway.chat.stream import Detokenizer, Markers, StreamParser, Whole
from harnessrl.gateway.chat.tokenizer import Tokenizer, load_tokenizer
from harnessrl.schemas import Json

__all__ = ["Chat", "known_renderers", "load_chat", "make_renderer"]

_THINK = ("<think>", "</think>")
_HERMES = Markers(_THINK, ((TOOL_OPEN, TOOL_CLOSE),))
_KIMI = Markers(_THINK, (("<|tool_calls_section_begin|>", "<|tool_call_end|>"),))
_DEEPSEEK = Markers(_THINK, (("<｜tool▁calls▁begin｜>", "<｜tool▁call▁end｜>"),))
_MARKERS = {
    "chatml": Markers(None, ((TOOL_OPEN, TOOL_CLOSE),)),
    "qwen3": _HERMES,
    "qwen3-vl": _HERMES,
    "qwen3.5": _HERMES,
    "qwen3.6": _HERMES,
    "qwen3.8": _HERMES,
    "prime-qwen3": _HERMES,
    "glm-4.5": _HERMES,
    "glm-5": _HERMES,
    "glm-5.1": _HERMES,
    "glm-5.3": _HERMES,
    "nemotron-3": _HERMES,
    "nemotron-3.5": _HERMES,
    "nemotron-3-ultra": _HERMES,
    "llama-3": Markers(bare_call="{"),
    "minimax-m2": Markers(_THINK, (("<minimax:tool_call>", "</minimax:tool_call>"),)),
    "kimi-k2": _KIMI,
    "kimi-k2.5": _KIMI,
    "deepseek-v3": _DEEPSEEK,
    "deepseek-r1": _DEEPSEEK,
    "deepseek-v4": Markers(_THINK, (("<｜DSML｜", "</｜DSML｜invoke>"),)),
    "hy3": Markers(
        ("<think:opensource>", "</think:opensource>"),
        tuple((f"<{name}:opensource>", "</tool_call:opensource>") for name in ("tool_calls", "tool_call")),
    ),
    "laguna-xs.2": _HERMES,
    "laguna-m.1": _HERMES,
    "laguna-xs-2.1": _HERMES,
    "laguna-s-2.1": _HERMES,
    "gemma4": Markers(("<|channel>", "<channel|>"), (("<|tool_call>", "<tool_call|>"),), "thought\n"),
}
_SEGMENTS = {"gpt-oss": HARMONY, "inkling": INKLING}
"""How a family's answers are streamed. What the `default` renderer serves goes out in one piece at the end."""

_LOST_NEWLINE = frozenset({"laguna-xs.2", "laguna-m.1"})
"""Their template puts a line break behind an answer's end; their bridge forgets it where the end was sampled."""


def known_renderers() -> list[str]:
    _populate_registry()
    return sorted({*RENDERER_REGISTRY, "chatml"})


def make_renderer(tokenizer: Tokenizer, config: Json) -> Renderer:
    """The renderer that `config` names, e.g. `{"name": "qwen3", "enable_thinking": false}`.

    Raises `ValueError` for an unknown name or option, and where the tokenizer is not of the renderer's family.
    """
    options = dict(config)
    name = options.pop("name", None)
    if name == "chatml":
        unknown = set(options) - {"system"}
        if unknown:
            raise ValueError(f"The chatml renderer has no option {min(unknown)!r}; it has: system.")
        return ChatML(tokenizer, ChatMLConfig(**options))
    if name not in known_renderers() or (known := config_from_name(name)) is None:
        raise ValueError(f"No renderer {name!r}. Known: {', '.join(known_renderers())}.")
    chosen = type(known).model_validate({**options, "name": name})
    if isinstance(chosen, DefaultRendererConfig):
        return create_renderer(_template_tokenizer(tokenizer.name_or_path), chosen)  # type: ignore[arg-type]
    try:
        return create_renderer(tokenizer, chosen)  # type: ignore[arg-type]
    except (AssertionError, RuntimeError) as error:  # a special token that is not there; gpt-oss: no vocabulary
        remedy = "Name the one that corresponds to the model's own chat template."
        if name == "gpt-oss":
            remedy = "Set TIKTOKEN_ENCODINGS_BASE to a folder with o200k_base.tiktoken."
        raise ValueError(
            f"The renderer {name!r} does not work with the tokenizer {tokenizer.name_or_path}: {error}. {remedy}"
        ) from error


def _template_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer  # heavy: only the default renderer needs its chat templates

    return AutoTokenizer.from_pretrained(name)


_NATIVE_ID = re.compile(r"functions\.[\w.-]{1,64}:\d{1,6}")
_USABLE = frozenset({ToolCallParseStatus.OK, ToolCallParseStatus.INVALID_JSON})
"""With a name and arguments: an XML value that is not of its declared type is passed on as text."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """How a prompt has begun the answer."""

    tail: list[int]
    in_reasoning: bool
    """It has begun the reasoning that the answer goes on with."""


class Chat:
    """One model's way from messages to token ids and back. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, config: Json):
        self.tokenizer = tokenizer
        self.config = config
        self.renderer = make_renderer(tokenizer, config)
        self.stop_ids = self.renderer.get_stop_token_ids()
        self.can_continue = config["name"] != "default"
        self.drops_reasoning = getattr(self.renderer, "effective_thinking_retention", "template") != "all"
        self._markers = _MARKERS.get(config["name"])
        self._segments = _SEGMENTS.get(config["name"])
        self._lock = threading.Lock()
        self._variants: dict[str, Chat] = {}

    def with_options(self, template: Json) -> "Chat":
        """This chat under further template options of one request. Raises `ValueError` for unknown ones."""
        if not template:
            return self
        key = json.dumps(template, sort_keys=True)
        with self._lock:
            if key not in self._variants:
                if len(self._variants) >= 16:
                    self._variants.clear()
                self._variants[key] = Chat(self.tokenizer, {**self.config, **template})
            return self._variants[key]

    def render(self, messages: Sequence[Json], tools: list[Json]) -> np.ndarray:
        """Prompt ids (int32) of a whole conversation, up to where the assistant speaks.

        Raises `ValueError` where the template can't express it.
        """
        try:
            ids = self.renderer.render_ids(_for_template(messages), tools=tools or None, add_generation_prompt=True)  # type: ignore[arg-type]
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"the chat template failed on these messages: {error!r}") from error
        return np.asarray(ids, dtype=np.int32)

    def bridge(
        self, prompt: np.ndarray, sampled: np.ndarray, new: Sequence[Json], tools: list[Json]
    ) -> np.ndarray | None:
        """`prompt` + `sampled` + the rendered `new` messages, or None where the renderer can't continue.

        It is shown the prompt's last turn only, which says all that matters, so that the cost is that of the new.
        """
        before = [*self._tail(prompt), *sampled.tolist()]
        bridged = self.renderer.bridge_to_next_turn(
            before[: len(before) - len(sampled)],
            sampled.tolist(),
            _for_template(new),
            tools=tools or None,  # type: ignore[arg-type]
        )
        if bridged is None or bridged.token_ids[: len(before)] != before:
            return None
        added = np.asarray(bridged.token_ids[len(before) :], dtype=np.int32)
        if self.config["name"] in _LOST_NEWLINE and len(sampled) and int(sampled[-1]) in self.stop_ids:
            added = np.concatenate([np.asarray(self.tokenizer.encode("\n"), dtype=np.int32), added])
        return np.concatenate([prompt, sampled, added])

    def text(self, sampled: Sequence[int]) -> str:
        """All that was said, up to the end of the turn."""
        end = next((i for i, token in enumerate(sampled) if token in self.stop_ids), len(sampled))
        return self.tokenizer.decode(sampled[:end])

    def parse(self, sampled: Sequence[int], prompt: np.ndarray, tools: list[Json], call_id: str) -> Whole:
        """What was said. Blocks that hold no call stay in the content, as the model wrote them."""
        return self._parse(sampled, self._begun(prompt), tools, call_id)

    def _parse(self, sampled: Sequence[int], begun: _Begun, tools: list[Json], call_id: str) -> Whole:
        parsed = self.renderer.parse_response(list(sampled), tools=tools or None, prompt_ids=begun.tail)  # type: ignore[arg-type]
        reasoning = (parsed.reasoning_content or "").strip()
        calls: list[ToolCall] = []
        content = parsed.content
        if parsed.reasoning_complete is False:
            content = content or self._text_before_open(sampled, begun)
        elif not parsed.tool_calls:
            text = self._text_after(reasoning, sampled, begun)
            if self._has_block(text) and not self._has_block(content):
                return Whole(text, reasoning)
        if parsed.tool_calls and not self._segments:
            text = self._text_after(reasoning, sampled, begun)
            if not tools:  # nothing was offered: what looks like a call is text
                return Whole(text, reasoning)
            if content.strip():  # some families strip it where a block follows, and only there
                content = text[: len(text) - len(text.lstrip())] + content.lstrip()
        for attempt in parsed.tool_calls:
            arguments = _arguments(attempt)
            if tools and attempt.status in _USABLE and attempt.name and arguments is not None:
                own = _own_id(attempt, calls) or f"call_{call_id[:24]}{len(calls)}"
                calls.append(ToolCall(own, attempt.name, arguments))
            else:
                raw = self._raw(attempt, sampled)
                content = f"{content}\n{raw}" if content else raw
        return Whole(content, reasoning, calls)

    def _text_after(self, reasoning: str, sampled: Sequence[int], begun: _Begun) -> str:
        """All text but the reasoning."""
        text = self.text(sampled)
        if self._markers and self._markers.reasoning:
            opening, closing = self._markers.reasoning
            if reasoning or begun.in_reasoning or text.lstrip().startswith(opening):
                before = "" if begun.in_reasoning else text.partition(opening)[0]
                _, closed, after = text.partition(closing)
                found = [text.find(opener, len(before)) for opener, _ in self._markers.tools]
                start = min((at for at in found if at >= 0), default=len(before))
                text = before + (after if closed else text[start:])
        return self._leading_space(text, begun) + text.strip()

    def _text_before_open(self, sampled: Sequence[int], begun: _Begun) -> str:
        """What was said before the reasoning that the answer ends in."""
        if self._segments:
            closed = [*sampled, *self.tokenizer.encode(self._segments.ends[0])]
            return self.renderer.parse_response(closed, prompt_ids=begun.tail).content
        if not self._markers or not self._markers.reasoning:
            return ""
        (opening, closing), text = self._markers.reasoning, self.text(sampled)
        begins = begun.in_reasoning or text.lstrip().startswith(opening)
        return (text.partition(closing)[2] if begins else text).partition(opening)[0].strip()

    def _has_block(self, text: str) -> bool:
        return self._markers is not None and any(opener in text for opener, _ in self._markers.tools)

    def _leading_space(self, text: str, begun: _Begun) -> str:
        """What of it the family keeps in front of an answer, as it shows where no block follows."""
        space = text[: len(text) - len(text.lstrip())]
        if not space:
            return ""
        closing = self._markers.reasoning[1] if self._markers and self._markers.reasoning else ""
        said = self.tokenizer.encode(f"{closing if begun.in_reasoning else ''}{space}x")
        return self.renderer.parse_response(said, prompt_ids=begun.tail).content.removesuffix("x")

    def _begun(self, prompt: np.ndarray) -> _Begun:
        tail = self._tail(prompt)
        if not self._segments and not (self._markers and self._markers.reasoning):
            return _Begun(tail, False)
        probe = self.renderer.parse_response(self.tokenizer.encode("x"), prompt_ids=tail)
        return _Begun(tail, bool(probe.reasoning_content))

    def stream(self, sampled: list[int], prompt: np.ndarray, tools: list[Json], call_id: str) -> StreamParser:
        """A parser of the text of `sampled`, a list that grows while it is used."""
        begun = self._begun(prompt)

        def parse() -> Whole:
            return self._parse(sampled, begun, tools, call_id)

        if self._segments:
            return SegmentParser(self._segments, parse, begun.in_reasoning, bool(tools))
        return StreamParser(self._markers, parse, begun.in_reasoning, bool(tools))

    def forced_call(self, choice: str) -> list[int]:
        """Ids with which the assistant must begin so that it calls a tool: `required`, or the tool's name.

        Empty where nothing is forced, or where the family's calls are not known well enough.
        """
        if choice == "auto" or self.config["name"] not in ("chatml", "qwen3"):
            return []
        text = f'{TOOL_OPEN}\n{{"name": "'
        if choice != "required":
            text += f'{json.dumps(choice, ensure_ascii=False)[1:-1]}", "arguments": '
        return self.tokenizer.encode(text)

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self.tokenizer)

    def _tail(self, prompt: np.ndarray) -> list[int]:
        """The end of a prompt, from its last end of turn on: all that says how the answer begins."""
        stops = np.flatnonzero(np.isin(prompt, self.stop_ids))
        return prompt[int(stops[-1]) if len(stops) else 0 :].tolist()

    def _raw(self, attempt: ParsedToolCall, sampled: Sequence[int]) -> str:
        if attempt.token_span is None:
            return attempt.raw
        start, end = attempt.token_span
        return self.tokenizer.decode(sampled[start:end])


def _own_id(call: ParsedToolCall, others: list[ToolCall]) -> str | None:
    """The id that the model gave: Kimi's prompts name results by it."""
    usable = call.id and _NATIVE_ID.fullmatch(call.id) and all(call.id != other.id for other in others)
    return call.id if usable else None


def _arguments(call: ParsedToolCall) -> str | None:
    if isinstance(call.arguments, dict):
        return json.dumps(call.arguments, ensure_ascii=False)
    if isinstance(call.arguments, str):
        try:
            return call.arguments if isinstance(json.loads(call.arguments), dict) else None
        except ValueError:
            return None
    return None


def _for_template(messages: Sequence[Json]) -> list[Message]:
    """Arguments as objects, as the models' own templates take them."""
    out: list[Any] = []
    for message in messages:
        calls = message.get("tool_calls")
        out.append({**message, "tool_calls": [_decoded(call) for call in calls]} if calls else message)
    return out


def _decoded(call: Json) -> Json:
    try:
        arguments = json.loads(call["function"]["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**call["function"], "arguments": arguments}}


@lru_cache(maxsize=16)
def _load(tokenizer: str, config: str) -> Chat:
    return Chat(load_tokenizer(tokenizer), json.loads(config))


def load_chat(tokenizer: str, config: Json | None) -> Chat:
    """The chat of a model, kept for the next call. Raises `ValueError` where tokenizer or renderer are unknown."""
    if config is None:
        raise ValueError(
            "A token endpoint needs a renderer, such as {'name': 'chatml'} or {'name': 'qwen3'}: "
            f"give one of {', '.join(known_renderers())} when you register it."
        )
    return _load(tokenizer, json.dumps(config, sort_keys=True))
