"""Answers that are made of messages, each with a header that says its channel: gpt-oss and Inkling.

The invariant is that of `stream`: joined, the pieces are the parsed whole.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from harnessrl.gateway.chat.canonical import Delta
from harnessrl.gateway.chat.stream import Markers, StreamParser, Whole

__all__ = ["HARMONY", "INKLING", "SegmentParser", "Segments"]


@dataclass(frozen=True, slots=True)
class Segments:
    """How a family frames the messages of an answer, as text."""

    header: Callable[[str], tuple[str, int] | None]
    """The state of the first message of a text (reasoning, content, blocks, skipped) and where its body begins;
    None where more text must decide."""
    ends: tuple[str, ...]
    """What may stand behind a message; the first of them closes one."""
    breaks: tuple[str, ...] = ()
    """What also ends reasoning."""


class SegmentParser(StreamParser):
    """The machine of `StreamParser` over messages: between two, in one of some channel, between two again."""

    def __init__(self, segments: Segments, parse: Callable[[], Whole], in_reasoning: bool, tools: bool):
        marks = (*segments.ends, *segments.breaks)
        super().__init__(Markers(None, tuple((mark, "") for mark in marks)), parse, in_reasoning, tools=True)
        self._segments = segments
        self._state = "reasoning" if in_reasoning else "between"
        self._rest = {"reasoning": "", "content": ""}
        self._offered = tools

    def _in_between(self, _: Delta) -> bool:
        found = self._segments.header(self._text)
        if found is None:
            return False
        self._state, start = found
        self._text = self._rest.pop(self._state, "") + self._text[start:]
        return True

    def _in_reasoning(self, delta: Delta) -> bool:
        return self._in_body(delta, "reasoning")

    def _in_content(self, delta: Delta) -> bool:
        return self._in_body(delta, "content")

    def _in_body(self, delta: Delta, channel: str) -> bool:
        end = self._end(self._segments.breaks if channel == "reasoning" else ())
        rest = self._offer(delta, channel, self._text[:end])
        if self._state == "held":
            return True
        if end is None:
            self._text = rest
            return False
        self._rest[channel] = rest
        self._text, self._state = self._text[end:], "between"
        return True

    def _in_blocks(self, delta: Delta) -> bool:
        if self._end() is not None and self._offered:
            calls = self._parse().tool_calls
            delta.tool_calls += calls[self._calls :]
            self._calls = max(self._calls, len(calls))
        return self._in_skipped(delta)

    def _in_skipped(self, _: Delta) -> bool:
        end = self._end()
        if end is None:
            return False
        self._text, self._state = self._text[end:], "between"
        return True

    def _end(self, breaks: tuple[str, ...] = ()) -> int | None:
        """Where the message that the text is in ends."""
        marks = (*self._segments.ends, *breaks)
        return min((at for mark in marks if (at := self._text.find(mark)) >= 0), default=None)


_CHANNELS = {"analysis": "reasoning", "final": "content", "commentary": "content"}


def _harmony(text: str) -> tuple[str, int] | None:
    _, started, rest = text.partition("<|start|>")
    header, closed, body = rest.partition("<|message|>")
    if not started or not closed:
        return None
    recipient = re.search(r"to=([^\s<]+)", header)
    channel = next(iter(header.partition("<|channel|>")[2].split()), "")
    called = recipient is not None and recipient[1].startswith("functions.")
    return "blocks" if called else _CHANNELS.get(channel, "skipped"), len(text) - len(body)


_END, _INVOKE = "<|end_message|>", "<|content_invoke_tool_json|>"
_KINDS = {"<|content_thinking|>": "reasoning", "<|content_text|>": "content", _INVOKE: "blocks"}


def _inkling(text: str) -> tuple[str, int] | None:
    body = text.removeprefix(_END).removeprefix("<|message_model|>")
    if any(mark.startswith(body) for mark in (_END, "<|message_model|>", *_KINDS)):
        return None
    start = len(text) - len(body)
    for mark, state in _KINDS.items():
        if body.startswith(mark):
            return state, start + len(mark)
    name, closed, _ = body.partition(_END)
    if "<|content_invoke_tool_" in name:
        return "blocks", start + len(name)
    return ("content", start) if closed else None


HARMONY = Segments(_harmony, ("<|end|>", "<|call|>", "<|start|>"))
INKLING = Segments(_inkling, (_END,), (_INVOKE,))
