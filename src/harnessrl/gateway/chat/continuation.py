"""From which earlier call of its attempt a request goes on, and so which ids its prompt is made of.

Invariant: an `exact` prompt begins with the parent's prompt and sampled ids, token by token; that is checked, not
assumed. Whatever can't be continued is rendered afresh, under a named reason.

Messages are compared by meaning (design §6). A conversation is a chain of digests: the first of its system text,
tools and template options, then one more for each unit (a message, or neighbouring tool results). So finding the
parent costs one pass over the request, however many calls there were.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from harnessrl.gateway.chat.canonical import Answer, ChatRequest
from harnessrl.gateway.chat.renderer import Chat
from harnessrl.schemas import Json

__all__ = ["Memory", "Prompt", "Trail"]


@dataclass(slots=True)
class Prompt:
    ids: np.ndarray
    """int32, whole."""
    continuity: str
    """`exact`, `first` or `rendered(REASON)`."""
    parent: str | None = None
    """The call whose context has the longest beginning in common with the ids."""
    confirms: str | None = None
    """The call whose answer this request contains: it was delivered."""


@dataclass(frozen=True, slots=True)
class _Key:
    """What must be equal, besides the messages, for a prompt to be continued: digests."""

    system: bytes
    tools: bytes
    template: bytes

    def digest(self) -> bytes:
        return _digest(self.system + self.tools + self.template)

    def difference(self, other: "_Key") -> str:
        if self.tools != other.tools:
            return "tools_changed"
        return "system_changed" if self.system != other.system else "template_changed"


@dataclass(slots=True)
class _Unit:
    digest: bytes
    end: int
    """Index of the first message after it."""
    assistant: bool


@dataclass(slots=True)
class _Call:
    call_id: str
    key: _Key
    context: np.ndarray
    """Prompt + sampled ids, int32."""
    prompt_len: int
    parent: "_Call | None" = None
    """Whose context this call's prompt begins with."""
    text: tuple[int, bytes] | None = None
    """Length and digest of prompt + answer of a text completion."""


class Memory:
    """The calls of one attempt that a later one may continue."""

    def __init__(self) -> None:
        self._calls: dict[str, _Call] = {}
        self._by_end: dict[bytes, _Call] = {}
        """By the chain after the call's answer."""
        self._by_answer: dict[bytes, _Call] = {}
        self._known: set[bytes] = set()
        """Every link of every chain."""
        self._last: dict[_Key, list[bytes]] = {}
        """The units of the last call of each key, its answer included."""

    def prompt(self, chat: Chat, request: ChatRequest) -> Prompt:
        """The request's prompt. Raises `ValueError` where the conversation can't be rendered."""
        if request.prompt is not None:
            return self._text_prompt(chat, request.prompt)
        key, units = _key(request), list(_units(request))
        if request.prefill:
            start = chat.render(request.messages[:-1], request.tools)
            ids = np.concatenate([start, _encode(chat, request.messages[-1]["content"])])
            return self._rendered(ids, "prefill")
        chain = list(_chain(key, units))
        for after in range(len(units) - 1, -1, -1):
            parent = self._by_end.get(chain[after])
            if parent is not None:
                start = units[after - 1].end if after else 0
                said = next((i for i in range(after, len(units)) if units[i].assistant), None)
                foreign = "" if said is None else "edited" if chain[said] in self._known else "inserted"
                return self._continued(chat, request, parent, start, foreign)
        return self._rendered(chat.render(_named(request.messages), request.tools), self._reason(key, units, chain))

    def continues(self, request: ChatRequest) -> bool:
        """Whether the request goes on from a known call, so that little of it is rendered."""
        *before, _ = _chain(_key(request), list(_units(request)))
        return any(link in self._by_end for link in before)

    def add(
        self,
        call_id: str,
        request: ChatRequest,
        prompt: np.ndarray,
        parent: str | None,
        sampled: np.ndarray,
        answer: Answer,
    ) -> None:
        """Remember a call that ended; later calls may go on from it."""
        context = np.concatenate([prompt, sampled])
        call = _Call(call_id, _key(request), context, len(prompt), self._calls.get(parent or ""))
        self._share(call)
        self._calls[call_id] = call
        if request.prompt is not None:
            text = request.prompt if isinstance(request.prompt, str) else None
            if text is not None:
                call.text = len(text + answer.content), _digest((text + answer.content).encode())
            return
        units = list(_units(request))
        said = answer.message()
        if request.prefill:
            said["content"] = request.messages[-1]["content"] + said["content"]
        answered = [_Unit(_message_digest(said), 0, True)] if _has_content(said) else []
        chain = list(_chain(call.key, [*units, *answered]))
        self._by_end[chain[-1]] = call
        if answered:
            self._by_answer[answered[0].digest] = call
        self._known.update(chain)
        self._last[call.key] = [unit.digest for unit in (*units, *answered)]

    def _continued(self, chat: Chat, request: ChatRequest, parent: _Call, start: int, foreign: str) -> Prompt:
        """start: index of the first new message. foreign: why they hold an answer that was not sampled here."""
        new = [m for m in _named(request.messages)[start:] if _has_content(m)]
        prompt, sampled = parent.context[: parent.prompt_len], parent.context[parent.prompt_len :]
        if foreign:
            ids, reason = None, foreign
        else:
            ids = chat.bridge(prompt, sampled, new, request.tools)
            reason = "reasoning_dropped" if chat.drops_reasoning else "trailing_tokens"
        if ids is not None and np.array_equal(ids[: len(parent.context)], parent.context):
            return Prompt(ids, "exact", parent.call_id, parent.call_id)
        rendered = self._rendered(chat.render(_named(request.messages), request.tools), reason)
        rendered.confirms = parent.call_id
        return rendered

    def _text_prompt(self, chat: Chat, prompt: str | list[int]) -> Prompt:
        if not isinstance(prompt, str):
            return self._rendered(np.asarray(prompt, dtype=np.int32), "first")
        known = sorted((call for call in self._calls.values() if call.text), key=lambda c: -(c.text or (0,))[0])
        for call in known:
            length, digest = call.text or (0, b"")
            if length >= len(prompt) or _digest(prompt[:length].encode()) != digest:
                continue
            context = call.context
            closed = len(context) > call.prompt_len and int(context[-1]) in chat.stop_ids
            ids = np.concatenate([context[:-1] if closed else context, _encode(chat, prompt[length:])])
            return Prompt(ids, "rendered(trailing_tokens)" if closed else "exact", call.call_id, call.call_id)
        return self._rendered(_encode(chat, prompt), "first")

    def _rendered(self, ids: np.ndarray, reason: str) -> Prompt:
        parent, shared = self._longest(ids)
        if parent is not None and parent.prompt_len < shared == len(parent.context):
            return Prompt(ids, "exact", parent.call_id, parent.call_id)
        continuity = reason if reason == "first" else f"rendered({reason})"
        return Prompt(ids, continuity, parent.call_id if parent else None)

    def _longest(self, ids: np.ndarray) -> tuple[_Call | None, int]:
        """The call whose context shares the longest beginning with `ids`, the later of equals, and its length."""
        best, most = None, 0
        for call in list(self._calls.values()):
            n = min(len(ids), len(call.context))
            if n < most or not np.array_equal(ids[:most], call.context[:most]):
                continue
            differs = np.flatnonzero(ids[most:n] != call.context[most:n])
            shared = most + int(differs[0]) if len(differs) else n
            if shared >= max(most, 1):
                best, most = call, shared
        return best, most

    @staticmethod
    def _share(call: _Call) -> None:
        """Let the contexts that this one begins with be views of it: a conversation is in memory once."""
        parent = call.parent
        if parent is None or not np.array_equal(parent.context, call.context[: len(parent.context)]):
            call.parent = None
            return
        while parent is not None:
            parent.context = call.context[: len(parent.context)]
            parent = parent.parent

    def _reason(self, key: _Key, units: Sequence[_Unit], chain: Sequence[bytes]) -> str:
        """Why no call is continued; `first` where the request holds nothing that was sampled in this attempt."""
        ours = [call for unit in units if (call := self._by_answer.get(unit.digest)) is not None]
        common = max((i for i, link in enumerate(chain) if link in self._known), default=-1)
        if common < 0:
            return key.difference(ours[-1].key) if ours else "first"
        last = self._last.get(key, [])
        if not ours and 0 < common < len(units) and units[common].assistant:
            return "edited"
        if not ours:
            return "compaction" if 0 < common < len(units) and len(last) > len(units) else "first"
        mine = {unit.digest for unit in units}
        if all(digest in mine for digest in last):
            return "inserted"
        return "compaction" if len(units) < len(last) and not units[common].assistant else "edited"


class Trail:
    """The calls of one attempt at chat endpoints, where the prompts are the engine's: digests only, no ids."""

    def __init__(self) -> None:
        self._by_end: dict[bytes, tuple[str, int, bytes]] = {}

    def parent(self, request: ChatRequest, ids: np.ndarray) -> tuple[str, bool] | None:
        """The call that this one goes on from, and whether the engine's prompt begins with its context exactly."""
        *before, _ = _chain(_key(request), list(_units(request)))
        for link in reversed(before):
            if link in self._by_end:
                call_id, length, digest = self._by_end[link]
                return call_id, length <= len(ids) and _digest(ids[:length].tobytes()) == digest
        return None

    def add(self, call_id: str, request: ChatRequest, context: np.ndarray, said: Json) -> None:
        """said: the answer as a canonical message."""
        units = list(_units(request))
        if _has_content(said):
            units.append(_Unit(_message_digest(said), 0, True))
        *_, end = _chain(_key(request), units)
        self._by_end[end] = call_id, len(context), _digest(context.tobytes())

    def __len__(self) -> int:
        return len(self._by_end)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


def _encode(chat: Chat, text: str) -> np.ndarray:
    return np.asarray(chat.tokenizer.encode(text), dtype=np.int32)


def _key(request: ChatRequest) -> _Key:
    system = "\0".join(m["content"].strip() for m in request.messages[: _leading_system(request.messages)])
    return _Key(_digest(system.encode()), _digest(_canonical(request.tools)), _digest(_canonical(request.template)))


def _leading_system(messages: Sequence[Json]) -> int:
    return next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))


def _units(request: ChatRequest) -> Iterator[_Unit]:
    """The messages after the leading system text, without empty ones; tool results that stand together are one."""
    messages = request.messages[:-1] if request.prefill else request.messages
    positions: dict[str, int] = {}
    results: list[tuple[int, bytes]] = []
    for index in range(_leading_system(messages), len(messages)):
        message = messages[index]
        if message["role"] == "tool":
            position = positions.get(message.get("tool_call_id", ""), len(positions))
            results.append((position, message["content"].strip().encode()))
            if index + 1 == len(messages) or messages[index + 1]["role"] != "tool":
                joined = b"\0".join(b"%d:%s" % result for result in sorted(results))
                yield _Unit(_digest(b"tool\0" + joined), index + 1, False)
                results = []
        elif _has_content(message):
            positions = {call["id"]: i for i, call in enumerate(message.get("tool_calls", ()))} or positions
            yield _Unit(_message_digest(message), index + 1, message["role"] == "assistant")


def _chain(key: _Key, units: Sequence[_Unit]) -> Iterator[bytes]:
    link = key.digest()
    yield link
    for unit in units:
        link = _digest(link + unit.digest)
        yield link


def _has_content(message: Json) -> bool:
    return bool(message["role"] == "tool" or message.get("tool_calls") or message["content"].strip())


def _message_digest(message: Json) -> bytes:
    parts = [message["role"].encode(), message["content"].strip().encode()]
    for call in message.get("tool_calls", ()):
        parts += [call["function"]["name"].encode(), _canonical_arguments(call["function"]["arguments"])]
    return _digest(b"\0".join(parts))


def _canonical_arguments(text: str) -> bytes:
    try:
        return _canonical(json.loads(text))
    except ValueError:
        return text.strip().encode()


def _canonical(value: object) -> bytes:
    """JSON without regard to spacing, order of keys, escapes, and 50 against 50.0."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":")).encode()


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _named(messages: Sequence[Json]) -> list[Json]:
    """Tool results by the name of the tool that was called."""
    names = {c["id"]: c["function"]["name"] for m in messages for c in m.get("tool_calls", ())}
    return [
        {**m, "name": names[m["tool_call_id"]]}
        if m["role"] == "tool" and "name" not in m and m.get("tool_call_id") in names
        else m
        for m in messages
    ]
