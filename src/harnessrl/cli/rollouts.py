"""`harnessrl rollouts ls | show | logs`: what ran, every call that was captured of it, and what it printed."""

import asyncio
import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harnessrl.cli import app
from harnessrl.cli.conversation import conversation, spoken
from harnessrl.cli.source import AsJson, GatewayUrl, Key, Seen, StoreFile, open_source, see
from harnessrl.client import get_events, get_rollout, list_rollouts
from harnessrl.schemas import Call, Event, Json, Rollout, RolloutDetail, State

rollouts = typer.Typer(no_args_is_help=True, help="Look at rollouts, of a running gateway or of a finished run.")
app.add_typer(rollouts, name="rollouts")


@rollouts.command("ls")
def ls(
    gateway: GatewayUrl = None,
    key: Key = None,
    store: StoreFile = None,
    state: Annotated[list[str] | None, typer.Option(help="Only these states.")] = None,
    limit: Annotated[int, typer.Option(help="At most so many.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List rollouts."""
    states: list[State] = state or ["queuing", "running", "succeeded", "failed"]  # type: ignore[assignment]

    async def read() -> list[tuple[Rollout, list[Event]]]:
        async with open_source(gateway, key, store) as source:
            listed = await source(list_rollouts(*states, limit=limit))
            return [(r, await source(get_events(r.rollout_id, event_type="reward"))) for r in listed]

    table = Table(box=None, expand=True)
    for column in ("rollout", "state", "reward", "attempt"):
        table.add_column(column, no_wrap=True)
    found = asyncio.run(read())
    failed = any(rollout.status.error_message for rollout, _ in found)
    for column in ("task", "error") if failed else ("task",):
        table.add_column(column, overflow="ellipsis", no_wrap=True, ratio=1)
    rows: list[Json] = []
    for rollout, events in found:
        status = rollout.status
        reward = events[-1].data.get("value") if events else None
        rows.append(rollout.model_dump(mode="json") | {"reward": reward})
        table.add_row(
            rollout.rollout_id,
            status.state,
            "–" if reward is None else f"{reward:g}",
            status.last_attempt_id or "–",
            _short(rollout.input, 200),
            *([_short(status.error_message or "", 200)] if failed else []),
        )
    typer.echo(json.dumps(rows)) if as_json else _console().print(table)


@rollouts.command("show")
def show(
    rollout_id: str, gateway: GatewayUrl = None, key: Key = None, store: StoreFile = None, as_json: AsJson = False
) -> None:
    """Show one rollout: its task, its calls as the harness saw them and as they were captured, its rewards."""

    async def read() -> Seen:
        async with open_source(gateway, key, store) as source:
            return await see(source, rollout_id)

    seen = asyncio.run(read())
    if as_json:
        whole = {
            "rollout": seen.rollout.model_dump(mode="json"),
            "attempts": seen.attempts,
            "events": [event.model_dump(mode="json") for event in seen.events],
            "calls": [call.model_dump(mode="json") for call in seen.calls],
        }
        typer.echo(json.dumps(whole))
        return
    console = _console()
    status = seen.rollout.status
    console.print(f"[bold]{rollout_id}[/]  {status.state}  attempts {', '.join(seen.attempts) or '–'}")
    console.print("task    ", Text(json.dumps(seen.rollout.input, ensure_ascii=False)))
    if status.error_message:
        console.print("error   ", Text(f"{status.error_message} ({status.failure_kind})"))
    for call in seen.calls:
        _print_call(console, call, seen.requests.get(call.call_id, {}))
    for event in seen.events:
        if event.event_type != "model_request":
            console.print(f"[bold]{event.event_type}[/] ", Text(json.dumps(event.data, ensure_ascii=False)))


@rollouts.command("logs")
def logs(
    rollout_id: str, gateway: GatewayUrl = None, key: Key = None, store: StoreFile = None, as_json: AsJson = False
) -> None:
    """Print what the agent of an ended rollout wrote to its output: the beginning and the end."""

    async def read() -> tuple[RolloutDetail, list[Event]]:
        async with open_source(gateway, key, store) as source:
            return await source(get_rollout(rollout_id)), await source(get_events(rollout_id, event_type="log"))

    detail, events = asyncio.run(read())
    state = detail.rollout.status.state
    if not events:
        running = state in ("queuing", "running")
        raise ValueError(
            f"{rollout_id} is {state}: " + ("its log comes when it ends" if running else "it wrote nothing")
        )
    if as_json:
        typer.echo(json.dumps([event.data for event in events]))
        return
    for event in events:
        typer.echo(event.data["text"], nl=False)
        where = event.data.get("path")
        if where:
            typer.echo(f"more, if it was long, on {event.data['host']}: {where}", err=True)


def _print_call(console: Console, call: Call, data: Json) -> None:
    versions = ", ".join(f"v{version}" for version, _ in call.versions) or "–"
    mean = f"{sum(call.logprobs) / len(call.logprobs):.3f}" if call.logprobs else "–"
    prompt = call.shared + len(call.new_prompt_ids)
    console.print(
        f"\n[bold]call {call.index}[/]  {call.dialect}  agent {call.agent or '–'}  {call.continuity}  {versions}  "
        f"prompt {prompt} tokens ({len(call.new_prompt_ids)} new)  sampled {len(call.sampled_ids)}  "
        f"mean log-prob {mean}  {call.finish_reason}  {call.latency_ms:.0f} ms"
        + ("" if call.delivered else "  [red]not delivered[/]")
        + ("" if call.trainable else f"  [yellow]not trained: {call.untrainable_reason}[/]"),
        highlight=False,
    )
    if told := conversation(call, data):
        *_, last, answer = told.messages
        console.print(Text(f"  {last['role']}: {_short(last['content'], 400)}"))
        console.print(Text(f"  assistant: {_short(spoken(answer), 400)}", style="cyan"))
    elif call.error:
        console.print(Text(f"  error: {_short(call.error.get('message', call.error), 400)}", style="red"))


def _console() -> Console:
    """Off a terminal, wide enough to leave ids whole."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


def _short(value: Any, width: int) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= width else text[: width - 1] + "…"
