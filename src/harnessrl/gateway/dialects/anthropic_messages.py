"""Anthropic Messages."""

import json
from collections.abc import Iterator
from typing import Any

from harnessrl.gateway.chat.canonical import Answer, ChatRequest, ContextOverflow, Delta, RequestError, ToolCall
from harnessrl.gateway.dialects.fields import (
    boolean,
    checked_function,
    event,
    list_of,
    optional,
    sampling,
    text_of,
)
from harnessrl.schemas import Json

__all__ = ["AnthropicMessages"]

_BILLING = "x-anthropic-billing-header:"
"""Claude Code's first system block; it says who pays, differs between sub-agents, and is not for the model."""


class AnthropicMessages:
    name = "anthropic_messages"
    chat_path = None

    def parse(self, body: Json) -> ChatRequest:
        messages = _system(body.get("system"))
        for index, message in enumerate(list_of(body, "messages", dict)):
            messages += _messages(message, f"messages.{index}")
        if not any(m["role"] != "system" for m in messages):
            raise RequestError("messages: at least one message is required", param="messages")
        notes: list[str] = []
        last = messages[-1]
        return ChatRequest(
            model=optional(body, "model", str) or "",
            messages=messages,
            tools=_tools(body, notes),
            sampling=sampling(body, (), stop="stop_sequences"),
            tool_choice=_tool_choice(optional(body, "tool_choice", dict)),
            stream=boolean(body, "stream"),
            prefill=last["role"] == "assistant" and not last.get("tool_calls"),
            notes=notes,
        )

    def whole(self, request: ChatRequest, answers: list[Answer], call_id: str, model: str) -> Json:
        answer = answers[0]
        content: list[Json] = []
        if answer.reasoning:
            content.append({"type": "thinking", "thinking": answer.reasoning, "signature": _signature(call_id)})
        if answer.content or not (answer.reasoning or answer.tool_calls):
            content.append({"type": "text", "text": answer.content})
        content += [_tool_use(call, json.loads(call.arguments)) for call in answer.tool_calls]
        return {
            **_message(call_id, model),
            "content": content,
            "stop_reason": _stop_reason(answer),
            "stop_sequence": answer.stop_sequence,
            "usage": _usage(answer.usage.prompt_tokens, answer.usage.completion_tokens),
        }

    def stream(self, request: ChatRequest, call_id: str, model: str, prompt_tokens: int) -> "MessageStream":
        return MessageStream(call_id, model, prompt_tokens)

    def error(self, error: RequestError) -> Json:
        message = str(error)
        if isinstance(error, ContextOverflow):
            message = f"prompt is too long: {error.prompt_tokens} tokens > {error.limit} maximum"
        kind = _KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}

    def error_event(self, error: RequestError) -> bytes:
        return event(self.error(error), "error")

    def models(self, names: list[str]) -> Json:
        data = [
            {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
            for name in names
        ]
        return {"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MessageStream:
    def __init__(self, call_id: str, model: str, prompt_tokens: int):
        self._call_id = call_id
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._index = -1
        self._open = ""
        """Kind of the block that is open."""

    def start(self) -> bytes:
        message = {
            **_message(self._call_id, self._model),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(self._prompt_tokens, 0),
        }
        return _event("message_start", message=message)

    def delta(self, delta: Delta, index: int = 0) -> bytes:
        out = b""
        if delta.reasoning:
            out += self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            out += self._block_delta({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.content:
            out += self._begin("text", {"type": "text", "text": ""})
            out += self._block_delta({"type": "text_delta", "text": delta.content})
        for call in delta.tool_calls:
            out += self._close() + self._begin("tool_use", _tool_use(call, {}))
            out += self._block_delta({"type": "input_json_delta", "partial_json": call.arguments}) + self._close()
        return out

    def end(self, answers: list[Answer]) -> Iterator[bytes]:
        answer = answers[0]
        yield self._close()
        yield _event(
            "message_delta",
            delta={"stop_reason": _stop_reason(answer), "stop_sequence": answer.stop_sequence},
            usage=_usage(answer.usage.prompt_tokens, answer.usage.completion_tokens),
        )
        yield _event("message_stop")

    def _begin(self, kind: str, block: Json) -> bytes:
        if self._open == kind:
            return b""
        closed = self._close()
        self._open = kind
        self._index += 1
        return closed + _event("content_block_start", index=self._index, content_block=block)

    def _block_delta(self, delta: Json) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        signed = b""
        if self._open == "thinking":
            signed = self._block_delta({"type": "signature_delta", "signature": _signature(self._call_id)})
        self._open = ""
        return signed + _event("content_block_stop", index=self._index)


def _event(kind: str, **data: Any) -> bytes:
    return event({"type": kind, **data}, kind)


def _message(call_id: str, model: str) -> Json:
    return {"id": f"msg_{call_id}", "type": "message", "role": "assistant", "model": model}


def _signature(call_id: str) -> str:
    """Clients keep a thinking block only if it is signed; this signature says where it came from."""
    return f"harnessrl-{call_id}"


def _tool_use(call: ToolCall, arguments: Json) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _stop_reason(answer: Answer) -> str:
    if answer.stop_sequence is not None:
        return "stop_sequence"
    return {"tool_calls": "tool_use", "length": "max_tokens"}.get(answer.finish_reason, "end_turn")


def _usage(input_tokens: int, output_tokens: int) -> Json:
    return {
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _system(system: Any) -> list[Json]:
    if isinstance(system, list):
        system = [b for b in system if not (isinstance(b, dict) and str(b.get("text")).startswith(_BILLING))]
    text = text_of(system, "system")
    return [{"role": "system", "content": text}] if text else []


def _messages(message: Json, where: str) -> list[Json]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise RequestError(f"{where}.role must be user, assistant or system", param=where)
    if not isinstance(content, list):
        return [{"role": role, "content": text_of(content, f"{where}.content")}]
    if role == "assistant":
        return [_assistant(content, where)]
    out: list[Json] = []
    texts: list[Any] = []
    for index, block in enumerate(content):
        if isinstance(block, dict) and block.get("type") == "tool_result":
            tool_id = block.get("tool_use_id")
            text = text_of(block.get("content"), f"{where}.content.{index}")
            out.append({"role": "tool", "tool_call_id": str(tool_id), "content": text})
        else:
            texts.append(block)
    if texts or not out:
        out.append({"role": role, "content": text_of(texts, f"{where}.content")})
    return out


def _assistant(content: list[Any], where: str) -> Json:
    texts: list[Any] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "tool_use":
            if not isinstance(block.get("name"), str):
                raise RequestError(f"{where}: tool_use needs a name", param=where)
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function = {"name": block["name"], "arguments": arguments}
            calls.append({"id": str(block.get("id")), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            texts.append(block)
    out: Json = {"role": "assistant", "content": text_of(texts, f"{where}.content", "")}
    if any(thoughts):
        out["reasoning_content"] = "\n".join(thoughts)
    if calls:
        out["tool_calls"] = calls
    return out


def _tools(body: Json, notes: list[str]) -> list[Json]:
    tools: list[Json] = []
    for index, tool in enumerate(list_of(body, "tools", dict)):
        if "input_schema" not in tool and tool.get("type", "custom") != "custom":
            notes.append(f"tool {tool['type']} ignored")
            continue
        function = {"name": tool.get("name"), "description": tool.get("description")}
        function["parameters"] = tool.get("input_schema")
        tools.append({"type": "function", "function": checked_function(function, f"tools.{index}")})
    return tools


def _tool_choice(choice: Json | None) -> str:
    kind = (choice or {}).get("type", "auto")
    if kind == "tool" and choice is not None and isinstance(choice.get("name"), str):
        return choice["name"]
    known = {"auto": "auto", "any": "required", "none": "none"}
    if not isinstance(kind, str) or kind not in known:
        raise RequestError("tool_choice must be auto, any, none or a tool by name", param="tool_choice")
    return known[kind]
