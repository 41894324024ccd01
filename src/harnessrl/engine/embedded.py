"""The embedded engine: continuous batching over the trainer's own parameters, in a thread of its own.

Between the first in-place write of an update and its publish no step runs; what was in flight then has ended
with `abort`, and publishing drops every key and value. So each answer comes from one policy version whole.
"""

import logging
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import nn

from harnessrl.engine.attention import Segment, SlotCache, Step
from harnessrl.engine.sampling import Sampling, sample
from harnessrl.engine.slots import Slots
from harnessrl.engine.weights import share

log = logging.getLogger(__name__)

FinishReason = Literal["stop", "length", "abort", "error"]
WORTH_WAITING = 16
"""A prompt waits for another's prefill if that saves it at least so many tokens."""


@dataclass(frozen=True)
class Delta:
    """What a step adds to a request; the last one has a finish reason."""

    token_ids: list[int]
    logprobs: list[float]
    version: int
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(frozen=True)
class Answer:
    """A whole answer; `logprobs` are natural logarithms, of the distribution sampled from."""

    token_ids: list[int]
    logprobs: list[float]
    version: int
    finish_reason: FinishReason
    error: str | None = None


@dataclass
class Stats:
    """Counts since the start."""

    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    shared_tokens: int = 0
    """Prompt tokens not computed, since their keys and values were there."""
    steps: int = 0
    rows: int = 0
    """Sum over steps of the requests in the batch: rows / steps is its mean occupancy."""
    step_seconds: float = 0.0
    running: int = 0
    waiting: int = 0
    version: int = 0


class PromptTooLong(ValueError):
    def __init__(self, tokens: int, max_len: int):
        super().__init__(
            f"The prompt has {tokens} tokens, but the context holds {max_len}, prompt and answer together: "
            "shorten the prompt or start the engine with a larger --max-len."
        )


@dataclass(eq=False)
class _Request:
    id: str
    prompt: np.ndarray
    sampling: Sampling
    max_tokens: int
    emit: Callable[[Delta], None]
    draw: random.Random
    slot: int = -1
    sampled: int = 0
    aborted: bool = field(default=False)


class EmbeddedEngine:
    """Token ids in, sampled ids and log-probabilities out, many requests at once.

    `model` is a transformers causal LM, or a peft model around one, that may be trained at the same time: its
    parameters are used in place. `max_len` is the context, prompt and answer together; `max_answer` bounds answers,
    whatever a request asks for. All methods may be called from any thread.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_batch: int = 32,
        max_len: int = 2048,
        max_answer: int | None = None,
        seed: int = 0,
        version: int = 0,
    ):
        self._model, self._merge = share(model)
        self._device = next(model.parameters()).device
        config = self._model.config.get_text_config()
        self.max_batch = max_batch
        self.max_len = min(max_len, getattr(config, "max_position_embeddings", None) or max_len)
        eos = config.eos_token_id
        self._max_answer = max_answer or self.max_len
        self.eos_token_ids = frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])
        self.vocab_size: int = config.vocab_size
        self.version = version
        self._prefill_budget = 256 if self._device.type == "cpu" else 2048
        self._cache = SlotCache(2 * max_batch, self.max_len)
        self._slots = Slots(2 * max_batch, self.max_len)
        self._seed = seed
        self._submitted = 0
        self._stats = Stats()
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []
        self._changed = threading.Condition()
        self._stepping = self._paused = self._updating = self._stopped = self._forgetting = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ------------------------------------------------------------------------------------- requests

    def submit(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        emit: Callable[[Delta], None],
        request_id: str | None = None,
    ) -> str:
        """Queue a request; `emit` is called from the engine's thread and must not block.

        Raises PromptTooLong, and ValueError for an empty prompt or ids outside the vocabulary.
        """
        prompt = np.asarray(token_ids, dtype=np.int64)
        if prompt.ndim != 1 or not len(prompt):
            raise ValueError("The prompt is empty: give at least one token id.")
        if prompt.min() < 0 or prompt.max() >= self.vocab_size:
            raise ValueError(f"The prompt has token ids outside the model's vocabulary of {self.vocab_size}.")
        if len(prompt) >= self.max_len:
            raise PromptTooLong(len(prompt), self.max_len)
        with self._changed:
            if self._stopped:
                raise RuntimeError("The engine is stopped.")
            seed = sampling.seed if sampling.seed is not None else f"{self._seed}:{self._submitted}"
            max_tokens = min(sampling.max_tokens, self._max_answer, self.max_len - len(prompt))
            request_id = request_id or uuid.uuid4().hex
            draw = random.Random(seed)
            self._waiting.append(_Request(request_id, prompt, sampling, max_tokens, emit, draw))
            self._submitted += 1
            self._changed.notify_all()
        return request_id

    def abort(self, *request_ids: str) -> None:
        """End these requests with the tokens so far; unknown ids are ignored."""
        with self._changed:
            for request in self._waiting + self._running:
                request.aborted |= request.id in request_ids
            if not self._stepping:
                self._reap()
            self._changed.notify_all()

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Answer]:
        """The answers to a batch of prompts, in their order; blocks."""
        deltas: list[list[Delta]] = [[] for _ in prompts]
        left = threading.Semaphore(0)

        def collect(index: int) -> Callable[[Delta], None]:
            def emit(delta: Delta) -> None:
                deltas[index].append(delta)
                if delta.finish_reason:
                    left.release()

            return emit

        for index, prompt in enumerate(prompts):
            self.submit(prompt, sampling, collect(index))
        for _ in prompts:
            left.acquire()
        return [join(parts) for parts in deltas]

    def stats(self) -> Stats:
        with self._changed:
            now = {"running": len(self._running), "waiting": len(self._waiting), "version": self.version}
            return Stats(**{**vars(self._stats), **now})

    # -------------------------------------------------------------------------------------- updates

    def pause(self) -> None:
        """End what is in flight with `abort`, wait until no step runs, and hold what comes until `resume`."""
        with self._changed:
            if not self._paused:
                self._paused = True
                self._abort_all()
            self._changed.wait_for(lambda: not self._stepping)
            self._reap()

    def resume(self) -> None:
        """Go on after `pause`. Raises RuntimeError while an update is not published."""
        with self._changed:
            if self._updating:
                raise RuntimeError("The weights are being updated: the engine resumes when they are published.")
            self._paused = False
            self._changed.notify_all()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Write weights in place inside this block; `publish`, in it or after it, lets the engine go on."""
        with self._changed:
            self._updating = True
            self.pause()
        yield

    def publish(self, version: int) -> None:
        """The weights are those of this policy version: merge adapters, drop every key and value, go on."""
        with self._changed:
            self._updating = True
            self.pause()
            self._merge()
            self._cache.drop()
            self._slots.forget()
            self.version = version
            self._updating = False
            self.resume()

    def reset_prefix_cache(self) -> None:
        """Forget the prompts of finished requests, at the latest after the step under way."""
        with self._changed:
            self._forgetting = True
            if not self._stepping:
                self._reap()

    # --------------------------------------------------------------------------------------- thread

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End every request with `abort`, and the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()
        with self._changed:
            self._abort_all()
            self._reap()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._stepping = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._stopped or (not self._paused and self._reap()))
                if self._stopped:
                    return
                self._stepping = True
            try:
                self._step()
            except Exception as error:
                log.exception("The engine's step failed")
                self._fail(str(error) or repr(error))

    def _abort_all(self) -> None:
        for request in self._waiting + self._running:
            request.aborted = True

    def _reap(self) -> bool:
        """Between two steps: do what was asked for during the last; whether any requests are left."""
        if self._forgetting:
            self._slots.forget()
            self._forgetting = False
        for request in [r for r in self._waiting + self._running if r.aborted]:
            self._finish(request, Delta([], [], self.version, "abort"))
        return bool(self._waiting or self._running)

    def _finish(self, request: _Request, last: Delta) -> None:
        (self._running if request.slot >= 0 else self._waiting).remove(request)
        if request.slot >= 0:
            self._slots.release(request.slot)
        request.emit(last)

    def _fail(self, message: str) -> None:
        """After an unexpected error the cache's content is unknown: end every request, and start afresh."""
        with self._changed:
            for request in self._waiting + self._running:
                self._finish(request, Delta([], [], self.version, "error", message))
            self._slots.forget()
            self._cache.drop()

    @torch.no_grad()
    def _step(self) -> None:
        """Admit what fits, compute the next tokens of every running request, sample where a prompt is complete."""
        began = time.perf_counter()
        with self._changed:
            waiting = list(self._waiting)
        for request in waiting:
            if len(self._running) < self.max_batch:
                self._admit(request)
        batch = self._schedule()
        ids = np.concatenate([self._slots.ids[s.slot, s.start : s.end] for _, s in batch])
        step = Step(self._cache, [s for _, s in batch], self._device)
        ends = np.cumsum([s.length for _, s in batch]) - 1
        known = self._slots.known
        complete = [(r, int(end)) for (r, s), end in zip(batch, ends, strict=True) if s.end == known[s.slot]]
        logits_BV = self._model(
            input_ids=torch.from_numpy(ids).to(self._device)[None],
            position_ids=step.positions_N[None],
            use_cache=False,
            logits_to_keep=torch.tensor([end for _, end in complete], dtype=torch.long, device=self._device),
            slot_step=step,
        ).logits[0]
        for _, segment in batch:
            self._slots.filled[segment.slot] = segment.end
        self._stats.steps += 1
        self._stats.rows += len(batch)
        self._stats.prefilled_tokens += len(ids) - sum(r.sampled > 0 for r, _ in batch)
        if complete:
            self._sample([r for r, _ in complete], logits_BV)
        self._stats.step_seconds += time.perf_counter() - began

    def _admit(self, request: _Request) -> None:
        """Give the request a slot that starts with the longest prefix computed already, unless one is under way."""
        common = self._slots.common(request.prompt).clip(max=len(request.prompt) - 1)
        ready = np.minimum(common, self._slots.filled)
        source = int(ready.argmax())
        length = int(ready[source])
        if int(common.max()) - length >= WORTH_WAITING:
            return
        target = self._slots.take(request.prompt, source, length)
        if target != source and length:
            self._cache.copy(source, target, length)
        self._stats.shared_tokens += length
        with self._changed:
            request.slot = target
            self._waiting.remove(request)
            self._running.append(request)

    def _schedule(self) -> list[tuple[_Request, Segment]]:
        """One token of each request that samples, and as many of the others' prompts as the budget allows."""
        ones: list[tuple[_Request, Segment]] = []
        long: list[tuple[_Request, Segment]] = []
        budget = self._prefill_budget
        for request in self._running:
            start = int(self._slots.filled[request.slot])
            left = int(self._slots.known[request.slot]) - start
            length = left if left == 1 else min(left, budget)
            if left > 1:
                budget -= length
            if length:
                segment = Segment(request.slot, start, length)
                (ones if length == 1 else long).append((request, segment))
        return ones + long

    def _sample(self, requests: list[_Request], logits_BV: torch.Tensor) -> None:
        uniforms = [r.draw.random() for r in requests]
        ids, logprobs = sample(logits_BV, [r.sampling for r in requests], uniforms)
        with self._changed:
            self._stats.sampled_tokens += len(ids)
            for request, token, logprob in zip(requests, ids, logprobs, strict=True):
                request.sampled += 1
                self._slots.append(request.slot, token)
                stop = token in request.sampling.stop_token_ids
                length = request.sampled == request.max_tokens
                reason: FinishReason | None = "stop" if stop else "length" if length else None
                delta = Delta([token], [logprob], self.version, reason)
                if reason:
                    self._finish(request, delta)
                else:
                    request.emit(delta)


def join(deltas: Sequence[Delta]) -> Answer:
    """The answer that a request's deltas make up."""
    last = deltas[-1]
    assert last.finish_reason is not None
    return Answer(
        token_ids=[t for d in deltas for t in d.token_ids],
        logprobs=[p for d in deltas for p in d.logprobs],
        version=last.version,
        finish_reason=last.finish_reason,
        error=last.error,
    )
