"""The behaviour distribution, known (invariant 10): every sampling field is sent, none left to the engine."""

import re
from dataclasses import dataclass, field

from harnessrl.gateway.chat.canonical import ChatRequest, ContextOverflow
from harnessrl.schemas import Json, Mode

__all__ = ["Plan", "overridden", "plan"]

_NEUTRAL: dict[str, float] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}


@dataclass(slots=True)
class Plan:
    """How one request is sampled."""

    params: Json
    """vLLM's `sampling_params`, whole."""
    temperature: float
    notes: list[str] = field(default_factory=list)
    """What of the request was overridden: for the record and for the `x-harnessrl-overridden` header."""


def plan(
    request: ChatRequest,
    mode: Mode,
    fixed_temperature: float | None,
    prompt_len: int,
    max_model_len: int | None,
    stop_ids: list[int],
    trainable: bool,
) -> Plan:
    """`fixed_temperature` is the mode's, if it has one.

    Training on a policy (`trainable`) samples from the model itself; elsewhere the harness may have its way. Raises
    `ContextOverflow` where nothing is left to sample.
    """
    asked, notes = request.sampling, [f"{name} ignored" for name in request.sampling.unsupported]
    strict = mode == "train" and trainable
    temperature = 1.0 if asked.temperature is None else asked.temperature
    if fixed_temperature is not None and temperature != fixed_temperature:
        if asked.temperature is not None:
            notes.append(f"temperature={fixed_temperature:g}")
        temperature = fixed_temperature
    params: Json = {"temperature": temperature}
    for name, neutral in _NEUTRAL.items():
        value = getattr(asked, name)
        value = neutral if value is None or (name == "top_k" and value < 0) else value
        if strict and value != neutral:
            notes.append(f"{name}={neutral:g}")
            value = neutral
        params[name] = value
    if asked.seed is not None and strict:
        notes.append("seed ignored")  # or the rollouts of a group would all be the same
    elif asked.seed is not None:
        params["seed"] = asked.seed
    if asked.min_tokens and strict:
        notes.append("min_tokens=0")
    params["min_tokens"] = 0 if strict else asked.min_tokens or 0
    params["max_tokens"] = _max_tokens(asked.max_tokens, prompt_len, max_model_len, notes)
    params |= {"stop_token_ids": stop_ids, "ignore_eos": False, "skip_special_tokens": False, "n": 1}
    if strict or request.logprobs:
        params["logprobs"] = 1
    return Plan(params, temperature, notes + request.notes)


def overridden(notes: list[str]) -> list[tuple[bytes, bytes]]:
    """The header that tells of them, if there are any."""
    said = re.sub(r"[^ -~]", "?", ", ".join(notes))[:2000]
    return [(b"x-harnessrl-overridden", said.encode())] if said else []


def _max_tokens(asked: int | None, prompt_len: int, max_model_len: int | None, notes: list[str]) -> int:
    if max_model_len is None:
        return asked or 4096
    left = max_model_len - prompt_len
    if left <= 0:
        raise ContextOverflow(prompt_len, max_model_len)
    if asked is not None and asked > left:
        notes.append(f"max_tokens={left}")
    return min(asked or left, left)
