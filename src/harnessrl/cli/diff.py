"""`harnessrl rollouts diff A B`: two rollouts side by side, and where they first part."""

import asyncio
import json
from dataclasses import asdict, dataclass
from itertools import zip_longest

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harnessrl.cli.conversation import Conversation, conversation, said, spoken
from harnessrl.cli.rollouts import rollouts
from harnessrl.cli.source import AsJson, GatewayUrl, Key, Seen, StoreFile, open_source, see
from harnessrl.client import full_prompts
from harnessrl.schemas import Call, Json

_SHOWN = 2000


@dataclass(frozen=True)
class Difference:
    where: str
    """E.g. `call 1, answer`."""
    a: str
    b: str


@rollouts.command("diff")
def diff(
    a: str,
    b: str,
    gateway: GatewayUrl = None,
    key: Key = None,
    store: StoreFile = None,
    as_json: AsJson = False,
) -> None:
    """Compare two rollouts: what came of them, and the first message, answer or token that differs."""

    async def read() -> tuple[Seen, Seen]:
        async with open_source(gateway, key, store) as source:
            return await see(source, a), await see(source, b)

    one, other = asyncio.run(read())
    facts = {name: (left, _facts(other)[name]) for name, left in _facts(one).items()}
    first = first_difference(one, other)
    if as_json:
        typer.echo(json.dumps({"a": a, "b": b, "facts": facts, "first_difference": first and asdict(first)}))
        return
    console = Console()
    table = Table("")
    for rollout_id in (a, b):
        table.add_column(Text(rollout_id), ratio=1)
    for name, (left, right) in facts.items():
        table.add_row(name, _text(left), _text(right), style="" if left == right else "bold")
    if first:
        table.add_section()
        told = [Text(text[:_SHOWN]) for text in (first.a, first.b)]
        table.add_row(f"first difference:\n{first.where}", *told, style="cyan")
    console.print(table)
    if not first:
        console.print("their calls are the same, token by token")


def _facts(seen: Seen) -> Json:
    status, calls = seen.rollout.status, seen.calls
    return {
        "task": seen.rollout.input,
        "state": status.state,
        "error": status.error_message,
        "reward": seen.reward,
        "calls": len(calls),
        "sampled tokens": sum(len(call.sampled_ids) for call in calls),
        "policy versions": sorted({version for call in calls for version, _ in call.versions}),
    }


def _text(value: object) -> Text:
    return Text(
        "–" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    )


def first_difference(one: Seen, other: Seen) -> Difference | None:
    """Call by call: in what was asked, in the answer, or, where all text is the same, in the tokens."""
    prompts = full_prompts(one.calls), full_prompts(other.calls)
    for number, (left, right) in enumerate(zip_longest(one.calls, other.calls)):
        if left is None or right is None:
            ends = "(no such call)"
            return Difference(
                f"call {number}", *(_answer(s, c) if c else ends for s, c in ((one, left), (other, right)))
            )
        told, told_other = _told(one, left), _told(other, right)
        if told and told_other and (found := _in_messages(told.messages, told_other.messages)):
            return Difference(f"call {number}, {found.where}", found.a, found.b)
        tokens = [*prompts[0][left.call_id].tolist(), *left.sampled_ids]
        tokens_other = [*prompts[1][right.call_id].tolist(), *right.sampled_ids]
        for position, (token, token_other) in enumerate(zip_longest(tokens, tokens_other)):
            if token != token_other:
                where = f"call {number}, token {position} of {len(tokens)} and {len(tokens_other)}"
                return Difference(where, *("(none)" if t is None else f"id {t}" for t in (token, token_other)))
    return None


def _in_messages(messages: list[Json], others: list[Json]) -> Difference | None:
    for number, (left, right) in enumerate(zip_longest(messages, others)):
        if left is None or right is None or said(left) != said(right):
            answer = left in (None, messages[-1]) and right in (None, others[-1])
            where = "answer" if answer else f"message {number}"
            return Difference(
                where, *("(none)" if m is None else f"{m['role']}: {spoken(m)}" for m in (left, right))
            )
    return None


def _told(seen: Seen, call: Call) -> Conversation | None:
    return conversation(call, seen.requests.get(call.call_id, {}))


def _answer(seen: Seen, call: Call) -> str:
    told = _told(seen, call)
    return spoken(told.messages[-1]) if told else f"(no answer: {call.error})"
