"""Mutated requests of each dialect: never a 5xx of ours, never a hang, and the rollout stays usable.

FUZZ_REQUESTS sets how many for each dialect.
"""

import asyncio
import contextlib
import copy
import json
import os
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from proxy_kit import TINY, TOKENIZER, ScriptedEngine, proxied

from harnessrl.gateway.body import parse_json
from harnessrl.gateway.chat.canonical import RequestError
from harnessrl.gateway.chat.continuation import Memory
from harnessrl.gateway.chat.renderer import load_chat
from harnessrl.gateway.dialects.registry import ROUTES

REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "150"))
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": "1"}'}}
SEEDS: dict[str, Any] = {
    "openai/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r"},
            {"role": "tool", "tool_call_id": "c1", "content": "1"},
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": "auto",
        "stream": False,
        "stream_options": {"include_usage": True},
        "max_tokens": 5,
        "temperature": 0.5,
        "stop": ["x"],
        "n": 1,
        "response_format": {"type": "text"},
        "chat_template_kwargs": {},
    },
    "openai/v1/completions": {"model": "m", "prompt": "hi", "max_tokens": 5, "stop": "x", "logprobs": 1, "n": 1},
    "openai/v1/responses": {
        "model": "m",
        "instructions": "i",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
        ],
        "tools": [{"type": "function", **TOOL}, {"type": "custom", "name": "g"}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "text"}},
        "max_output_tokens": 5,
        "stream": False,
    },
    "anthropic/v1/messages": {
        "model": "m",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": "1"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "1"}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": TOOL["parameters"]}],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["x"],
        "thinking": {"type": "adaptive"},
        "stream": False,
    },
}
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 1e308, -0.5, "", "x", "\x00", "é" * 300, "<|im_end|>", "auto"),
    *([], {}, [None], [[]], [{}], {"type": "text"}, {"type": "text", "text": 5}, "policy/x", {"role": "user"}),
]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Each (container, key) within a JSON value."""
    found: list[tuple[Any, Any]] = []
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        found.append((value, key))
        found += places(value[key])
    return found


def mutated(rng: random.Random, seed: Any) -> bytes:
    body = copy.deepcopy(seed)
    for _ in range(rng.randint(1, 3)):
        container, key = rng.choice(places(body) or [(body, "x")])
        kind = rng.random()
        if kind < 0.6:
            container[key] = copy.deepcopy(rng.choice(ODD))
        elif kind < 0.75:
            del container[key]
        elif isinstance(container, list):
            container.insert(rng.randint(0, len(container)), copy.deepcopy(rng.choice(container)))
        else:
            container[rng.choice(["type", "role", "content", "stream", "n", "x"])] = copy.deepcopy(rng.choice(ODD))
    raw = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode()
    if rng.random() < 0.15:
        at = rng.randrange(len(raw))
        raw = raw[:at] + rng.choice([b"\xff", b"", b"{", b"NaN", b'"\\ud800"', b"[" * 300]) + raw[at + 1 :]
    return raw


@pytest.mark.slow
@pytest.mark.parametrize("path", SEEDS)
def test_ten_thousand_mutated_requests_are_rendered_or_refused(path: str) -> None:
    family, _, tail = path.partition("/v1/")
    rng, dialect, chat = random.Random(5), ROUTES[family, tail], load_chat(TINY, {"name": "chatml"})
    for _ in range(10_000):
        with contextlib.suppress(RequestError, ValueError):
            body = parse_json(mutated(rng, SEEDS[path]))
            if isinstance(body, dict):
                Memory().prompt(chat, dialect.parse(body))


@pytest.mark.parametrize("path", SEEDS)
async def test_mutated_requests_get_an_answer_or_a_clear_refusal(tmp_path: Path, path: str) -> None:
    rng = random.Random(path)
    async with (
        ScriptedEngine(TOKENIZER, lambda _: "ok") as engine,
        proxied(tmp_path, engine.endpoint(TINY)) as gateway,
        httpx.AsyncClient(timeout=20) as http,
    ):
        url = gateway.base(family=path)
        statuses: set[int] = set()

        async def one(raw: bytes) -> None:
            response = await http.post(url, content=raw, headers={"content-type": "application/json"})
            statuses.add(response.status_code)
            assert response.status_code < 500, (response.text, raw)
            if response.status_code >= 400:
                assert response.json()["error"]["message"], raw

        for start in range(0, REQUESTS, 10):
            await asyncio.gather(*(one(mutated(rng, SEEDS[path])) for _ in range(start, min(start + 10, REQUESTS))))
        assert {200, 400} <= statuses
        sane = await http.post(url, json=SEEDS[path])
        assert sane.status_code == 200, sane.text
        assert not any(call.capture_failed for call in await gateway.calls())
