"""A call at a chat endpoint: an OpenAI server that returns token ids. Requests and answers pass as they come.

As in v1.0, the model's name and the mode's temperature are set, and token ids and (to train) log-probabilities are
asked for.
"""

import math
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from harnessrl.gateway.body import check_depth
from harnessrl.gateway.chat.canonical import ChatRequest, RequestError
from harnessrl.gateway.dialects import Dialect
from harnessrl.gateway.dialects.openai_chat import canonical_message
from harnessrl.gateway.proxy.context import Context, Services
from harnessrl.gateway.proxy.engine import EngineFailed
from harnessrl.gateway.proxy.exchange import ClientGone, Exchange
from harnessrl.gateway.proxy.routing import Route
from harnessrl.gateway.proxy.sampling import overridden
from harnessrl.gateway.store import CallRecord
from harnessrl.schemas import Endpoint, Json

__all__ = ["ChatCall"]

_NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_IGNORED = (
    "logit_bias",
    "bad_words",
    "min_tokens",
    "ignore_eos",
    "thinking_token_budget",
    "truncate_prompt_tokens",
)
_EMPTY = np.zeros(0, dtype=np.int32)


@dataclass(slots=True)
class Captured:
    """What the engine's answer holds of tokens."""

    prompt_ids: np.ndarray = field(default_factory=lambda: _EMPTY)
    sampled_ids: np.ndarray = field(default_factory=lambda: _EMPTY)
    logprobs: np.ndarray | None = None
    finish_reason: str | None = None
    message: Json | None = None
    rest: Json = field(default_factory=dict)
    """The answer without ids and log-probabilities."""
    problem: str | None = None
    """Why its tokens can't be trained on."""


class ChatCall:
    def __init__(
        self,
        services: Services,
        context: Context,
        dialect: Dialect,
        exchange: Exchange,
        route: Route,
        body: Json,
    ):
        self._services = services
        self._store = services.store
        self._context = context
        self._dialect = dialect
        self._exchange = exchange
        self._route = route
        self._body = body
        self._tries = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._sent: Json = {}

    async def serve(self) -> None:
        if self._dialect.chat_path is None:
            raise RequestError(
                "This engine speaks only OpenAI's chat and completions APIs: register it with kind 'token' and a "
                "renderer to use others.",
                404,
            )
        self._sent, notes = self._rewritten()
        self._headers += overridden(notes)
        try:
            encoded = await self._context.aside(lambda: orjson.dumps(self._sent))
            endpoint, answer, whole = await self._exchange.run(self._ask(encoded))
        except ClientGone:
            record = self._record(self._route.endpoints[0], Captured())
            record.fail(499, "undelivered", {"message": "the client left"})
            await self._services.keep(record, self._context.upstream)
            raise
        except EngineFailed as error:
            await self._end_failed(error)
        else:
            await self._end(endpoint, answer, whole)

    async def _end(self, endpoint: Endpoint, answer: bytes, whole: Json) -> None:
        captured = _capture(whole, self._context.mode == "train")
        record = self._record(endpoint, captured)
        request = await self._context.aside(self._request)
        if request is not None:
            record.agent = record.agent or self._services.routing.agent(request.messages)
            await self._context.aside(lambda: self._continuity(record, request, captured))
        if captured.problem is not None and self._context.mode == "train" and self._route.trainable:
            record.trainable, record.capture_failed = False, True
            record.untrainable_reason = captured.problem
        record.delivered = not self._exchange.gone
        await self._services.keep(record, self._context.upstream)
        if request is not None and captured.message is not None and len(captured.prompt_ids):
            context = np.concatenate([captured.prompt_ids, captured.sampled_ids])
            self._context.attempt.trail.add(record.call_id, request, context, captured.message)
        if self._exchange.started and self._body.get("stream") is True:
            delivered = await self._exchange.end(b"data: [DONE]\n\n")
        else:
            delivered = await self._exchange.answer(200, answer, self._headers)
        if not delivered:
            await self._store.set_delivered(record.call_id, False)

    def _rewritten(self) -> tuple[Json, list[str]]:
        """What is sent upstream, and what of the harness's sampling was overridden."""
        settings, body = self._services.settings, self._body
        strict = self._context.mode == "train" and self._route.trainable
        sent, notes = {**body, "model": self._route.model, "return_token_ids": True}, []
        fixed = settings.train_temperature if strict else None
        if self._context.mode == "val":
            fixed = settings.val_temperature
            if fixed is None and "temperature" not in body:
                fixed = 1.0
        if fixed is not None:
            if body.get("temperature") not in (None, fixed):
                notes.append(f"temperature={fixed:g}")
            sent["temperature"] = fixed
        if strict:
            sent["logprobs"] = 1 if "prompt" in body else True
            for name, neutral in _NEUTRAL.items():
                if body.get(name) not in (None, neutral):
                    notes.append(f"{name}={neutral:g}")
                    sent[name] = neutral
            for name in _IGNORED:
                if sent.pop(name, None):
                    notes.append(f"{name} ignored")
        return sent, notes

    async def _ask(self, encoded: bytes) -> tuple[Endpoint, bytes, Json]:
        """The answer's bytes and what they say; a streamed one goes out as it comes, all but its end."""
        assert self._dialect.chat_path is not None
        services = self._services
        while True:
            endpoint = await self._context.endpoint(services, self._route.model, self._tries)
            try:
                with self._context.at_engine(services.gate):
                    response = await services.engines.post(endpoint, self._dialect.chat_path, encoded)
                    if "event-stream" not in response.headers.get("content-type", ""):
                        answer = await services.engines.read(endpoint, response)
                        return endpoint, answer, _parsed(endpoint, answer)
                    assembled = _Assembled()
                    async for data in services.engines.events(endpoint, response):
                        if data == b"[DONE]":
                            break
                        assembled.add(endpoint, data)
                        if self._body.get("stream") is True:
                            await self._exchange.write(b"data: " + data + b"\n\n", self._headers)
                    whole = assembled.whole()
                    return endpoint, b"" if self._exchange.started else orjson.dumps(whole), whole
            except EngineFailed as error:
                self._tries += 1
                if self._exchange.started:
                    raise
                await services.engines.before_retry(self._tries, error)

    async def _end_failed(self, error: EngineFailed) -> None:
        said = _object(error.body)
        record = self._record(self._route.endpoints[0], Captured(rest=said))
        own = said.get("error")
        record.fail(error.status, "engine_failed", own if isinstance(own, dict) else {"message": str(error)})
        await self._services.keep(record, self._context.upstream)
        if said and error.status < 500 and not self._exchange.started:
            await self._exchange.answer(error.status, error.body)
        else:
            raise RequestError(str(error), error.status, "engine_failed", retry_after=error.retry_after)

    def _request(self) -> ChatRequest | None:
        """The request as the continuity needs it; None where it is not the gateway's to understand."""
        if self._dialect.name != "openai_chat":
            return None
        try:
            return self._dialect.parse(self._body)
        except RequestError:
            return None

    def _continuity(self, record: CallRecord, request: ChatRequest, captured: Captured) -> None:
        found = self._context.attempt.trail.parent(request, captured.prompt_ids)
        if found is not None:
            record.parent, exact = found
            record.continuity = "exact" if exact else "rendered(engine)"
        elif len(self._context.attempt.trail):
            answered = any(m["role"] == "assistant" for m in request.messages)
            record.continuity = "rendered(edited)" if answered else "first"

    def _record(self, endpoint: Endpoint, captured: Captured) -> CallRecord:
        context, route, sent = self._context, self._route, self._sent
        usage = captured.rest.get("usage")
        reason = "constrained by a grammar" if sent.get("response_format") else None
        reason = reason if route.trainable else "helper model"
        return CallRecord(
            call_id=context.call_id,
            rollout_id=context.attempt.rollout_id,
            attempt_id=context.attempt.attempt_id,
            mode=context.mode,
            dialect=self._dialect.name,
            model=route.model,
            endpoint=endpoint.endpoint,
            model_version=endpoint.version,
            agent=route.agent,
            request=sent,
            response=captured.rest,
            prompt_ids=captured.prompt_ids,
            sampled_ids=captured.sampled_ids,
            logprobs=captured.logprobs,
            versions=[(endpoint.version, len(captured.sampled_ids))] if len(captured.sampled_ids) else [],
            temperature=_number(sent.get("temperature"), 1.0),
            started_at=context.started_at,
            latency_ms=(time.perf_counter() - context.clock) * 1000,
            trainable=reason is None,
            untrainable_reason=reason,
            held_ms=context.held * 1000,
            retry_count=self._tries,
            usage=usage if isinstance(usage, dict) else None,
            finish_reason=captured.finish_reason,
        )


class _Assembled:
    """A streamed answer put together, as if it had come whole."""

    def __init__(self) -> None:
        self._whole: Json = {}
        self._message: Json = {"role": "assistant", "content": ""}
        self._choice: Json = {"index": 0, "token_ids": [], "logprobs": {"content": []}, "finish_reason": None}

    def add(self, endpoint: Endpoint, data: bytes) -> None:
        chunk = _object(data)
        if not chunk or "error" in chunk:
            raise EngineFailed(f"{endpoint.endpoint} failed in mid-answer: {data[:300].decode(errors='replace')}")
        self._whole |= {k: v for k, v in chunk.items() if k not in ("choices", "object") and v is not None}
        for choice in chunk.get("choices") or ():
            if not isinstance(choice, dict) or choice.get("index"):
                continue
            delta: Json = choice.get("delta") or {}
            self._message["content"] += delta.get("content") or choice.get("text") or ""
            for name in ("reasoning_content", "reasoning"):
                if delta.get(name):
                    self._message[name] = self._message.get(name, "") + delta[name]
            for call in delta.get("tool_calls") or ():
                self._add_call(call)
            self._choice["token_ids"] += choice.get("token_ids") or []
            logprobs = choice.get("logprobs") or {}
            self._choice["logprobs"]["content"] += logprobs.get("content") or [
                {"logprob": value} for value in logprobs.get("token_logprobs") or ()
            ]
            self._choice["finish_reason"] = choice.get("finish_reason") or self._choice["finish_reason"]

    def _add_call(self, call: Json) -> None:
        calls = self._message.setdefault("tool_calls", [])
        function = call.get("function") or {}
        if call.get("index", 0) >= len(calls):
            calls.append({"id": call.get("id"), "type": "function", "function": {"name": "", "arguments": ""}})
        known = calls[call.get("index", 0)]["function"]
        known["name"] += function.get("name") or ""
        known["arguments"] += function.get("arguments") or ""

    def whole(self) -> Json:
        return {**self._whole, "object": "chat.completion", "choices": [{**self._choice, "message": self._message}]}


def _parsed(endpoint: Endpoint, answer: bytes) -> Json:
    try:
        value = orjson.loads(answer)
    except ValueError as error:
        raise EngineFailed(f"{endpoint.endpoint} sent no JSON ({error})") from error
    choices = value.get("choices") if isinstance(value, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise EngineFailed(f"{endpoint.endpoint} sent no choices: {answer[:200].decode(errors='replace')}")
    return value


def _capture(whole: Json, logprobs_needed: bool) -> Captured:
    choice, *others = whole["choices"]
    captured = Captured(finish_reason=choice.get("finish_reason"))
    logprobs = choice.pop("logprobs", None)
    try:
        prompt = whole.pop("prompt_token_ids", None) or choice.pop("prompt_token_ids", None)
        captured.prompt_ids = np.array(prompt or [], dtype=np.int32)
        captured.sampled_ids = np.array(choice.pop("token_ids", None) or [], dtype=np.int32)
        captured.logprobs = _logprobs(logprobs)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        captured.problem = f"unusable token ids or log-probabilities ({error})"
    captured.rest = {**whole, "choices": [choice, *others]}
    try:
        check_depth(captured.rest)
    except ValueError as error:
        captured.rest, captured.problem = {}, f"an unusable answer ({error})"
    message = choice.get("message")
    if isinstance(message, dict):
        captured.message = canonical_message(message)
    if captured.problem is not None or not logprobs_needed:
        return captured
    if not len(captured.prompt_ids) or not len(captured.sampled_ids):
        captured.problem = "the engine returned no token ids"
    elif captured.logprobs is not None and len(captured.logprobs) != len(captured.sampled_ids):
        captured.problem = "as many log-probabilities as token ids were expected"
    return captured


def _logprobs(logprobs: Any) -> np.ndarray | None:
    if not isinstance(logprobs, dict):
        return None
    content = logprobs.get("content")
    values = [entry["logprob"] for entry in content] if content is not None else logprobs.get("token_logprobs")
    if not values:
        return None
    array = np.array(values, dtype=np.float32)
    if not np.isfinite(array).all():
        raise ValueError("a log-probability is not finite")
    return array


def _object(data: bytes) -> Json:
    try:
        value = orjson.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _number(value: Any, default: float) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else default
