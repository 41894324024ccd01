"""Reading fields of a request with errors that name the field, and what several dialects share."""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import orjson

from harnessrl.gateway.chat.canonical import Answer, RequestError, Sampling
from harnessrl.schemas import Json

__all__ = [
    "OpenAIShape",
    "boolean",
    "checked_function",
    "event",
    "grammar_of",
    "integer",
    "list_of",
    "number",
    "optional",
    "sampling",
    "text_of",
    "tool_choice_of",
    "tools_of",
    "usage_of",
]

T = TypeVar("T")
_NAMES = {str: "text", dict: "an object", list: "a list", int: "an integer", bool: "true or false"}


def optional(body: Json, name: str, kind: type[T]) -> T | None:
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        raise RequestError(f"{name} must be {_NAMES[kind]}", param=name)
    return value


def list_of(body: Json, name: str, kind: type[T]) -> list[T]:
    items = optional(body, name, list) or []
    if not all(isinstance(item, kind) for item in items):
        raise RequestError(f"each of {name} must be {_NAMES[kind]}", param=name)
    return items


def boolean(body: Json, name: str) -> bool:
    return optional(body, name, bool) or False


def integer(body: Json, name: str, least: int, most: int = 1 << 31) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise RequestError(f"{name} must be an integer of at least {least}", param=name)
    return value


def number(body: Json, name: str, least: float, most: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise RequestError(f"{name} must be a number from {least} to {most}", param=name)
    return float(value)


def sampling(body: Json, ignored: Sequence[str], stop: str = "stop", max_tokens: str = "max_tokens") -> Sampling:
    stops = body.get(stop)
    stops = [stops] if isinstance(stops, str) else stops or []
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops) or len(stops) > 64:
        raise RequestError(f"{stop} must be text or a list of at most 64 texts", param=stop)
    return Sampling(
        temperature=number(body, "temperature", 0, 2),
        top_p=number(body, "top_p", 0, 1),
        top_k=integer(body, "top_k", -1),
        min_p=number(body, "min_p", 0, 1),
        presence_penalty=number(body, "presence_penalty", -2, 2),
        frequency_penalty=number(body, "frequency_penalty", -2, 2),
        repetition_penalty=number(body, "repetition_penalty", 0.01, math.inf),
        max_tokens=integer(body, max_tokens, 1),
        min_tokens=integer(body, "min_tokens", 0),
        seed=integer(body, "seed", -(1 << 63), 1 << 63),
        stop=[s for s in stops if s],
        unsupported=[name for name in (*ignored, "ignore_eos") if body.get(name)],
    )


def text_of(content: Any, where: str, joint: str = "\n") -> str:
    """The text of a message's content: text, nothing, or a list of text parts. Refuses other parts by name."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError(f"{where} must be text or a list of parts", param=where)
    parts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part if isinstance(part, str) else part.get("text", part.get("refusal")) if kind else None
        if not isinstance(text, str):
            raise RequestError(
                f"{where}[{index}] is {kind or 'no text part'!r}: this model reads text only", param=where
            )
        parts.append(text)
    return joint.join(parts)


def tools_of(body: Json, name: str) -> list[Json]:
    tools: list[Json] = []
    for index, tool in enumerate(list_of(body, name, dict)):
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, dict):
            raise RequestError(f"{name}[{index}] must be of type function", param=name)
        tools.append({"type": "function", "function": checked_function(function, f"{name}[{index}]")})
    return tools


def checked_function(function: Json, where: str) -> Json:
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise RequestError(f"{where} must have a name", param=where)
    if not isinstance(function.get("parameters") or {}, dict):
        raise RequestError(f"{where}.parameters must be a JSON schema", param=where)
    if not isinstance(function.get("description") or "", str):
        raise RequestError(f"{where}.description must be text", param=where)
    return {k: v for k, v in function.items() if v is not None}


def tool_choice_of(choice: Any) -> str:
    if choice is None or choice in ("auto", "none", "required"):
        return choice or "auto"
    if isinstance(choice, dict):
        if choice.get("type") == "allowed_tools":
            allowed = choice.get("allowed_tools") or {}
            return "required" if isinstance(allowed, dict) and allowed.get("mode") == "required" else "auto"
        function = choice.get("function") or choice
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return function["name"]
    raise RequestError("tool_choice must be auto, none, required or name a function", param="tool_choice")


def grammar_of(response_format: Json | None) -> Json | None:
    kind = (response_format or {}).get("type", "text")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    schema = response_format.get("json_schema", response_format)
    if kind == "json_schema" and isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
        return {"type": "json_schema", "schema": schema["schema"]}
    raise RequestError(
        "response_format must be text, json_object or json_schema with a schema", param="response_format"
    )


def usage_of(answers: list[Answer]) -> Json:
    usage = answers[0].usage
    completion = sum(answer.usage.completion_tokens for answer in answers)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": usage.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class OpenAIShape:
    """What OpenAI's dialects have in common: errors and the list of models."""

    def error(self, error: RequestError) -> Json:
        kind = "server_error" if error.status >= 500 else _KINDS.get(error.status, "invalid_request_error")
        return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}

    def error_event(self, error: RequestError) -> bytes:
        return event(self.error(error))

    def models(self, names: list[str]) -> Json:
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "harnessrl"} for name in names]
        return {"object": "list", "data": data}


_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def event(data: Json, name: str | None = None) -> bytes:
    """A server-sent event."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + orjson.dumps(data) + b"\n\n"
