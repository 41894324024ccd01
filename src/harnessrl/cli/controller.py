"""`harnessrl controller`: run the rollouts that a gateway has queued."""

from pathlib import Path
from typing import Annotated

import typer

from harnessrl.cli import app

Gateway = Annotated[str, typer.Option(envvar="HARNESSRL_GATEWAY", help="URL of the gateway.")]
Key = Annotated[str | None, typer.Option(envvar="HARNESSRL_KEY", help="The gateway's key.")]


@app.command()
def controller(
    gateway: Gateway,
    key: Key = None,
    runner: Annotated[str, typer.Option(help="Where agents run: local.")] = "local",
    concurrency: Annotated[int, typer.Option(min=1, help="How many attempts run at once.")] = 8,
    workdir: Annotated[Path, typer.Option(help="Folder for attempts and logs.")] = Path("runs/controller"),
    agent_gateway: Annotated[
        str | None, typer.Option(help="URL of the gateway as agents reach it; default: --gateway.")
    ] = None,
    lease_seconds: Annotated[float, typer.Option(min=1, help="Noticed as dead after this time.")] = 30,
    grace_seconds: Annotated[float, typer.Option(min=0, help="Between TERM and KILL.")] = 5,
    memory_mb: Annotated[int | None, typer.Option(min=16, help="Memory limit of an agent process.")] = None,
    keep_failed: Annotated[bool, typer.Option("--keep-failed", help="Keep folders of failed attempts.")] = False,
) -> None:
    """Run queued rollouts; Ctrl-C stops all agents."""
    import asyncio
    import logging

    from harnessrl.controller.local import LocalOptions
    from harnessrl.controller.reconcile import Pace
    from harnessrl.controller.serve import serve_local

    if runner != "local":
        raise typer.BadParameter(f"no runner {runner!r}; there is: local")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("httpx").setLevel(logging.WARNING)

    options = LocalOptions(grace_seconds, lease_seconds, keep_failed, memory_mb)
    pace = Pace(lease_seconds=lease_seconds, shutdown_seconds=grace_seconds + 3)
    asyncio.run(serve_local(gateway, key, workdir, agent_gateway or gateway, concurrency, options, pace))
