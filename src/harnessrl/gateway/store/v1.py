"""The event shapes of Agent Lightning v1.0: a call as a `model_request` event, and the triplet form."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import orjson

from harnessrl.schemas import Event, Json

__all__ = ["model_request", "triplets"]


def model_request(
    facts: Json,
    http_status: int,
    request: Json,
    response: Json,
    prompt_ids: np.ndarray,
    sampled_ids: np.ndarray,
    logprobs: np.ndarray | None,
) -> Json:
    """The data of a `model_request` event: v1.0's keys exactly, ids and log-probabilities put back."""
    return {
        "model": facts["model"],
        "model_version": facts["model_version"],
        "request": request,
        "response": _response(response, facts["error"], prompt_ids, sampled_ids, logprobs),
        "server": {"model": facts["model"], "endpoint": facts["endpoint"], "version": facts["model_version"]},
        "latency_ms": facts["latency_ms"],
        "http_status": http_status,
        "status": facts["status"],
        "retry_count": facts["retry_count"],
        "usage": facts["usage"],
        "finish_reason": facts["finish_reason"],
    }


def _response(
    response: Json, error: Json | None, prompt_ids: np.ndarray, sampled_ids: np.ndarray, logprobs: np.ndarray | None
) -> Json:
    if error is not None:
        return {"error": error, **response}
    if not len(prompt_ids):
        return response
    choices = response.get("choices")
    first, *others = choices if isinstance(choices, list) and choices else [{"index": 0}]
    first = {**first, "token_ids": sampled_ids}
    if logprobs is not None:
        content = [_logprob(i, p) for i, p in zip(sampled_ids.tolist(), logprobs.tolist(), strict=True)]
        first["logprobs"] = {"content": content}
    return {**response, "prompt_token_ids": prompt_ids, "choices": [first, *others]}


def _logprob(token_id: int, logprob: float) -> Json:
    """One entry of `logprobs.content`; the token as vLLM writes it with `--return-tokens-as-token-ids`."""
    return {"token": f"token_id:{token_id}", "logprob": logprob, "bytes": None, "top_logprobs": []}


def triplets(events: Iterable[Event]) -> list[Event]:
    """v1.0's trimmed form. Of model requests with the same prompt only the last is kept, at its place."""
    trimmed: list[Event] = []
    last: dict[bytes, int] = {}
    for event in events:
        if event.event_type == "reward":
            data = {k: event.data[k] for k in ("value", "source", "reason") if k in event.data}
        elif event.event_type == "model_request":
            data = _triplet(event.data)
            last[orjson.dumps(data["prompt_token_ids"], option=orjson.OPT_SERIALIZE_NUMPY)] = len(trimmed)
        else:
            data = event.data
        trimmed.append(event.model_copy(update={"data": data}))
    kept = set(last.values())
    return [e for i, e in enumerate(trimmed) if e.event_type != "model_request" or i in kept]


def _triplet(data: Json) -> Json:
    response = data.get("response")
    response = response if isinstance(response, dict) else {}
    choices = response.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    server = data.get("server")
    server = server if isinstance(server, dict) else {}
    out: Json = {
        "prompt_token_ids": _ids(response.get("prompt_token_ids"), choice.get("prompt_token_ids")),
        "response_token_ids": _ids(choice.get("token_ids")),
        "response_log_probs": _logprobs(choice.get("logprobs")),
        "server": {"model": server.get("model"), "version": server.get("version")},
    }
    out |= {k: data[k] for k in ("http_status", "status") if k in data}
    if "error" in response:
        out["error"] = response["error"]
    return out


def _ids(*candidates: Any) -> Any:
    for ids in candidates:
        if isinstance(ids, np.ndarray) or (isinstance(ids, list) and all(type(i) is int for i in ids)):
            return ids
    return []


def _logprobs(logprobs: Any) -> list[float] | None:
    if not isinstance(logprobs, dict):
        return None
    content, values = logprobs.get("content"), logprobs.get("token_logprobs")
    if isinstance(content, list):
        values = [item.get("logprob") if isinstance(item, dict) else None for item in content]
    if not isinstance(values, list):
        return None
    finite = [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]
    return finite if len(finite) == len(values) else None
