"""Stores that dashboards are tested on: rollouts with calls, as a gateway would have recorded them."""

import sqlite3
from pathlib import Path
from typing import Any

import numpy as np

from harnessrl.gateway.chat.tokenizer import load_tokenizer
from harnessrl.gateway.store import CallRecord
from harnessrl.gateway.store.sqlite import SqliteStore
from harnessrl.schemas import AttemptEnd, Endpoint, Metadata, NewRollout, RunRecord

TINY = str(Path(__file__).parents[1] / "assets" / "tiny")
TOKENIZER = load_tokenizer(TINY)
RUN = "made-0001"
POLICY = Endpoint(model="policy", endpoint="http://127.0.0.1:9", kind="token", tokenizer=TINY, version=7)


def call(
    rollout_id: str, number: int, prompt: list[int], said: str, messages: list[Any], **more: Any
) -> CallRecord:
    sampled = np.asarray(TOKENIZER.encode(said), np.int32)
    fields: dict[str, Any] = {
        "call_id": f"{rollout_id}.{number}",
        "rollout_id": rollout_id,
        "attempt_id": "0",
        "mode": "train",
        "dialect": "openai_chat",
        "model": "policy",
        "endpoint": POLICY.endpoint,
        "model_version": 7,
        "agent": None,
        "request": {"model": "policy", "messages": messages},
        "response": {"choices": [{"index": 0, "message": {"role": "assistant", "content": said}}]},
        "prompt_ids": np.asarray(prompt, np.int32),
        "sampled_ids": sampled,
        "logprobs": np.full(len(sampled), -0.5, np.float32),
        "versions": [(7, len(sampled))],
        "temperature": 1.0,
        "continuity": "first",
        "parent": None,
        "started_at": float(number),
        "latency_ms": 2.0,
        "http_status": 200,
        "status": "ok",
        "delivered": True,
        "trainable": True,
        "finish_reason": "stop",
    }
    return CallRecord(**{**fields, **more})


async def start(store: SqliteStore, rollout_id: str, group: str, task: Any = None, is_train: bool = True) -> None:
    task = {"question": f"Which task is {rollout_id}?"} if task is None else task
    metadata = Metadata(group_id=group)
    await store.create_rollouts(
        [NewRollout(rollout_id=rollout_id, input=task, metadata=metadata, is_train=is_train)]
    )
    await store.claim(rollout_id, "controller-1", 60)


async def end(store: SqliteStore, rollout_id: str, reward: float | None, error: str | None = None) -> None:
    if reward is not None:
        await store.add_event(rollout_id, "0", "reward", {"value": reward})
    await store.end_attempt(rollout_id, "0", AttemptEnd(ok=error is None, error_message=error))


async def made_run(store: SqliteStore) -> None:
    """A run of one group: two rollouts that succeeded with rewards 1 and 0, one that failed, one still running.

    The first made three calls: the second continues the first exactly, the third was rendered afresh.
    """
    await store.put_endpoints([POLICY])
    start_data = {"lineage": 0, "config": {"name": "made", "train": {"updates": 4}, "engine": {"max_len": 64}}}
    records = [
        RunRecord(kind="start", at=100, data=start_data),
        RunRecord(kind="phase", at=101, data={"name": "collect"}),
    ]
    await store.add_run_records(RUN, records)
    group = f"{RUN}-000001"
    for sample in range(4):
        await start(store, f"{group}-{sample}", group)
    first = f"{group}-0"
    asked = [{"role": "user", "content": "1+1?"}]
    prompt = TOKENIZER.encode("1+1?")
    one = call(first, 0, prompt, "CALC(1+1)", asked)
    context = [*prompt, *one.sampled_ids.tolist()]
    more = [*asked, {"role": "assistant", "content": "CALC(1+1)"}, {"role": "user", "content": "RESULT(2)"}]
    two = call(
        first,
        1,
        [*context, *TOKENIZER.encode("RESULT(2)")],
        "ANSWER(2)",
        more,
        continuity="exact",
        parent=one.call_id,
    )
    forked = call(
        first,
        2,
        [*prompt[:2], 5, 6],
        "ANSWER(3)",
        asked[:1],
        continuity="rendered(compaction)",
        agent="judge, too",
    )
    for record in (one, two, forked):
        await store.add_call(record)
    await store.add_event(first, "0", "log", {"text": "agent began\n", "host": "here", "path": "/logs/1"})
    await end(store, first, 1.0)
    for sample, reward, error in ((1, 0.0, None), (2, None, "exit code 3")):
        rollout_id = f"{group}-{sample}"
        await store.add_call(call(rollout_id, 0, prompt, "ANSWER(9)", asked))
        await end(store, rollout_id, reward, error)


async def fill(store: SqliteStore, number: int) -> None:
    """Ended rollouts in groups of 8, written as rows: creating them one by one takes a minute."""
    rows = [
        (
            f"many-{i // 8:06d}-{i % 8}",
            f'{{"question": "This is task number {i // 8}, {"of some length " * 20}"}}',
            '{"timeout_seconds": 600}',
            f'{{"group_id": "many-{i // 8:06d}"}}',
            "failed" if i % 10 == 7 else "succeeded",
            1000.0 + i,
            1005.0 + i,
            f"exit code {i % 10}" if i % 10 == 7 else None,
            "agent" if i % 10 == 7 else None,
            i + 1000,
        )
        for i in range(number)
    ]

    def job(db: sqlite3.Connection) -> None:
        db.executemany(
            "INSERT INTO rollouts (rollout_id, input, is_train, config, metadata, state, rank, created_at, "
            "updated_at, error_message, failure_kind, ended) "
            "VALUES (?, CAST(? AS BLOB), 1, CAST(? AS BLOB), CAST(? AS BLOB), ?, 0, ?, ?, ?, ?, ?)",
            rows,
        )
        db.execute(
            "INSERT INTO summaries SELECT id, (id % 11) / 10.0, id % 5, id % 700, "
            "CASE WHEN id % 2 THEN json_array('solver') ELSE json_array('solver', 'critic') END, "
            "json_array('openai_chat'), id / 100, id / 100 + id % 3 "
            "FROM rollouts"
        )

    await store._db.write(job)
