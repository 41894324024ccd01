"""The renderer of plain ChatML models such as SmolLM2, whose own template knows no tools.

Invariant: a bridged prompt is the earlier prompt and the sampled ids, unchanged, then only what is new.
Tools stand in the system turn; a call is `<tool_call>{"name": …, "arguments": {…}}</tool_call>` as text; results
come back in a user turn. What stands between the tags and is no call stays part of the text.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from renderers import Message, ParsedResponse, ParsedToolCall, RenderedTokens, ToolSpec

from harnessrl.gateway.chat.tokenizer import Tokenizer

__all__ = ["TOOL_CLOSE", "TOOL_OPEN", "ChatML", "ChatMLConfig", "calls_of_block", "split_blocks"]

TOOL_OPEN, TOOL_CLOSE = "<tool_call>", "</tool_call>"
_BLOCK = re.compile(re.escape(TOOL_OPEN) + "(.*?)" + re.escape(TOOL_CLOSE), re.DOTALL)

_TOOLS = """You can call these tools, given as JSON schemas, one a line:
<tools>
{tools}
</tools>
To call one, write its name and arguments as JSON between tags, one block for each call:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""


@dataclass(frozen=True)
class ChatMLConfig:
    name: str = "chatml"
    system: str | None = None
    """System text of conversations that bring none."""


class ChatML:
    """Satisfies `renderers.Renderer`."""

    is_prefix_stable = True
    effective_thinking_retention = "all"

    def __init__(self, tokenizer: Tokenizer, config: ChatMLConfig | None = None):
        self.config = config or ChatMLConfig()
        self._tokenizer = tokenizer
        self._start = self._id("<|im_start|>")
        self._end = self._id("<|im_end|>")
        text_end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
        self._stops = {self._end, tokenizer.eos_token_id, text_end} - {None}
        self._newline = tokenizer.encode("\n")

    def _id(self, token: str) -> int:
        token_id = self._tokenizer.convert_tokens_to_ids(token)
        if token_id is None or token_id == self._tokenizer.convert_tokens_to_ids("no such token"):
            raise ValueError(f"The chatml renderer needs {token} in the tokenizer {self._tokenizer.name_or_path}.")
        return token_id

    def _turn(self, role: str, text: str) -> list[int]:
        body = self._tokenizer.encode(f"{role}\n{text}", split_special_tokens=True)
        return [self._start, *body, self._end, *self._newline]

    def _assistant(self, message: Message) -> list[int]:
        body = self._tokenizer.encode(_assistant_text(message), split_special_tokens=True)
        return [*self._generation_prompt(), *body, self._end, *self._newline]

    def _generation_prompt(self) -> list[int]:
        return [self._start, *self._tokenizer.encode("assistant\n")]

    def _turns(self, messages: Sequence[Message]) -> Iterator[tuple[int, list[int]]]:
        """(index of the turn's first message, its ids); neighbouring tool results share one user turn."""
        results: list[str] = []
        for index, message in enumerate(messages):
            role = message["role"]
            if role == "tool":
                results.append(f"<tool_response>\n{_text(message.get('content'))}\n</tool_response>")
                if index + 1 == len(messages) or messages[index + 1]["role"] != "tool":
                    yield index + 1 - len(results), self._turn("user", "\n".join(results))
                    results = []
            elif role == "assistant":
                yield index, self._assistant(message)
            else:
                yield index, self._turn("system" if role == "developer" else role, _text(message.get("content")))

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
        add_generation_prompt: bool = False,
    ) -> RenderedTokens:
        if not messages:
            raise ValueError("A conversation needs at least one message.")
        ids: list[int] = []
        indices: list[int] = []
        has_system = messages[0]["role"] in ("system", "developer")
        system = _text(messages[0].get("content")) if has_system else self.config.system or ""
        if tools:
            listed = _TOOLS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
            system = f"{system}\n\n{listed}" if system else listed
        if system or has_system:
            ids += self._turn("system", system)
            indices += [0 if has_system else -1] * len(ids)
        skipped = int(has_system)
        for index, turn in self._turns(messages[skipped:]):
            ids += turn
            indices += [index + skipped] * len(turn)
        if add_generation_prompt:
            prompt = self._generation_prompt()
            ids += prompt
            indices += [-1] * len(prompt)
        return RenderedTokens(ids, indices, message_roles=[m["role"] for m in messages])

    def render_ids(
        self,
        messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        return self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt).token_ids

    def parse_response(
        self,
        token_ids: list[int],
        *,
        tools: list[ToolSpec] | None = None,
        prompt_ids: list[int] | None = None,
    ) -> ParsedResponse:
        """Without `tools` nothing is read as a call."""
        end = next((i for i, token in enumerate(token_ids) if token in self._stops), len(token_ids))
        text = self._tokenizer.decode(token_ids[:end])
        if not tools:
            return ParsedResponse(text)
        pieces: list[str] = []
        calls: list[ParsedToolCall] = []
        for piece, block in split_blocks(text):
            pieces.append(piece)
            calls += block
        return ParsedResponse("".join(pieces), tool_calls=calls)

    def get_stop_token_ids(self) -> list[int]:
        return sorted(self._stops)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
    ) -> RenderedTokens | None:
        """A reply that was cut before its end gets the end appended, as context."""
        if not new_messages or any(m["role"] == "assistant" for m in new_messages):
            return None
        if any(token in self._stops for token in previous_completion_ids[:-1]):
            return None
        closed = bool(previous_completion_ids) and previous_completion_ids[-1] in self._stops
        ids = [*previous_prompt_ids, *previous_completion_ids, *([] if closed else [self._end]), *self._newline]
        indices = [-1] * len(ids)
        for index, turn in self._turns(new_messages):
            ids += turn
            indices += [index] * len(turn)
        prompt = self._generation_prompt()
        return RenderedTokens(
            ids + prompt, indices + [-1] * len(prompt), message_roles=[m["role"] for m in new_messages]
        )


def split_blocks(text: str) -> Iterator[tuple[str, list[ParsedToolCall]]]:
    """The text between well-formed blocks, each piece with the calls of the block that follows it.

    White space beside such a block goes with it; a block that holds no call is part of the text.
    """
    piece, start = "", 0
    for match in _BLOCK.finditer(text):
        piece += text[start : match.start()]
        start = match.end()
        calls = calls_of_block(match[1])
        if calls:
            yield piece.rstrip(), calls
            piece, start = "", start + len(text[start:]) - len(text[start:].lstrip())
        else:
            piece += match[0]
    yield piece + text[start:], []


def calls_of_block(body: str) -> list[ParsedToolCall]:
    """The calls in a block's text, one object or a list of them; empty where any of it is malformed."""
    try:
        value = json.loads(body)
    except ValueError:
        return []
    calls: list[ParsedToolCall] = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str) or not item["name"]:
            return []
        arguments = item.get("arguments", item.get("parameters", {}))
        if not isinstance(arguments, dict):
            return []
        calls.append(ParsedToolCall(raw=body, name=item["name"], arguments=arguments))
    return calls


def _assistant_text(message: Message) -> str:
    parts = [text] if (text := _text(message.get("content"))) else []
    for call in message.get("tool_calls") or []:
        function: Any = call.get("function") or {}
        arguments = function.get("arguments", {})
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        name = json.dumps(function.get("name", ""), ensure_ascii=False)
        parts.append(f'{TOOL_OPEN}\n{{"name": {name}, "arguments": {arguments}}}\n{TOOL_CLOSE}')
    return "\n".join(parts)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content or [] if isinstance(part.get("text"), str))
