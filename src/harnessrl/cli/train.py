"""`harnessrl train CONFIG [key=value …]`: starts what is not given, trains, ends what it started."""

import asyncio
import contextlib
import ctypes
import importlib.util
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from harnessrl.cli import app
from harnessrl.cli.services import (
    Service,
    controller_service,
    gateway_key,
    gateway_service,
    vllm_command,
    vllm_service,
)
from harnessrl.cli.view import View
from harnessrl.client import AsyncClient
from harnessrl.config import Config, load_config
from harnessrl.schemas import Json

if TYPE_CHECKING:
    from harnessrl.trainer.backends import Backend
    from harnessrl.trainer.run import Run


WATCH_SECONDS = 0.5
PATIENCE_SECONDS = 120
"""For a gateway that is being started again."""


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(help="Configuration file (YAML).")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes to it, as key=value.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run: runs/NAME.")] = None,
) -> None:
    """Train a model inside its agent."""
    if (config is None) == (resume is None):
        raise ValueError("give either a configuration file, or --resume runs/NAME to go on with a run")
    if resume:
        resumed(resume)
    else:
        run(load_config(config, overrides or []))


def run(config: Config, stay: bool = False) -> Json:
    """Train as `config` says and print what came of it; returns what `result.json` holds.

    `stay`: then go on serving the dashboard until Ctrl-C.
    """
    with Console(stderr=True).status("starting"):
        check(config)
        from harnessrl.trainer.run import Run
    return _train(Run.create(config), stay)


def resumed(folder: Path) -> Json:
    """Go on with the run in `folder`, from its newest checkpoint, with the processes that still run."""
    from harnessrl.trainer.run import Run

    return _train(Run.resume(folder))


def _train(run: "Run", stay: bool = False) -> Json:
    console, began = Console(stderr=True), time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.ExitStack() as stack:
        result = _stoppable(run, stack, console)
        result["seconds_total"] = round(time.monotonic() - began, 1)
        result["versions"] = versions()
        run.finish(result)
        report(console, result, run.folder)
        if stay and run.config.gateway.url is None:
            with contextlib.suppress(KeyboardInterrupt):
                _return_memory()
                console.print("The dashboard stays until Ctrl-C.")
                threading.Event().wait()
    return result


def _return_memory() -> None:
    """The trainer's gigabytes are freed, but glibc keeps them."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _stoppable(run: "Run", stack: contextlib.ExitStack, console: Console) -> Json:
    """Train; when it is stopped, say how to go on."""
    try:
        return _with_services(run, stack, console)
    except KeyboardInterrupt:
        more = (
            f"; `harnessrl train --resume {run.folder}` goes on from {run.checkpoint.name}"
            if run.checkpoint
            else ""
        )
        console.print(f"stopped{more}", soft_wrap=True)
        raise


def _with_services(run: "Run", outer: contextlib.ExitStack, console: Console) -> Json:
    """`outer` keeps the gateway, which may outlast the training."""
    config = run.config
    url, key = config.gateway.url, gateway_key(config, run.folder)
    services: list[Service] = []
    if url is None:
        with console.status("starting the gateway"):
            services.append(outer.enter_context(gateway_service(config, run.folder, key)))
        url = services[-1].address
        console.print(f"dashboard {page_address(url, key)}", highlight=False, soft_wrap=True)
    with contextlib.ExitStack() as stack:
        if config.engine.kind == "vllm":
            config = _with_engine(run, stack, services, console)
        with console.status(f"loading {config.model.path}"):
            from harnessrl.trainer.backends import open_backend

            backend = open_backend(config, run.checkpoint, run.lineage)
            stack.callback(backend.close)
        if config.controller.runner == "local":
            services.append(stack.enter_context(controller_service(config, run.folder, url, key)))
        console.print(
            f"run {run.folder}  model {config.model.path}  gateway {url}", highlight=False, soft_wrap=True
        )
        view = stack.enter_context(View(config.train.updates, console))
        return asyncio.run(_loop(backend, url, key, run, view, services))


def _with_engine(run: "Run", stack: contextlib.ExitStack, services: list[Service], console: Console) -> Config:
    """The run's configuration with a vLLM server that runs: the one given, or one of its own."""
    engine, folder = run.config.engine, run.folder
    found = {"url": engine.url, "weights_dir": engine.weights_dir or str(folder / "weights")}
    if engine.url is None:
        with console.status(f"starting vLLM; what it says: {folder / 'engine.log'}"):
            services.append(stack.enter_context(vllm_service(run.config, folder)))
        found["url"] = services[-1].address
    return run.config.model_copy(update={"engine": engine.model_copy(update=found)})


def page_address(url: str, key: str) -> str:
    """The dashboard's, with a key that may only look: behind a #, which no browser sends to a server."""
    from harnessrl.gateway.auth import VIEW_SECONDS, Auth

    return f"{url}/#key={Auth(key).token('viewer', VIEW_SECONDS)}" if key else f"{url}/"


async def _loop(
    backend: "Backend", url: str, key: str, run: "Run", view: View, services: Sequence[Service]
) -> Json:
    """Train, until it is done or one of the services cannot be kept running."""
    from harnessrl.trainer.loop import train

    async with AsyncClient(url, key, patience=PATIENCE_SECONDS) as gateway:
        training = asyncio.ensure_future(train(backend, gateway, run, view))
        watching = asyncio.ensure_future(_watch(services, view))
        try:
            ended, _ = await asyncio.wait([training, watching], return_when=asyncio.FIRST_COMPLETED)
            return await (training if training in ended else watching)
        finally:
            for task in (training, watching):
                task.cancel()
            await asyncio.gather(training, watching, return_exceptions=True)


async def _watch(services: Sequence[Service], view: View) -> NoReturn:
    while True:
        for service in services:
            if revived := await asyncio.to_thread(service.revive):
                view.warn(revived)
        await asyncio.sleep(WATCH_SECONDS)


def check(config: Config) -> None:
    """Refuse before anything is started what could only fail later; ValueError in one sentence."""
    from harnessrl.engine.model import resolve
    from harnessrl.trainer.tasks import read_tasks
    from harnessrl.trainer.trackers import check_trackers

    if not config.data.train:
        raise ValueError("data.train is not set: name a file of tasks (JSONL, Parquet or CSV)")
    read_tasks(Path(config.data.train))
    if config.data.eval:
        read_tasks(Path(config.data.eval))
    check_trackers(config.train.trackers)
    resolve(config.model.path)
    if config.backend == "verl" and importlib.util.find_spec("verl") is None:
        raise ValueError("backend: verl is not installed: pip install 'harnessrl[verl]'")
    if config.engine.kind == "vllm" and config.backend != "torch":
        raise ValueError(
            f"engine.kind: vllm belongs to backend torch; backend {config.backend} brings its own engine"
        )
    if config.engine.kind == "vllm" and config.engine.url is None:
        vllm_command(config)
    local = config.agent.local
    if config.controller.runner == "local" and not (local and (local.command or local.agent_class)):
        raise ValueError("agent.local.command is not set: say how the agent is started, e.g. [python, agent.py]")


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "transformers", "renderers")}


def report(console: Console, result: Json, folder: Path) -> None:
    """A table of what the run did, and what to do next."""
    table = Table(title=f"run {result['name']}", show_header=False, title_justify="left")
    before, after = result["eval_before"], result["eval_after"]
    table.add_row("held-out reward", "–" if before is None else f"{before:.3f} → {after:.3f}")
    table.add_row("updates, rollouts", f"{result['updates']}, {result['rollouts']}")
    table.add_row("time", f"{result['seconds_total']:.0f} s")
    console.print(table)
    store = folder / "rollouts.db"
    where = f"--store {store}" if store.exists() else "--gateway URL --key KEY"
    for what, value in (
        ("reward curve", folder / "reward.png"),
        ("checkpoint", result["checkpoint"]),
        ("every rollout", f"harnessrl rollouts ls {where}"),
        *([("dashboard", f"harnessrl gateway {where}")] if store.exists() else []),
        ("next", "your own agent: docs/quickstart.md, “Your own agent”"),
    ):
        console.print(f"{what:<14} {value}", highlight=False, soft_wrap=True)
