"""OpenAI Chat Completions."""

import time
from collections.abc import Iterator
from typing import Any

from harnessrl.gateway.chat.canonical import Answer, ChatRequest, Delta, RequestError
from harnessrl.gateway.dialects.fields import (
    OpenAIShape,
    boolean,
    event,
    grammar_of,
    integer,
    list_of,
    optional,
    sampling,
    text_of,
    tool_choice_of,
    tools_of,
    usage_of,
)
from harnessrl.schemas import Json

__all__ = ["OpenAIChat", "canonical_message"]

_IGNORED = ("logit_bias", "bad_words", "thinking_token_budget", "truncate_prompt_tokens", "audio", "modalities")


class OpenAIChat(OpenAIShape):
    name = "openai_chat"
    chat_path = "/chat/completions"

    def parse(self, body: Json) -> ChatRequest:
        messages = [_message(m, f"messages[{i}]") for i, m in enumerate(list_of(body, "messages", dict))]
        if not messages:
            raise RequestError("messages must not be empty", param="messages")
        request = ChatRequest(
            model=optional(body, "model", str) or "",
            messages=messages,
            tools=tools_of(body, "tools"),
            sampling=sampling(body, _IGNORED),
            tool_choice=tool_choice_of(body.get("tool_choice")),
            stream=boolean(body, "stream"),
            n=integer(body, "n", 1, 128) or 1,
            logprobs=boolean(body, "logprobs"),
            grammar=grammar_of(optional(body, "response_format", dict)),
            template=optional(body, "chat_template_kwargs", dict) or {},
            options={"include_usage": bool((optional(body, "stream_options", dict) or {}).get("include_usage"))},
        )
        if body.get("functions"):
            raise RequestError("functions is no longer supported: use tools", param="functions")
        limit = integer(body, "max_completion_tokens", 1)
        request.sampling.max_tokens = request.sampling.max_tokens if limit is None else limit
        if any(tool["function"].get("strict") for tool in request.tools):
            request.notes.append("strict ignored")
        return request

    def whole(self, request: ChatRequest, answers: list[Answer], call_id: str, model: str) -> Json:
        return {
            "id": f"chatcmpl-{call_id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [_choice(request, answer, index) for index, answer in enumerate(answers)],
            "usage": usage_of(answers),
        }

    def stream(self, request: ChatRequest, call_id: str, model: str, prompt_tokens: int) -> "ChatStream":
        return ChatStream(request, call_id, model)


class ChatStream:
    """The events of one streamed answer, as bytes to send."""

    def __init__(self, request: ChatRequest, call_id: str, model: str):
        self._request = request
        self._base = {
            "id": f"chatcmpl-{call_id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._calls = [0] * request.n

    def start(self) -> bytes:
        return b"".join(self._chunk(i, {"role": "assistant", "content": ""}) for i in range(self._request.n))

    def delta(self, delta: Delta, index: int = 0) -> bytes:
        out = b""
        if delta.reasoning:
            out += self._chunk(index, {"reasoning_content": delta.reasoning})
        if delta.content:
            out += self._chunk(index, {"content": delta.content})
        for call in delta.tool_calls:
            function = {"name": call.name, "arguments": call.arguments}
            at = self._calls[index]
            out += self._chunk(
                index, {"tool_calls": [{"index": at, "id": call.id, "type": "function", "function": function}]}
            )
            self._calls[index] += 1
        return out

    def end(self, answers: list[Answer]) -> Iterator[bytes]:
        for index, answer in enumerate(answers):
            yield self._chunk(index, {}, answer.finish_reason, _logprobs(self._request, answer))
        if self._request.options.get("include_usage"):
            yield event({**self._base, "choices": [], "usage": usage_of(answers)})
        yield b"data: [DONE]\n\n"

    def _chunk(
        self, index: int, delta: Json, finish_reason: str | None = None, logprobs: Json | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return event({**self._base, "choices": [choice]})


def _choice(request: ChatRequest, answer: Answer, index: int) -> Json:
    message: dict[str, Any] = answer.message()
    message["refusal"] = None
    if answer.tool_calls and not answer.content:
        message["content"] = None
    return {
        "index": index,
        "message": message,
        "logprobs": _logprobs(request, answer),
        "finish_reason": answer.finish_reason,
    }


def _logprobs(request: ChatRequest, answer: Answer) -> Json | None:
    if not request.logprobs:
        return None
    pairs = zip(answer.token_texts, answer.token_logprobs, strict=True)
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in pairs
        ],
        "refusal": None,
    }


def canonical_message(message: Json) -> Json | None:
    """An assistant's message of an engine's answer; None where it is none."""
    try:
        return _message({**message, "role": "assistant"}, "message")
    except RequestError:
        return None


def _message(message: Json, where: str) -> Json:
    role = message.get("role")
    role = "system" if role == "developer" else "tool" if role == "function" else role
    if role not in ("system", "user", "assistant", "tool"):
        raise RequestError(f"{where}.role must be system, developer, user, assistant or tool", param=where)
    joint = "" if role == "assistant" else "\n"
    out: Json = {"role": role, "content": text_of(message.get("content"), f"{where}.content", joint)}
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(reasoning, str):
            out["reasoning_content"] = reasoning
        calls = list_of(message, "tool_calls", dict)
        if calls:
            out["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    elif role == "tool":
        out["tool_call_id"] = optional(message, "tool_call_id", str) or ""
    return out


def _tool_call(call: Json, where: str) -> Json:
    function = call.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        raise RequestError(f"{where} must be a function call with a name", param=where)
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        raise RequestError(f"{where}.function.arguments must be JSON text", param=where)
    call_id = call.get("id")
    return {
        "id": call_id if isinstance(call_id, str) else "",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
