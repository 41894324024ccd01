"""A store with a few rollouts in it, for the tests of the commands that read one."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from harnessrl.gateway.store import CallRecord
from harnessrl.gateway.store.sqlite import SqliteStore
from harnessrl.schemas import AttemptEnd, FailureKind, Json, Metadata, NewRollout

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
ASKED: list[Json] = [{"role": "system", "content": "Use the tool."}, {"role": "user", "content": "1+1?"}]
CALLING: Json = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}],
}
RESULT: Json = {"role": "tool", "tool_call_id": "a", "content": "2"}


def says(text: str) -> Json:
    return {"role": "assistant", "content": text}


def make_store(path: Path, *rollouts: Json) -> None:
    asyncio.run(_make(path, rollouts))


async def _make(path: Path, rollouts: tuple[Json, ...]) -> None:
    """Each: `id`, `turns` ([messages, answer], …), and `group`, `reward`, `is_train`, `failed`,
    `extra_ids` (of each prompt) where they apply."""
    store = await SqliteStore.open(path)
    for given in rollouts:
        new = NewRollout(
            input={"question": "1+1?"},
            rollout_id=given["id"],
            is_train=given.get("is_train", True),
            metadata=Metadata(group_id=given.get("group", "g")),
        )
        await store.create_rollouts([new])
        _, attempt = await store.claim(given["id"], "test", 60)
        context: list[int] = []
        for turn, (messages, answer) in enumerate(given["turns"]):
            prompt, sampled = [*context, turn, len(messages), *given.get("extra_ids", [])], [100 + turn, 7]
            await store.add_call(_call(given, attempt, turn, prompt, sampled, messages, answer))
            context = prompt + sampled
        if "reward" in given:
            await store.add_event(given["id"], attempt, "reward", {"value": given["reward"]})
        failed: FailureKind | None = given.get("failed")
        end = AttemptEnd(ok=failed is None, failure_kind=failed, error_message="it broke" if failed else None)
        await store.end_attempt(given["id"], attempt, end)
    await store.close()


def _call(
    given: Json, attempt: str, turn: int, prompt: list[int], sampled: list[int], messages: list[Json], answer: Json
) -> CallRecord:
    fields: dict[str, Any] = {
        "call_id": f"{given['id']}-{turn}",
        "rollout_id": given["id"],
        "attempt_id": attempt,
        "mode": "train" if given.get("is_train", True) else "val",
        "dialect": "openai_chat",
        "model": "policy",
        "endpoint": "http://engine",
        "model_version": 3,
        "agent": None,
        "request": {"model": "policy", "messages": messages, "tools": TOOLS},
        "response": {"choices": [{"index": 0, "message": answer, "finish_reason": "stop"}]},
        "prompt_ids": np.array(prompt, dtype=np.int32),
        "sampled_ids": np.array(sampled, dtype=np.int32),
        "logprobs": np.array([-0.5, -1.5], dtype=np.float32),
        "versions": [(3, 2)],
        "temperature": 1.0,
        "continuity": "exact" if turn else "first",
        "parent": f"{given['id']}-{turn - 1}" if turn else None,
        "started_at": float(turn),
        "latency_ms": 1.0 + turn,
        "http_status": 200,
        "status": "ok",
        "delivered": True,
        "trainable": True,
        "finish_reason": "stop",
    }
    return CallRecord(**fields)
