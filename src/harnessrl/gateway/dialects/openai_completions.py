"""OpenAI Completions: the harness writes the prompt itself, as text or token ids."""

import time
from collections.abc import Iterator

from harnessrl.gateway.chat.canonical import Answer, ChatRequest, Delta, RequestError
from harnessrl.gateway.dialects.fields import OpenAIShape, boolean, event, integer, optional, sampling, usage_of
from harnessrl.schemas import Json

__all__ = ["OpenAICompletions"]

_IGNORED = ("logit_bias", "bad_words", "truncate_prompt_tokens")


class OpenAICompletions(OpenAIShape):
    name = "openai_completions"
    chat_path = "/completions"

    def parse(self, body: Json) -> ChatRequest:
        for field in ("suffix", "echo"):
            if body.get(field):
                raise RequestError(f"{field} is not supported", param=field)
        return ChatRequest(
            model=optional(body, "model", str) or "",
            messages=[],
            tools=[],
            sampling=sampling(body, _IGNORED),
            stream=boolean(body, "stream"),
            n=integer(body, "n", 1, 128) or 1,
            logprobs=integer(body, "logprobs", 0) is not None,
            prompt=_prompt(body.get("prompt")),
            options={"include_usage": bool((optional(body, "stream_options", dict) or {}).get("include_usage"))},
        )

    def whole(self, request: ChatRequest, answers: list[Answer], call_id: str, model: str) -> Json:
        choices = [_choice(i, a.content, a.finish_reason, _logprobs(request, a)) for i, a in enumerate(answers)]
        return {**_base(call_id, model), "choices": choices, "usage": usage_of(answers)}

    def stream(self, request: ChatRequest, call_id: str, model: str, prompt_tokens: int) -> "CompletionStream":
        return CompletionStream(request, _base(call_id, model))


class CompletionStream:
    def __init__(self, request: ChatRequest, base: Json):
        self._request = request
        self._base = base

    def start(self) -> bytes:
        return b""

    def delta(self, delta: Delta, index: int = 0) -> bytes:
        return event({**self._base, "choices": [_choice(index, delta.content, None, None)]})

    def end(self, answers: list[Answer]) -> Iterator[bytes]:
        for index, answer in enumerate(answers):
            last = _choice(index, "", answer.finish_reason, _logprobs(self._request, answer))
            yield event({**self._base, "choices": [last]})
        if self._request.options.get("include_usage"):
            yield event({**self._base, "choices": [], "usage": usage_of(answers)})
        yield b"data: [DONE]\n\n"


def _base(call_id: str, model: str) -> Json:
    return {"id": f"cmpl-{call_id}", "object": "text_completion", "created": int(time.time()), "model": model}


def _choice(index: int, text: str, finish_reason: str | None, logprobs: Json | None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprobs(request: ChatRequest, answer: Answer) -> Json | None:
    if not request.logprobs:
        return None
    offsets, at = [], 0
    for text in answer.token_texts:
        offsets.append(at)
        at += len(text)
    return {
        "tokens": answer.token_texts,
        "token_logprobs": answer.token_logprobs,
        "top_logprobs": None,
        "text_offset": offsets,
    }


def _prompt(prompt: object) -> str | list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    ids = prompt if isinstance(prompt, list) else []
    if ids and all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 1 << 31 for i in ids):
        return ids
    raise RequestError("prompt must be one text or one list of token ids", param="prompt")
