"""`harnessrl export`: rollouts, conversations and rows as data sets; docs/data.md describes the columns."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harnessrl.cli import app
from harnessrl.cli.conversation import Conversation, conversation, longest, said
from harnessrl.cli.source import GatewayUrl, Key, Seen, StoreFile, ended_rollouts, open_source
from harnessrl.client import AsyncClient
from harnessrl.schemas import Json
from harnessrl.trainer.rollout import FinishedRollout, finished_rollout

if TYPE_CHECKING:
    import pyarrow

_BATCH = 256
_CALLED = {"sft": "examples", "dpo": "pairs"}


class Format(StrEnum):
    parquet = "parquet"
    jsonl = "jsonl"
    sft = "sft"
    dpo = "dpo"


class Table(StrEnum):
    rollouts = "rollouts"
    conversations = "conversations"
    rows = "rows"


@app.command()
def export(
    out: Annotated[Path, typer.Argument(help="The file to write; sft and dpo: .jsonl or .parquet.")],
    gateway: GatewayUrl = None,
    key: Key = None,
    store: StoreFile = None,
    form: Annotated[
        Format, typer.Option("--format", help="Tables as parquet or jsonl; or examples for sft or dpo.")
    ] = Format.jsonl,
    table: Annotated[Table, typer.Option(help="Of parquet and jsonl: what of the rollouts.")] = Table.rollouts,
    min_reward: Annotated[
        float | None, typer.Option(help="Of sft: only rollouts that earned this; default: each group's best.")
    ] = None,
) -> None:
    """Write what ended to a file that `datasets` loads."""
    name = str(form if form in (Format.sft, Format.dpo) else table)
    parquet = form == Format.parquet or (form != Format.jsonl and out.suffix == ".parquet")

    partial = out.with_name(f".{out.name}.part")

    async def write() -> int:
        async with open_source(gateway, key, store) as source:
            with closing(_Parquet(partial, name) if parquet else _Jsonl(partial)) as file:
                return await _write(file, _records(source, name, min_reward))

    count = asyncio.run(write())
    partial.replace(out)
    typer.echo(f"{count} {_CALLED.get(name, name)} in {out}", err=True)


class _Jsonl:
    def __init__(self, path: Path):
        self._file = path.open("w", encoding="utf-8")

    def write(self, records: list[Json]) -> None:
        self._file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)

    def close(self) -> None:
        self._file.close()


class _Parquet:
    def __init__(self, path: Path, name: str):
        if find_spec("pyarrow") is None:
            raise ValueError("Parquet needs pyarrow: pip install 'harnessrl[data]', or take --format jsonl")
        from pyarrow import Table
        from pyarrow.parquet import ParquetWriter

        self._schema = schema(name)
        self._table, self._writer = Table, ParquetWriter(path, self._schema)

    def write(self, records: list[Json]) -> None:
        self._writer.write_table(self._table.from_pylist(records, self._schema))

    def close(self) -> None:
        self._writer.close()


def schema(name: str) -> "pyarrow.Schema":
    """Of a table, or of `sft` or `dpo`."""
    import pyarrow as pa

    text, number, whole, yes = pa.string(), pa.float64(), pa.int64(), pa.bool_()
    function = pa.struct({"name": text, "arguments": text})
    tool_call = pa.struct({"id": text, "type": text, "function": function})
    texts = dict.fromkeys(("role", "content", "reasoning_content"), text)
    message = pa.struct({**texts, "tool_calls": pa.list_(tool_call), "tool_call_id": text, "name": text})
    messages = pa.list_(message)
    of_rollout = {"rollout_id": text, "group_id": text}
    columns: dict[str, dict[str, pa.DataType]] = {
        "rollouts": of_rollout
        | {"is_train": yes, "task": text, "state": text, "failure_kind": text, "error": text, "reward": number}
        | {"attempts": whole, "calls": whole, "sampled_tokens": whole, "created_at": number, "ended_at": number},
        "conversations": of_rollout
        | {"is_train": yes, "reward": number, "agent": text, "dialect": text, "messages": messages, "tools": text},
        "rows": of_rollout
        | {"reward": number, "token_ids": pa.list_(pa.int32()), "trained": pa.list_(yes)}
        | {"logprobs": pa.list_(pa.float32()), "versions": pa.list_(pa.int32()), "calls": pa.list_(pa.int32())},
        "sft": {"reward": number, "messages": messages, "tools": text},
        "dpo": dict.fromkeys(("prompt", "chosen", "rejected"), messages)
        | {"tools": text, "chosen_reward": number, "rejected_reward": number},
    }
    return pa.schema(columns[name])


async def _write(file: "_Jsonl | _Parquet", records: AsyncIterator[Json]) -> int:
    count, batch = 0, []
    async for record in records:
        count += 1
        batch.append(record)
        if len(batch) == _BATCH:
            file.write(batch)
            batch = []
    file.write(batch)
    return count


async def _records(source: AsyncClient, name: str, min_reward: float | None) -> AsyncIterator[Json]:
    makers: dict[str, Callable[[Seen], Iterator[Json]]] = {
        "rollouts": _rollout,
        "conversations": _conversations,
        "rows": _rows,
    }
    if name in makers:
        async for seen in ended_rollouts(source):
            for record in makers[name](seen):
                yield record
        return
    groups: dict[str, list[tuple[float, list[Conversation]]]] = {}
    async for seen in ended_rollouts(source):
        finished = _finished(seen)
        if seen.rollout.is_train and finished.failure_kind != "infra":
            group = groups.setdefault(finished.group_id, [])
            group.append((finished.outcome(0.0), _told(seen)))
    for group in groups.values():
        for record in _pairs(group) if name == "dpo" else _examples(group, min_reward):
            yield record


def _finished(seen: Seen) -> FinishedRollout:
    return finished_rollout(seen.rollout, seen.events, seen.calls)


def _rollout(seen: Seen) -> Iterator[Json]:
    finished, status = _finished(seen), seen.rollout.status
    yield {
        "rollout_id": finished.rollout_id,
        "group_id": finished.group_id,
        "is_train": seen.rollout.is_train,
        "task": json.dumps(seen.rollout.input, ensure_ascii=False),
        "state": status.state,
        "failure_kind": finished.failure_kind,
        "error": finished.error_message,
        "reward": finished.reward,
        "attempts": len(seen.attempts),
        "calls": len(finished.calls),
        "sampled_tokens": finished.sampled_tokens,
        "created_at": status.created_at,
        "ended_at": status.updated_at,
    }


def _told(seen: Seen) -> list[Conversation]:
    """The conversations of a rollout that its harness received the last answer of."""
    all_of_them = [
        conversation(call, seen.requests[call.call_id])
        for call in seen.calls
        if call.delivered and not call.error and call.call_id in seen.requests
    ]
    return longest(one for one in all_of_them if one)


def _conversations(seen: Seen) -> Iterator[Json]:
    finished = _finished(seen)
    for told in _told(seen):
        yield {
            "rollout_id": finished.rollout_id,
            "group_id": finished.group_id,
            "is_train": seen.rollout.is_train,
            "reward": finished.reward,
            "agent": told.call.agent,
            "dialect": told.call.dialect,
            **_chat(told.messages, told),
        }


def _chat(messages: list[Json], told: Conversation) -> Json:
    return {"messages": [_message(m) for m in messages], "tools": json.dumps(told.tools, ensure_ascii=False)}


def _message(message: Json) -> Json:
    """With every key, so that all have the same type."""
    keys = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
    return {key: message.get(key) for key in keys} | {"tool_calls": message.get("tool_calls") or []}


def _rows(seen: Seen) -> Iterator[Json]:
    from harnessrl.trainer.rows import make_rows
    from harnessrl.trainer.trajectory import build_trajectory

    finished = _finished(seen)
    for row in make_rows(build_trajectory(finished))[0]:
        logprobs = [None if p != p else p for p in row.logprobs_T.tolist()]
        yield {
            "rollout_id": row.rollout_id,
            "group_id": row.group_id,
            "reward": finished.reward,
            "token_ids": row.ids_T.tolist(),
            "trained": row.mask_T.tolist(),
            "logprobs": logprobs,
            "versions": row.versions_T.tolist(),
            "calls": row.calls_T.tolist(),
        }


def _examples(group: list[tuple[float, list[Conversation]]], min_reward: float | None) -> Iterator[Json]:
    """Of the best rollouts of a group that has better and worse ones; or of all that earned `min_reward`."""
    outcomes = [outcome for outcome, _ in group]
    if min_reward is None and min(outcomes) == max(outcomes):
        return
    least = max(outcomes) if min_reward is None else min_reward
    for outcome, conversations in group:
        if outcome >= least:
            for told in conversations:
                yield {"reward": outcome, **_chat(told.messages, told)}


def _pairs(group: list[tuple[float, list[Conversation]]]) -> Iterator[Json]:
    """The best and the worst of a group, by their longest conversations, from where the two part."""
    with_text = [(outcome, max(told, key=lambda c: len(c.messages))) for outcome, told in group if told]
    if not with_text:
        return
    best, worst = max(with_text, key=lambda o: o[0]), min(with_text, key=lambda o: o[0])
    chosen, rejected = best[1], worst[1]
    shared = 0
    for one, other in zip(chosen.messages[:-1], rejected.messages[:-1], strict=False):
        if said(one) != said(other):
            break
        shared += 1
    if best[0] > worst[0] and shared:
        prompt = _chat(chosen.messages[:shared], chosen)
        yield {
            "prompt": prompt["messages"],
            "chosen": _chat(chosen.messages[shared:], chosen)["messages"],
            "rejected": _chat(rejected.messages[shared:], rejected)["messages"],
            "tools": prompt["tools"],
            "chosen_reward": best[0],
            "rejected_reward": worst[0],
        }
