"""What is exported is what the store holds, and `datasets` loads it with the documented columns."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, load_dataset
from stored import ASKED, CALLING, RESULT, TOOLS, make_store, says

from harnessrl.cli.conversation import conversation
from harnessrl.cli.export import Format, Table, export, schema
from harnessrl.gateway.chat.canonical import Answer, ToolCall, Usage
from harnessrl.gateway.dialects.registry import BY_NAME
from harnessrl.schemas import Call, Json

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
GOOD = [(ASKED, CALLING), ([*ASKED, CALLING, RESULT], says("2"))]
"""Two calls of one conversation, with a tool."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "rollouts.db"
    make_store(
        path,
        {"id": "good", "turns": GOOD, "reward": 1.0},
        {"id": "bad", "turns": [(ASKED, says("3"))], "reward": 0.0},
        {"id": "looped", "turns": [(ASKED, says("…"))], "failed": "agent"},
        {"id": "lost", "turns": [(ASKED, says("2"))], "failed": "infra"},
        {"id": "held-out", "turns": [(ASKED, says("2"))], "group": "e", "reward": 1.0, "is_train": False},
        {"id": "even-1", "turns": [(ASKED, says("2"))], "group": "f", "reward": 0.5},
        {"id": "even-2", "turns": [(ASKED, says("2"))], "group": "f", "reward": 0.5},
    )
    return path


def exported(store: Path, folder: Path, form: Format, **options: Any) -> Dataset:
    folder.mkdir(exist_ok=True)
    out = folder / f"out.{'parquet' if form == Format.parquet else 'jsonl'}"
    export(out, store=store, form=form, **options)
    kind = "parquet" if form == Format.parquet else "json"
    loaded = load_dataset(kind, data_files=str(out), split="train", cache_dir=str(folder / "cache"))
    assert isinstance(loaded, Dataset)
    return loaded


@pytest.mark.parametrize("table", list(Table))
def test_parquet_and_jsonl_hold_the_same_records(store: Path, tmp_path: Path, table: Table) -> None:
    parquet = exported(store, tmp_path, Format.parquet, table=table).to_list()
    assert parquet and parquet == exported(store, tmp_path, Format.jsonl, table=table).to_list()


def test_rollouts(store: Path, tmp_path: Path) -> None:
    found = {r["rollout_id"]: r for r in exported(store, tmp_path, Format.jsonl).to_list()}
    assert len(found) == 7
    good, lost = found["good"], found["lost"]
    assert (good["reward"], good["calls"], good["sampled_tokens"], good["failure_kind"]) == (1.0, 2, 4, None)
    assert json.loads(good["task"]) == {"question": "1+1?"}
    assert (lost["state"], lost["failure_kind"], lost["error"], lost["reward"]) == (
        "failed",
        "infra",
        "it broke",
        None,
    )


def test_a_conversation_is_whole_and_there_once(store: Path, tmp_path: Path) -> None:
    found = exported(store, tmp_path, Format.parquet, table=Table.conversations).to_list()
    (good,) = [r for r in found if r["rollout_id"] == "good"]
    assert [m["role"] for m in good["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert good["messages"][2]["tool_calls"] == CALLING["tool_calls"]
    assert json.loads(good["tools"]) == TOOLS


def test_rows_are_those_that_are_trained(store: Path, tmp_path: Path) -> None:
    found = {r["rollout_id"]: r for r in exported(store, tmp_path, Format.parquet, table=Table.rows).to_list()}
    assert set(found) == {"good", "bad", "looped", "lost", "even-1", "even-2"}
    good = found["good"]
    assert good["token_ids"] == [0, 2, 100, 7, 1, 4, 101, 7]
    assert good["trained"] == [False, False, True, True] * 2
    assert good["logprobs"] == [None, None, -0.5, -1.5] * 2
    assert good["versions"] == [-1, -1, 3, 3] * 2 and good["calls"] == [-1, -1, 0, 0, -1, -1, 1, 1]


def test_sft_takes_each_groups_best_or_what_earned_enough(store: Path, tmp_path: Path) -> None:
    best = exported(store, tmp_path, Format.sft).to_list()
    assert [(e["reward"], e["messages"][-1]["content"]) for e in best] == [(1.0, "2")]
    enough = exported(store, tmp_path / "more", Format.sft, min_reward=0.5).to_list()
    assert [e["reward"] for e in enough] == [1.0, 0.5, 0.5]


def test_dpo_pairs_best_and_worst_from_where_they_part(store: Path, tmp_path: Path) -> None:
    (pair,) = exported(store, tmp_path, Format.dpo).to_list()
    assert [m["content"] for m in pair["prompt"]] == ["Use the tool.", "1+1?"]
    assert [m["role"] for m in pair["chosen"]] == ["assistant", "tool", "assistant"]
    assert [m["content"] for m in pair["rejected"]] == ["3"]
    assert (pair["chosen_reward"], pair["rejected_reward"]) == (1.0, 0.0)


@pytest.mark.parametrize("name", [*Table, "sft", "dpo"])
def test_every_column_is_documented(name: str) -> None:
    (section,) = re.findall(rf"^## `{name}`\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == schema(name).names


ANSWER = Answer("2", "sum", [ToolCall("call_1", "add", '{"x": 1}')], "tool_calls", Usage(5, 3))
REQUESTS: dict[str, Json] = {
    "openai_chat": {"messages": ASKED},
    "anthropic_messages": {"system": "Use the tool.", "messages": ASKED[1:], "max_tokens": 9},
    "openai_responses": {"instructions": "Use the tool.", "input": "1+1?"},
}


@pytest.mark.parametrize("dialect", REQUESTS)
def test_a_conversation_reads_the_same_in_any_dialect(dialect: str) -> None:
    request = BY_NAME[dialect].parse(REQUESTS[dialect])
    response = BY_NAME[dialect].whole(request, [ANSWER], "c", "policy")
    call = Call.model_construct(dialect=dialect)
    told = conversation(call, {"request": REQUESTS[dialect], "response": response})
    assert told is not None
    assert told.messages == [*ASKED, ANSWER.message()]
