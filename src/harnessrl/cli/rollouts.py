"""`harnessrl rollouts ls | show | logs`: what ran, every call that was captured of it, and what it printed."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harnessrl.cli import app
from harnessrl.client import AsyncClient, get_calls, get_events, get_rollout, list_rollouts
from harnessrl.schemas import Call, Event, Json, Rollout, RolloutDetail, State

rollouts = typer.Typer(no_args_is_help=True, help="Look at rollouts, of a running gateway or of a finished run.")
app.add_typer(rollouts, name="rollouts")

GatewayUrl = Annotated[str | None, typer.Option(help="A running gateway's URL.", envvar="HARNESSRL_GATEWAY")]
Key = Annotated[str | None, typer.Option(help="Its key.", envvar="HARNESSRL_KEY")]
StoreFile = Annotated[Path | None, typer.Option("--store", help="Or the store of a run, runs/NAME/rollouts.db.")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


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
        async with _source(gateway, key, store) as source:
            listed = await source(list_rollouts(*states, limit=limit))
            return [(r, await source(get_events(r.rollout_id, event_type="reward"))) for r in listed]

    table = Table(box=None)
    for column in ("rollout", "state", "reward", "attempt"):
        table.add_column(column, no_wrap=True)
    for column in ("task", "error"):
        table.add_column(column, overflow="ellipsis", no_wrap=True)
    rows: list[Json] = []
    for rollout, events in asyncio.run(read()):
        status = rollout.status
        reward = events[-1].data.get("value") if events else None
        rows.append(rollout.model_dump(mode="json") | {"reward": reward})
        table.add_row(
            rollout.rollout_id,
            status.state,
            "–" if reward is None else f"{reward:g}",
            status.last_attempt_id or "–",
            _short(rollout.input, 200),
            _short(status.error_message or "", 200),
        )
    typer.echo(json.dumps(rows)) if as_json else _console().print(table)


@rollouts.command("show")
def show(
    rollout_id: str, gateway: GatewayUrl = None, key: Key = None, store: StoreFile = None, as_json: AsJson = False
) -> None:
    """Show one rollout: its task, its calls as the harness saw them and as they were captured, its rewards."""

    async def read() -> tuple[RolloutDetail, list[Event], list[Call]]:
        async with _source(gateway, key, store) as source:
            return (
                await source(get_rollout(rollout_id)),
                await source(get_events(rollout_id)),
                await source(get_calls(rollout_id)),
            )

    detail, events, calls = asyncio.run(read())
    if as_json:
        whole = detail.model_dump(mode="json") | {
            "events": [event.model_dump(mode="json") for event in events],
            "calls": [call.model_dump(mode="json") for call in calls],
        }
        typer.echo(json.dumps(whole))
        return
    console = _console()
    status = detail.rollout.status
    console.print(f"[bold]{rollout_id}[/]  {status.state}  attempts {', '.join(detail.attempts) or '–'}")
    console.print("task    ", Text(json.dumps(detail.rollout.input, ensure_ascii=False)))
    if status.error_message:
        console.print("error   ", Text(f"{status.error_message} ({status.failure_kind})"))
    requests = [event for event in events if event.event_type == "model_request"]
    for call, request in zip(calls, requests, strict=False):
        _print_call(console, call, request.data)
    for event in events:
        if event.event_type != "model_request":
            console.print(f"[bold]{event.event_type}[/] ", Text(json.dumps(event.data, ensure_ascii=False)))


@rollouts.command("logs")
def logs(rollout_id: str, gateway: GatewayUrl = None, key: Key = None, store: StoreFile = None) -> None:
    """Print what the agent of an ended rollout wrote to its output: the beginning and the end."""

    async def read() -> tuple[RolloutDetail, list[Event]]:
        async with _source(gateway, key, store) as source:
            return await source(get_rollout(rollout_id)), await source(get_events(rollout_id, event_type="log"))

    detail, events = asyncio.run(read())
    state = detail.rollout.status.state
    if not events:
        running = state in ("queuing", "running")
        raise ValueError(
            f"{rollout_id} is {state}: " + ("its log comes when it ends" if running else "it wrote nothing")
        )
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
    for message in (data.get("request", {}).get("messages") or [])[-1:]:
        console.print(Text(f"  {message.get('role')}: {_short(message.get('content'), 400)}"))
    for choice in data.get("response", {}).get("choices") or []:
        message = choice.get("message") or {}
        said = message.get("content") or json.dumps(message.get("tool_calls"), ensure_ascii=False)
        console.print(Text(f"  assistant: {_short(said, 400)}", style="cyan"))


def _console() -> Console:
    """Off a terminal, wide enough to leave ids whole."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


def _short(value: Any, width: int) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= width else text[: width - 1] + "…"


@asynccontextmanager
async def _source(url: str | None, key: str | None, store: Path | None) -> AsyncIterator[AsyncClient]:
    """A client of the running gateway, or of one in this process that serves `store`."""
    if (url is None) == (store is None):
        raise ValueError(
            "say where to look: either --gateway URL (of a running gateway) or --store FILE (of a run)"
        )
    if url is not None:
        async with AsyncClient(url, key) as client:
            yield client
        return
    from harnessrl.gateway.app import Gateway
    from harnessrl.gateway.settings import Settings

    assert store
    if not store.exists():
        raise ValueError(f"there is no store {store}")
    async with (
        Gateway(Settings(store=store)) as gateway,
        AsyncClient("http://store", transport=httpx.ASGITransport(gateway)) as client,
    ):
        yield client
