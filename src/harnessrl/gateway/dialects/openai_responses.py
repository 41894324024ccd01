"""OpenAI Responses, without server-side state: the whole history comes with each request."""

import json
import time
from collections.abc import Iterator
from typing import Any

from harnessrl.gateway.chat.canonical import Answer, ChatRequest, Delta, RequestError, ToolCall
from harnessrl.gateway.dialects.fields import (
    OpenAIShape,
    boolean,
    checked_function,
    event,
    grammar_of,
    list_of,
    optional,
    sampling,
    text_of,
    tool_choice_of,
)
from harnessrl.schemas import Json

__all__ = ["OpenAIResponses"]

_FREE_FORM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""Parameters of a custom tool, whose argument is plain text."""


class OpenAIResponses(OpenAIShape):
    name = "openai_responses"
    chat_path = None

    def parse(self, body: Json) -> ChatRequest:
        if body.get("previous_response_id"):
            raise RequestError(
                "previous_response_id is not supported: send the whole input, with store false",
                param="previous_response_id",
            )
        notes: list[str] = []
        messages = _history(body, notes)
        if not any(m["role"] != "system" for m in messages):
            raise RequestError("input must not be empty", param="input")
        tools, custom = _tools(body, notes)
        return ChatRequest(
            model=optional(body, "model", str) or "",
            messages=messages,
            tools=tools,
            sampling=sampling(body, ("logit_bias",), max_tokens="max_output_tokens"),
            tool_choice=tool_choice_of(body.get("tool_choice")),
            stream=boolean(body, "stream"),
            grammar=grammar_of(optional(optional(body, "text", dict) or {}, "format", dict)),
            options={"body": _echoed(body), "custom": custom},
            notes=notes,
        )

    def whole(self, request: ChatRequest, answers: list[Answer], call_id: str, model: str) -> Json:
        answer = answers[0]
        items: list[Json] = []
        if answer.reasoning:
            items.append(_reasoning(call_id, answer.reasoning))
        if answer.content or not (answer.reasoning or answer.tool_calls):
            items.append(_message(call_id, 0, answer.content))
        items += [_call(request, call, call.arguments) for call in answer.tool_calls]
        return _response(request, call_id, model, items, answer)

    def stream(self, request: ChatRequest, call_id: str, model: str, prompt_tokens: int) -> "ResponseStream":
        return ResponseStream(request, call_id, model)

    def error_event(self, error: RequestError) -> bytes:
        said = {"type": "error", "code": error.code or "server_error", "message": str(error), "param": error.param}
        return event({**said, "sequence_number": 0}, "error")


class ResponseStream:
    def __init__(self, request: ChatRequest, call_id: str, model: str):
        self._request = request
        self._call_id = call_id
        self._model = model
        self._items: list[Json] = []
        self._sequence = 0
        self._open = ""
        """Kind of the item that is open: message or reasoning."""
        self._text = ""

    def start(self) -> bytes:
        response = _response(self._request, self._call_id, self._model, [], None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def delta(self, delta: Delta, index: int = 0) -> bytes:
        out = b""
        if delta.reasoning:
            out += self._begin("reasoning") + self._text_event("delta", delta=delta.reasoning)
            self._text += delta.reasoning
        if delta.content:
            out += self._begin("message") + self._text_event("delta", delta=delta.content)
            self._text += delta.content
        for call in delta.tool_calls:
            out += self._close() + self._whole_call(call)
        return out

    def end(self, answers: list[Answer]) -> Iterator[bytes]:
        yield self._close()
        if not self._items:
            yield self._begin("message") + self._close()
        answer = answers[0]
        response = _response(self._request, self._call_id, self._model, self._items, answer)
        yield self._event(f"response.{response['status']}", response=response)

    def _begin(self, kind: str) -> bytes:
        if self._open == kind:
            return b""
        closed = self._close()
        self._open = kind
        item = self._item()
        item["status"] = "in_progress"
        part = item.pop("content")[0]
        out = self._event("response.output_item.added", output_index=self._at, item={**item, "content": []})
        return closed + out + self._part_event("added", part)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        item = self._item()
        out = self._text_event("done", text=self._text) + self._part_event("done", item["content"][0])
        out += self._event("response.output_item.done", output_index=self._at, item=item)
        self._items.append(item)
        self._open, self._text = "", ""
        return out

    def _whole_call(self, call: ToolCall) -> bytes:
        item = _call(self._request, call, call.arguments)
        field = "input" if item["type"] == "custom_tool_call" else "arguments"
        kind = "custom_tool_call_input" if field == "input" else "function_call_arguments"
        begun = {**item, field: "", "status": "in_progress"}
        at = {"item_id": item["id"], "output_index": self._at}
        out = self._event("response.output_item.added", output_index=self._at, item=begun)
        out += self._event(f"response.{kind}.delta", **at, delta=item[field])
        out += self._event(f"response.{kind}.done", **at, **{field: item[field]}, name=call.name)
        out += self._event("response.output_item.done", output_index=self._at, item=item)
        self._items.append(item)
        return out

    @property
    def _at(self) -> int:
        return len(self._items)

    def _item(self) -> Json:
        if self._open == "reasoning":
            return _reasoning(self._call_id, self._text)
        return _message(self._call_id, self._at, self._text)

    def _part_event(self, what: str, part: Json) -> bytes:
        return self._event(
            f"response.content_part.{what}",
            item_id=self._item()["id"],
            output_index=self._at,
            content_index=0,
            part=part,
        )

    def _text_event(self, what: str, **text: str) -> bytes:
        kind = "reasoning_text" if self._open == "reasoning" else "output_text"
        more: Json = {} if kind == "reasoning_text" else {"logprobs": []}
        at = {"item_id": self._item()["id"], "output_index": self._at, "content_index": 0}
        return self._event(f"response.{kind}.{what}", **at, **text, **more)

    def _event(self, kind: str, **data: Any) -> bytes:
        self._sequence += 1
        return event({"type": kind, "sequence_number": self._sequence - 1, **data}, kind)


def _response(request: ChatRequest, call_id: str, model: str, items: list[Json], answer: Answer | None) -> Json:
    status, usage = "in_progress", None
    if answer is not None:
        status = "incomplete" if answer.finish_reason == "length" else "completed"
        usage = {
            "input_tokens": answer.usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.usage.cached_tokens},
            "output_tokens": answer.usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.usage.prompt_tokens + answer.usage.completion_tokens,
        }
    return {
        "id": f"resp_{call_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": model,
        "output": items,
        "usage": usage,
        **request.options["body"],
    }


def _echoed(body: Json) -> Json:
    """What a response repeats of its request."""
    return {
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": body.get("temperature"),
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
        "truncation": "disabled",
    }


def _message(call_id: str, at: int, text: str) -> Json:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "id": f"msg_{call_id}{at}",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [part],
    }


def _reasoning(call_id: str, text: str) -> Json:
    return {
        "id": f"rs_{call_id}",
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "encrypted_content": None,
        "status": "completed",
    }


def _call(request: ChatRequest, call: ToolCall, arguments: str) -> Json:
    if call.name in request.options["custom"]:
        text = json.loads(arguments).get("input", "")
        item = {"type": "custom_tool_call", "input": text if isinstance(text, str) else json.dumps(text)}
        return {"id": f"ctc_{call.id}", **item, "call_id": call.id, "name": call.name, "status": "completed"}
    item = {"id": f"fc_{call.id}", "type": "function_call", "call_id": call.id, "name": call.name}
    return {**item, "arguments": arguments, "status": "completed"}


def _history(body: Json, notes: list[str]) -> list[Json]:
    messages: list[Json] = []
    instructions = optional(body, "instructions", str)
    if instructions:
        messages.append({"role": "system", "content": instructions})
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else list_of(body, "input", dict)
    for index, item in enumerate(items):
        _add_item(messages, item, f"input[{index}]", notes)
    return messages


def _add_item(messages: list[Json], item: Json, where: str, notes: list[str]) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        _add_message(messages, item, where)
    elif kind == "reasoning":
        parts = list_of(item, "content", dict) or list_of(item, "summary", dict)
        text = "\n".join(text for part in parts if isinstance(text := part.get("text"), str))
        assistant = _assistant(messages, fresh=True)
        if text:
            assistant["reasoning_content"] = text
    elif kind in ("function_call", "custom_tool_call"):
        name, call_id = item.get("name"), item.get("call_id")
        arguments = item.get("arguments") if kind == "function_call" else json.dumps({"input": item.get("input")})
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise RequestError(f"{where} needs a name and arguments as JSON text", param=where)
        call = {"id": str(call_id), "type": "function", "function": {"name": name, "arguments": arguments or "{}"}}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        text = text_of(item.get("output"), f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": text})
    else:
        notes.append(f"input {kind} ignored")


def _add_message(messages: list[Json], item: Json, where: str) -> None:
    role = "system" if item.get("role") == "developer" else item.get("role")
    if role not in ("system", "user", "assistant"):
        raise RequestError(f"{where}.role must be system, developer, user or assistant", param=where)
    if role != "assistant":
        messages.append({"role": role, "content": text_of(item.get("content"), f"{where}.content")})
        return
    assistant = _assistant(messages)
    if assistant["content"]:
        assistant = _assistant(messages, fresh=True)
    assistant["content"] = text_of(item.get("content"), f"{where}.content", "")


def _assistant(messages: list[Json], fresh: bool = False) -> Json:
    """The assistant's message that the items of one answer are gathered in."""
    if fresh or not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _tools(body: Json, notes: list[str]) -> tuple[list[Json], list[str]]:
    tools: list[Json] = []
    custom: list[str] = []
    for index, tool in enumerate(list_of(body, "tools", dict)):
        kind = tool.get("type")
        if kind not in ("function", "custom"):
            notes.append(f"tool {kind} ignored")
            continue
        function = {"name": tool.get("name"), "description": tool.get("description")}
        function["parameters"] = tool.get("parameters") if kind == "function" else _FREE_FORM
        tools.append({"type": "function", "function": checked_function(function, f"tools[{index}]")})
        if kind == "custom":
            custom.append(str(function["name"]))
    return tools, custom
