"""From sampled ids to pieces of the answer, as they come.

Invariant: the joined pieces are the parsed whole (`Chat.parse`), however the ids were chunked. Only text that is
surely content or reasoning goes out early; whatever may still become a tag, a call, or stripped white space waits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from harnessrl.gateway.chat.canonical import Delta, ToolCall
from harnessrl.gateway.chat.tokenizer import Tokenizer

__all__ = ["PLAIN", "Detokenizer", "Markers", "StopMatcher", "StreamParser", "Whole"]


class Detokenizer:
    """Ids to text, piece by piece, never splitting a character; linear in the number of ids."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0
        self._read = 0

    def feed(self, ids: Sequence[int]) -> str:
        self._ids += ids
        known = self._tokenizer.decode(self._ids[self._shown : self._read])
        text = self._tokenizer.decode(self._ids[self._shown :])
        if text.endswith("\ufffd") or len(text) <= len(known):
            return ""
        self._shown, self._read = self._read, len(self._ids)
        if self._shown > 512:
            self._ids = self._ids[self._shown :]
            self._read -= self._shown
            self._shown = 0
        return text[len(known) :]


class StopMatcher:
    """Cuts a text at the first stop sequence, holding back what may become one."""

    def __init__(self, stops: Sequence[str]):
        self._stops = [s for s in stops if s]
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that may go out; after a match always empty."""
        if not self._stops or self.matched is not None:
            return text if self.matched is None else ""
        self._held += text
        found = [(at, s) for s in self._stops if (at := self._held.find(s)) >= 0]
        if found:
            at, self.matched = min(found)
            out, self._held = self._held[:at], ""
            return out
        keep = max(_overlap(self._held, s) for s in self._stops)
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out


@dataclass(frozen=True, slots=True)
class Markers:
    """What a family of models writes around reasoning and tool calls, as text.

    Without markers nothing goes out before the end; a family without calls or reasoning has empty ones.
    """

    reasoning: tuple[str, str] | None = None
    tools: tuple[tuple[str, str], ...] = ()
    label: str = ""
    """What stands behind the mark that opens the reasoning; such a mark is the answer's very first token."""
    bare_call: str = ""
    """An answer that begins with this may be a call without marks, which shows at its end only."""


PLAIN = Markers()
"""Text without reasoning or calls."""


@dataclass(slots=True)
class Whole:
    """A parse of all ids so far: what may be delivered of them."""

    content: str
    reasoning: str
    tool_calls: list[ToolCall] = field(default_factory=list)


class StreamParser:
    """A small machine over text: start, reasoning, content, then blocks only.

    `parse` reads all ids so far and is the authority. It is called where a channel's text begins, when a block
    closes and at the end, never per token. What it does not confirm is held to the end.
    """

    def __init__(self, markers: Markers | None, parse: Callable[[], Whole], in_reasoning: bool, tools: bool):
        self._reasoning = markers.reasoning if markers else None
        self._bare_call = markers.bare_call if markers else ""
        self._labelled = bool(markers and markers.label)
        self._opening = self._reasoning[0] + markers.label if markers and self._reasoning else ""
        self._openers = [opener for opener, _ in markers.tools] if markers else []
        self._blocks = markers.tools if markers and tools else ()
        self._parse = parse
        self._state = "held" if markers is None else "reasoning" if in_reasoning else "start"
        self._text = ""
        self._sent = {"content": "", "reasoning": ""}
        self._calls = 0

    def feed(self, text: str) -> Delta:
        delta = Delta()
        self._text += text
        while getattr(self, f"_in_{self._state}")(delta):
            pass
        return delta

    def finish(self, whole: Whole) -> Delta:
        """What is left of `whole`, the parse of all ids."""
        delta = Delta(tool_calls=whole.tool_calls[self._calls :])
        for channel, text in (("content", whole.content), ("reasoning", whole.reasoning)):
            if text.startswith(self._sent[channel]):
                self._send(delta, channel, text[len(self._sent[channel]) :])
        return delta

    @property
    def sent(self) -> tuple[str, str]:
        """(content, reasoning) that went out."""
        return self._sent["content"], self._sent["reasoning"]

    # Each state consumes what it can and says whether another look, in a new state, may get further.

    def _in_held(self, _: Delta) -> bool:
        self._text = ""
        return False

    def _in_start(self, _: Delta) -> bool:
        body = self._text if self._labelled else self._text.lstrip()
        if self._bare_call and (not body or body.startswith(self._bare_call)):
            self._state = "held" if body else "start"
            return False
        opening = self._opening
        if len(body) < len(opening) and opening.startswith(body):
            return False
        if opening and body.startswith(opening):
            self._text, self._state = body[len(opening) :], "reasoning"
        else:
            self._state = "content"
        return True

    def _in_reasoning(self, delta: Delta) -> bool:
        assert self._reasoning is not None
        before, closed, after = self._text.partition(self._reasoning[1])
        before = before.replace(self._reasoning[0], "")  # within reasoning an opener says nothing
        self._text = before + closed + after
        if any(opener in before for opener in self._openers):
            self._state = "held"  # a call inside the reasoning may end it: the whole parse decides
            return True
        if closed:
            self._offer(delta, "reasoning", before)
            if self._state == "reasoning":
                self._text, self._state = after, "content"
            return True
        self._text = self._offer(delta, "reasoning", self._text)
        return False

    def _in_content(self, delta: Delta) -> bool:
        # Families differ in what reasoning within the content is: there the whole parse decides.
        marks = [(opener, "blocks") for opener, _ in self._blocks] + [(m, "held") for m in self._reasoning or ()]
        starts = [(at, state) for mark, state in marks if (at := self._text.find(mark)) >= 0]
        if starts:
            at, state = min(starts)
            self._offer(delta, "content", self._text[:at])
            if self._state == "content":
                self._text, self._state = self._text[at:], state
            return True
        self._text = self._offer(delta, "content", self._text)
        return False

    def _in_blocks(self, delta: Delta) -> bool:
        ends = [at + len(closer) for _, closer in self._blocks if (at := self._text.find(closer)) >= 0]
        if not ends:
            return False
        self._text = self._text[min(ends) :]
        calls = self._parse().tool_calls
        delta.tool_calls += calls[self._calls :]
        self._calls = max(self._calls, len(calls))
        return True

    def _offer(self, delta: Delta, channel: str, text: str) -> str:
        """Send what is surely the channel's; returns the rest: half a marker, white space that may be stripped."""
        markers = [*(self._reasoning or ()), *(self._openers if channel == "reasoning" or self._blocks else [])]
        rest = max((_overlap(text, marker) for marker in markers), default=0)
        body = text[: len(text) - rest].rstrip()
        held = text[len(body) :]
        if not body:
            return held
        if not self._sent[channel]:
            whole = self._parse()
            parsed = whole.content if channel == "content" else whole.reasoning
            body = body.lstrip()
            if not parsed.lstrip().startswith(body):
                self._state = "held"
                return ""
            body = parsed[: len(parsed) - len(parsed.lstrip())] + body
        self._send(delta, channel, body)
        return held

    def _send(self, delta: Delta, channel: str, text: str) -> None:
        self._sent[channel] += text
        if channel == "content":
            delta.content += text
        else:
            delta.reasoning += text


def _overlap(text: str, marker: str) -> int:
    """Length of the longest proper prefix of `marker` that `text` ends with."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
