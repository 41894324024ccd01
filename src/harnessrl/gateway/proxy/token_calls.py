"""A call at a token endpoint: messages to ids, ids sampled, ids to the answer."""

import asyncio
import time

import numpy as np
import orjson

from harnessrl.gateway.chat.canonical import Answer, ChatRequest, ContextOverflow, Delta, RequestError, Usage
from harnessrl.gateway.chat.continuation import Memory, Prompt
from harnessrl.gateway.chat.renderer import Chat, load_chat
from harnessrl.gateway.chat.stream import PLAIN, StopMatcher, StreamParser, Whole
from harnessrl.gateway.dialects import AnswerStream, Dialect
from harnessrl.gateway.dialects.registry import BY_NAME
from harnessrl.gateway.proxy.attempts import Attempt
from harnessrl.gateway.proxy.context import Context, Services
from harnessrl.gateway.proxy.engine import EngineFailed
from harnessrl.gateway.proxy.exchange import ClientGone, Exchange
from harnessrl.gateway.proxy.gate import Paused
from harnessrl.gateway.proxy.generation import Generation
from harnessrl.gateway.proxy.routing import Route
from harnessrl.gateway.proxy.sampling import Plan, overridden, plan
from harnessrl.gateway.store import CallRecord
from harnessrl.schemas import Json, Mode

__all__ = ["TokenCall"]

_COALESCE_SECONDS = 0.05
_THREAD_CHARS = 40_000
"""Conversations with more text are rendered off the event loop, unless they only go on."""
_LARGE_CHARS = 500_000
"""Of these even looking whether they go on takes too long."""
_COUNTED_BYTES = 2 << 20
"""Larger requests are first counted, in pieces: to make a list of millions of ids stops all other threads."""
_COUNTED_AT_ONCE = 100_000
_LONGEST_CONTEXT = 1_000_000
"""Where an engine doesn't say."""


class TokenCall:
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
        self._stream: AnswerStream | None = None
        self._opening = b""
        self._agent: str | None = None
        self._headers: list[tuple[bytes, bytes]] = []

    async def serve(self) -> None:
        request = await self._context.aside(lambda: self._dialect.parse(self._body))
        self._agent = self._route.agent or self._services.routing.agent(request.messages)
        chat = chat_of(self._services, self._context.mode, self._route, request)
        await self._context.attempt.rebuild_once(lambda attempt: self._rebuild(attempt, chat))
        if self._context.size > _COUNTED_BYTES:
            try:
                await asyncio.to_thread(_check_length, chat, request, await self._limit())
            except ContextOverflow as error:
                await self._keep_refused(chat, request, Prompt(np.zeros(0, dtype=np.int32), "first"), error)
                raise
        prompt = await prompt_of(chat, self._context.attempt.memory, request)
        if prompt.confirms is not None:
            await self._store.set_delivered(prompt.confirms, True)
        how = await self._plan(chat, request, prompt)
        self._headers.append((b"x-harnessrl-continuity", prompt.continuity.encode()))
        self._headers += overridden(how.notes)
        if request.stream:
            self._stream = self._dialect.stream(request, self._context.call_id, self._route.model, len(prompt.ids))
            self._opening = self._stream.start()
        samples = [Sample(self._context.call_id, i, chat, request, prompt, how) for i in range(request.n)]
        try:
            await self._exchange.run(self._sample(samples))
        except (ClientGone, EngineFailed, Paused) as failure:
            await self._end_failed(samples, failure)
        else:
            await self._end(samples, request)

    # ---------------------------------------------------------------------------------- before sampling

    async def _plan(self, chat: Chat, request: ChatRequest, prompt: Prompt) -> Plan:
        settings, mode, endpoint = self._services.settings, self._context.mode, self._route.endpoints[0]
        trainable = self._route.trainable
        fixed = settings.val_temperature if mode == "val" else settings.train_temperature if trainable else None
        facts = await self._services.engines.facts(endpoint)
        try:
            how = plan(request, mode, fixed, len(prompt.ids), await self._limit(), chat.stop_ids, trainable)
        except RequestError as error:
            await self._keep_refused(chat, request, prompt, error)
            raise
        if request.grammar is not None:
            if facts.get("owned_by") != "vllm":
                raise RequestError(
                    "This engine can't constrain its answers: leave response_format out, or put vLLM behind.",
                    param="response_format",
                )
            schema = request.grammar.get("schema")
            how.params["structured_outputs"] = {"json": schema} if schema else {"json_object": True}
        return how

    async def _limit(self) -> int | None:
        """The engine's context, in tokens."""
        endpoint = self._route.endpoints[0]
        return endpoint.max_model_len or (await self._services.engines.facts(endpoint)).get("max_model_len")

    async def _rebuild(self, attempt: Attempt, chat: Chat) -> None:
        """Remember what an earlier gateway recorded of this attempt."""
        for record in await self._store.call_records(attempt.rollout_id, attempt.attempt_id):
            if record.status != "ok" or not len(record.sampled_ids):
                continue
            request = BY_NAME[record.dialect].parse(record.request)
            said = record.sampled_ids.tolist()
            whole = Whole(chat.text(said), "")
            if request.prompt is None:
                whole = chat.parse(said, record.prompt_ids, request.tools, record.call_id)
            answer = Answer(whole.content, whole.reasoning, whole.tool_calls, "stop", Usage(0, 0))
            parent = record.parent if record.continuity == "exact" else None
            attempt.memory.add(record.call_id, request, record.prompt_ids, parent, record.sampled_ids, answer)

    # ----------------------------------------------------------------------------------------- sampling

    async def _sample(self, samples: list["Sample"]) -> None:
        running = [asyncio.ensure_future(self._one(sample)) for sample in samples]
        try:
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _one(self, sample: "Sample") -> None:
        services, context = self._services, self._context
        ids_in = sample.generation.run(
            services,
            context,
            self._route.model,
            sample.call_id,
        )
        try:
            async for ids in ids_in:
                sample.feed(ids)
                if sample.stops.matched is not None:
                    sample.generation.finish_reason = "stop"
                    return
                if self._stream is not None and time.monotonic() - sample.sent_at >= _COALESCE_SECONDS:
                    data = sample.take(self._stream)
                    if data:
                        sample.sent_at = time.monotonic()
                        await self._exchange.write(self._take_opening() + data, self._headers)
        finally:
            await ids_in.aclose()

    def _take_opening(self) -> bytes:
        opening, self._opening = self._opening, b""
        return opening

    # ------------------------------------------------------------------------------------ after sampling

    async def _end(self, samples: list["Sample"], request: ChatRequest) -> None:
        answers = [sample.answer() for sample in samples]
        whole = self._dialect.whole(request, answers, self._context.call_id, self._route.model)
        for sample, answer in zip(samples, answers, strict=True):
            record = self._record(sample)
            record.response = whole if sample.index == 0 else {}
            record.delivered = not self._exchange.gone
            await self._services.keep(record, self._context.upstream)
            parent = record.parent if record.continuity == "exact" else None
            memory = self._context.attempt.memory
            memory.add(sample.call_id, request, record.prompt_ids, parent, record.sampled_ids, answer)
        if self._stream is None:
            delivered = await self._exchange.answer_json(200, whole, self._headers)
        else:
            data = self._take_opening() + b"".join(sample.take(self._stream) for sample in samples)
            delivered = await self._exchange.end(data + b"".join(self._stream.end(answers)), self._headers)
        if not delivered:
            for sample in samples:
                await self._store.set_delivered(sample.call_id, False)

    async def _end_failed(self, samples: list["Sample"], failure: Exception) -> None:
        if isinstance(failure, EngineFailed):
            error = RequestError(str(failure), failure.status, "engine_failed", retry_after=failure.retry_after)
        else:
            error = RequestError(str(failure) or "the client left", 499, "undelivered")
        for sample in samples:
            if sample.generation.sampled or isinstance(failure, EngineFailed):
                await self._services.keep(self._failed_record(sample, error), self._context.upstream)
        if isinstance(failure, EngineFailed):
            raise error from failure
        raise failure

    async def _keep_refused(self, chat: Chat, request: ChatRequest, prompt: Prompt, error: RequestError) -> None:
        """A call that no engine has seen is the harness's all the same: it says whose failure its end is."""
        sample = Sample(self._context.call_id, 0, chat, request, prompt, Plan({}, 1.0))
        await self._services.keep(self._failed_record(sample, error), self._context.upstream)

    def _failed_record(self, sample: "Sample", error: RequestError) -> CallRecord:
        record = self._record(sample)
        said = self._dialect.error(error).get("error")
        record.fail(error.status, error.code, said if isinstance(said, dict) else {"message": str(error)})
        return record

    def _record(self, sample: "Sample") -> CallRecord:
        generation, context, route = sample.generation, self._context, self._route
        endpoint = generation.endpoint or route.endpoints[0]
        logprobs = generation.logprobs if "logprobs" in generation.params else None
        reason = None if route.trainable else "helper model"
        if sample.request.grammar is not None:
            reason = "constrained by a grammar"
        return CallRecord(
            call_id=sample.call_id,
            rollout_id=context.attempt.rollout_id,
            attempt_id=context.attempt.attempt_id,
            mode=context.mode,
            dialect=self._dialect.name,
            model=route.model,
            endpoint=endpoint.endpoint,
            model_version=generation.versions[-1][0] if generation.versions else endpoint.version,
            agent=self._agent,
            request={**self._body, "harnessrl": {"sampling": generation.params, "notes": sample.how.notes}},
            prompt_ids=generation.prompt,
            sampled_ids=np.asarray(generation.sampled, dtype=np.int32),
            logprobs=None if logprobs is None else np.asarray(logprobs, dtype=np.float32),
            versions=generation.versions,
            temperature=sample.how.temperature,
            continuity=sample.prompt.continuity,
            parent=sample.prompt.parent,
            started_at=context.started_at,
            latency_ms=(time.perf_counter() - context.clock) * 1000,
            trainable=reason is None,
            untrainable_reason=reason,
            held_ms=context.held * 1000,
            retry_count=generation.tries,
            prefilled_again=generation.prefilled_again,
            usage={
                "prompt_tokens": len(generation.prompt),
                "completion_tokens": len(generation.sampled),
                "total_tokens": len(generation.prompt) + len(generation.sampled),
            },
            finish_reason=generation.finish_reason,
        )


def chat_of(services: Services, mode: Mode, route: Route, request: ChatRequest) -> Chat:
    """The chat of the route's model under the request's template options. Raises `RequestError`."""
    endpoint = route.endpoints[0]
    try:
        chat = load_chat(endpoint.tokenizer or endpoint.model, endpoint.renderer)
    except ValueError as error:
        raise RequestError(str(error), 503, "no_renderer") from error
    trains = route.trainable and mode == "train"
    if trains and not chat.can_continue and not services.settings.accept_rendered:
        raise RequestError(
            f"The renderer {chat.config['name']!r} can't continue a conversation token by token: register one of "
            "the model's family, or accept `continuity: rendered`.",
            503,
            "no_renderer",
        )
    try:
        return chat.with_options(request.template)
    except ValueError as error:
        raise RequestError(f"chat_template_kwargs: {error}", param="chat_template_kwargs") from error


async def prompt_of(chat: Chat, memory: Memory, request: ChatRequest) -> Prompt:
    """Raises `RequestError` where the conversation can't be rendered."""
    size = sum(len(m["content"]) for m in request.messages)
    try:
        large = size + 10 * len(request.messages) > _LARGE_CHARS
        if large or (size > _THREAD_CHARS and not memory.continues(request)):
            return await asyncio.to_thread(memory.prompt, chat, request)
        return memory.prompt(chat, request)
    except ValueError as error:
        raise RequestError(f"These messages can't be rendered: {error}", param="messages") from error


def _check_length(chat: Chat, request: ChatRequest, limit: int | None) -> None:
    """Raises `ContextOverflow` for what is about twice too long or more, without rendering it."""
    limit, tokens = limit or _LONGEST_CONTEXT, 0
    text = orjson.dumps([request.prompt, request.messages, request.tools], default=str).decode()
    for begin in range(0, len(text), _COUNTED_AT_ONCE):
        tokens += len(chat.tokenizer.encode(text[begin : begin + _COUNTED_AT_ONCE]))
        if tokens > 2 * limit:
            raise ContextOverflow(tokens, limit)


async def count_tokens(services: Services, dialect: Dialect, route: Route, memory: Memory, body: Json) -> int:
    """Length of the prompt that the request would get."""
    if not route.endpoints or route.endpoints[0].kind != "token":
        raise RequestError("Tokens can be counted only where the gateway renders: at token endpoints", 404)
    request = dialect.parse(body)
    chat = chat_of(services, "val", route, request)
    return len((await prompt_of(chat, memory, request)).ids)


class Sample:
    """One of a request's `n` answers, as it grows."""

    def __init__(self, call_id: str, index: int, chat: Chat, request: ChatRequest, prompt: Prompt, how: Plan):
        self.call_id = call_id if index == 0 else f"{call_id}-{index}"
        self.index = index
        self.request = request
        self.prompt = prompt
        self.how = how
        self.sent_at = 0.0
        """When a piece of it last went out."""
        self.stops = StopMatcher(request.sampling.stop)
        self._chat = chat
        self._tools = [] if request.tool_choice == "none" else request.tools
        self._forced = chat.forced_call(request.tool_choice) if self._tools else []
        forced = np.asarray(self._forced, dtype=np.int32)
        self.generation = Generation(np.concatenate([prompt.ids, forced]), how.params)
        self._said = list(self._forced)
        self._pending: list[Delta] = []
        self._detokenizer = chat.detokenizer()
        self._parser = self._stream_parser()
        self._watched = request.stream or bool(request.sampling.stop)
        if self._watched and self._forced:
            self._parser.feed(self._detokenizer.feed(self._forced))

    def _whole(self) -> Whole:
        if self.request.prompt is not None:
            return Whole(self._chat.text(self._said), "")
        return self._chat.parse(self._said, self.prompt.ids, self._tools, self.call_id)

    def _stream_parser(self) -> StreamParser:
        if self.request.prompt is not None:
            return StreamParser(PLAIN, self._whole, in_reasoning=False, tools=False)
        return self._chat.stream(self._said, self.prompt.ids, self._tools, self.call_id)

    def feed(self, ids: list[int]) -> None:
        """Take new ids; what may go out of them waits for `take`."""
        self._said += ids
        if self._watched:
            spoken = [i for i in ids if i not in self._chat.stop_ids]
            self._pending.append(self._parser.feed(self.stops.feed(self._detokenizer.feed(spoken))))

    def take(self, stream: AnswerStream) -> bytes:
        """The events of what has gathered."""
        pending, self._pending = self._pending, []
        return b"".join(stream.delta(delta, self.index) for delta in pending if delta)

    def answer(self) -> Answer:
        """The whole, once sampling has ended."""
        generation, matched = self.generation, self.stops.matched
        whole = self._whole()
        if matched is not None:
            whole.content = whole.content.partition(matched)[0]
            whole.reasoning = whole.reasoning.partition(matched)[0]
        self._pending.append(self._parser.finish(whole))
        reason = "tool_calls" if whole.tool_calls else generation.finish_reason or "stop"
        usage = Usage(len(generation.prompt), len(generation.sampled))
        answer = Answer(whole.content, whole.reasoning, whole.tool_calls, reason, usage, matched)
        if self.request.logprobs:
            answer.token_texts = [self._chat.tokenizer.decode([i]) for i in generation.sampled]
            answer.token_logprobs = generation.logprobs
        return answer
