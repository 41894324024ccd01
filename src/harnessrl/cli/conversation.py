"""What was said in a call, in one form for all dialects: messages as `gateway.chat.canonical` describes them."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from harnessrl.gateway.chat.canonical import RequestError
from harnessrl.gateway.dialects.registry import BY_NAME
from harnessrl.schemas import Call, Json

__all__ = ["Conversation", "conversation", "longest", "said", "spoken"]


@dataclass(frozen=True)
class Conversation:
    call: Call
    messages: list[Json]
    """The answer is the last one."""
    tools: list[Json]


def conversation(call: Call, data: Json) -> Conversation | None:
    """`data`: of the call's `model_request` event. None where there is no answer, or no text (a prompt of ids)."""
    request, response = data.get("request", {}), data.get("response", {})
    try:
        match call.dialect:
            case "openai_completions":
                if not isinstance(request["prompt"], str):
                    return None
                prompt = {"role": "user", "content": request["prompt"]}
                answer = {"role": "assistant", "content": response["choices"][0]["text"]}
                return Conversation(call, [prompt, answer], [])
            case "openai_chat":
                more = {"messages": [*request["messages"], response["choices"][0]["message"]]}
            case "anthropic_messages":
                answer = {"role": "assistant", "content": response["content"]}
                more = {"messages": [*request["messages"], answer]}
            case _:
                asked = request["input"]
                history = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
                more = {"input": [*history, *response["output"]]}
        whole = BY_NAME[call.dialect].parse({**request, **more})
    except (KeyError, IndexError, RequestError):
        return None
    return Conversation(call, whole.messages, whole.tools)


def longest(conversations: Iterable[Conversation]) -> list[Conversation]:
    """Without those that a later call of the same rollout goes on from."""
    inner: set[int] = set()
    ends: list[tuple[int, Conversation]] = []
    for one in conversations:
        begun = 0
        for message in one.messages[:-1]:
            begun = hash((begun, said(message)))
            inner.add(begun)
        ends.append((hash((begun, said(one.messages[-1]))), one))
    return [one for end, one in ends if end not in inner]


def said(message: Json) -> Any:
    """What makes two messages the same, whatever ids, white space and dropped reasoning do."""
    calls = [(c["function"]["name"], _compact(c["function"]["arguments"])) for c in message.get("tool_calls") or []]
    return message["role"], message["content"].strip(), tuple(calls)


def spoken(message: Json) -> str:
    """A message in a line or more: its text, and the tools that it calls."""
    calls = [f"{c['function']['name']}({c['function']['arguments']})" for c in message.get("tool_calls") or []]
    return "\n".join([*([message["content"]] if message["content"] or not calls else []), *calls])


def _compact(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except ValueError:
        return arguments
