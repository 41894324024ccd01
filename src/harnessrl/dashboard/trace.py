"""One attempt at a rollout, twice: the conversation as its harness saw it, the tokens as the trainer takes them.

What is trained, its row and its advantage come from the trainer's own functions. Messages and fields of requests
are sent once, in a pool, and token ids as differences, so that an answer grows with what is new in each call only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import orjson

from harnessrl.config import AlgorithmConfig
from harnessrl.gateway.chat.canonical import RequestError
from harnessrl.gateway.chat.tokenizer import Tokenizer, load_tokenizer
from harnessrl.gateway.dialects.registry import BY_NAME
from harnessrl.gateway.store import CallRecord
from harnessrl.schemas import Call, Json
from harnessrl.trainer.group import Group, compare
from harnessrl.trainer.rollout import FinishedRollout
from harnessrl.trainer.rows import Row, make_rows
from harnessrl.trainer.trajectory import Trajectory, build_trajectory

__all__ = ["Trained", "trace"]

_BROKEN = "\ufffd"
"""What half a character decodes to."""


@dataclass(frozen=True)
class Trained:
    """What decides how a rollout is trained."""

    rollout: FinishedRollout
    group: Sequence[FinishedRollout] | None
    """All that it is compared with; None where that is not known yet, or doesn't apply."""
    config: AlgorithmConfig
    max_tokens: int | None

    def rows(self, trajectory: Trajectory) -> tuple[list[Row], dict[str, int], bool]:
        """Rows, sampled tokens that are in none by reason, and whether the whole group is skipped."""
        if self.group is not None:
            compared = compare(Group(self.rollout.group_id, list(self.group)), self.config, self.max_tokens)
            for member in compared.members:
                if member.rollout.rollout_id == self.rollout.rollout_id:
                    _, dropped = make_rows(trajectory, self.max_tokens, self.config.overflow)
                    return member.rows, dict(dropped), compared.skipped
        rows, dropped = make_rows(trajectory, self.max_tokens, self.config.overflow)
        return rows, dict(dropped), False


@dataclass
class _Pool:
    """Each different value once."""

    values: list[Any] = field(default_factory=list)
    _known: dict[bytes, int] = field(default_factory=dict)

    def put(self, value: Any) -> int:
        key = orjson.dumps(value)
        if key not in self._known:
            self._known[key] = len(self.values)
            self.values.append(value)
        return self._known[key]


def trace(trained: Trained, records: Sequence[CallRecord], tokenizers: Mapping[str, str]) -> Json:
    """`tokenizers`: by model, where the gateway renders."""
    rollout = trained.rollout
    trajectory = build_trajectory(rollout, trained.config.train_agents)
    rows, dropped, skipped = trained.rows(trajectory)
    advantages = _advantages(rows) if trained.group is not None and trained.config.advantage != "gae" else {}
    row_of = {int(call): r for r, row in enumerate(rows) for call in np.unique(row.calls_T[row.mask_T])}
    by_id = {record.call_id: record for record in records}
    position = {call.call_id: i for i, call in enumerate(rollout.calls)}
    pool = _Pool()
    calls = []
    for i, call in enumerate(rollout.calls):
        record, tokenizer = by_id[call.call_id], _tokenizer(tokenizers.get(call.model))
        calls.append(
            {
                **call.model_dump(exclude={"new_prompt_ids", "sampled_ids", "parent"}),
                **_conversation(record, pool),
                "http_status": record.http_status,
                "notes": record.request.get("harnessrl", {}).get("notes", []),
                "parent": int(trajectory.parents_C[i]),
                "noted_parent": position.get(call.parent or "", -1),
                "common": _common(trajectory, i),
                "prompt": _tokens(tokenizer, call.new_prompt_ids),
                "sampled": _tokens(tokenizer, call.sampled_ids),
                "row": row_of.get(i),
                "why_not": None if i in row_of else _why_not(call, trajectory),
                "advantage": advantages.get(i),
            }
        )
    return {
        "calls": calls,
        "pool": pool.values,
        "rows": [
            {
                "leaf": int(row.calls_T[row.mask_T][-1]),
                "calls": np.unique(row.calls_T[row.mask_T]),
                "tokens": len(row),
                "trained_tokens": row.trained_tokens,
            }
            for row in rows
        ],
        "dropped": dropped,
        "unusable": trajectory.unusable,
        "skipped": skipped,
    }


def _advantages(rows: Sequence[Row]) -> dict[int, float]:
    """By call: all tokens of a call have the same."""
    return {
        int(call): float(row.advantages_T[row.calls_T == call][0])
        for row in rows
        for call in np.unique(row.calls_T[row.mask_T])
    }


def _why_not(call: Call, trajectory: Trajectory) -> str:
    if not call.sampled_ids:
        return "nothing was sampled"
    if trajectory.unusable:
        return trajectory.unusable
    if call.mode != "train":
        return "evaluation"
    if not call.trainable:
        return call.untrainable_reason or "not trainable"
    if not call.delivered:
        return "the harness never received it"
    return "its agent is not trained, or it is too long"


def _common(trajectory: Trajectory, i: int) -> list[int]:
    """[call, tokens]: the earlier context that the prompt of call `i` shares most with, and how far."""
    best = [-1, 0]
    prompt = trajectory.prompts_C[i]
    for j in range(i):
        context = np.concatenate([trajectory.prompts_C[j], trajectory.sampled_C[j]])
        n = min(len(prompt), len(context))
        differs = prompt[:n] != context[:n]
        shared = int(differs.argmax()) if differs.any() else n
        if shared > best[1]:
            best = [j, shared]
    return best


def _conversation(record: CallRecord, pool: _Pool) -> Json:
    """Messages of the prompt and the answer in canonical form, and the request as it came: places in the pool."""
    request = {name: value for name, value in record.request.items() if name != "harnessrl"}
    messages, tools = _messages(record.dialect, request)
    answer, _ = _messages(record.dialect, _as_request(record.dialect, record.response))
    return {
        "messages": [pool.put(message) for message in messages],
        "answer": [pool.put({**message, "role": "assistant"}) for message in answer],
        "tools": [pool.put(tool) for tool in tools],
        "request": {
            name: [pool.put(item) for item in value] if isinstance(value, list) else pool.put(value)
            for name, value in request.items()
        },
        "response": None if answer else pool.put(record.response),
    }


def _messages(dialect: str, body: Json) -> tuple[list[Json], list[Json]]:
    """Messages and tools; a body that its dialect does not allow has none."""
    try:
        parsed = BY_NAME[dialect].parse(body)
    except (RequestError, LookupError, TypeError):
        return [], []
    if isinstance(parsed.prompt, str):
        return [{"role": "prompt", "content": parsed.prompt}], []
    return parsed.messages, parsed.tools


def _as_request(dialect: str, response: Json) -> Json:
    """A request whose only messages are those of the answer."""
    choices = [choice for choice in response.get("choices") or [] if isinstance(choice, dict)]
    match dialect:
        case "openai_chat":
            return {"messages": [{"role": "assistant", **(choice.get("message") or {})} for choice in choices]}
        case "openai_completions":
            return {"prompt": "".join(choice.get("text") or "" for choice in choices)} if choices else {}
        case "openai_responses":
            return {"input": response.get("output")}
        case "anthropic_messages":
            return {"messages": [{"role": "assistant", "content": response.get("content") or []}]}
    return {}


@lru_cache(maxsize=8)
def _tokenizer(name: str | None) -> Tokenizer | None:
    if name is None:
        return None
    try:
        return load_tokenizer(name)
    except ValueError:  # a finished run's, on another machine
        return None


def _tokens(tokenizer: Tokenizer | None, ids: Sequence[int]) -> Json:
    return {"ids": ids, "texts": _texts(tokenizer, ids) if tokenizer else None}


def _texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each token; of a character that several make up, at the last of them."""
    known = {i: tokenizer.decode([i]) for i in set(ids)}
    texts = [known[i] for i in ids]
    start = None
    for end in range(len(texts) + 1):
        broken = end < len(texts) and _BROKEN in texts[end]
        if broken and start is None:
            start = end
        elif not broken and start is not None:
            whole = tokenizer.decode(ids[start:end])
            if _BROKEN not in whole:
                texts[start:end] = [""] * (end - start - 1) + [whole]
            start = None
    return texts
