"""`harnessrl controller`: run the rollouts that a gateway has queued."""

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from harnessrl.cli import app

Gateway = Annotated[str, typer.Option(envvar="HARNESSRL_GATEWAY", help="URL of the gateway.")]
Key = Annotated[str | None, typer.Option(envvar="HARNESSRL_KEY", help="The gateway's key.")]


class RunnerName(StrEnum):
    local = "local"
    kubernetes = "kubernetes"


@app.command()
def controller(
    gateway: Gateway,
    key: Key = None,
    runner: Annotated[RunnerName, typer.Option(help="Where agents run.")] = RunnerName.local,
    concurrency: Annotated[int, typer.Option(min=1, help="How many attempts run at once.")] = 8,
    agent_gateway: Annotated[
        str | None, typer.Option(help="URL of the gateway as agents reach it; default: --gateway.")
    ] = None,
    lease_seconds: Annotated[float, typer.Option(min=1, help="Noticed as dead after this time.")] = 30,
    grace_seconds: Annotated[float, typer.Option(min=0, help="Between TERM and KILL.")] = 5,
    keep_failed: Annotated[bool, typer.Option("--keep-failed", help="Keep folders or Jobs of failures.")] = False,
    workdir: Annotated[Path, typer.Option(help="Local: folder for attempts and logs.")] = Path("runs/controller"),
    memory_mb: Annotated[int | None, typer.Option(min=16, help="Local: memory limit of an agent process.")] = None,
    name: Annotated[
        str, typer.Option(envvar="HARNESSRL_CONTROLLER", help="Kubernetes: unlike other controllers', and lasting.")
    ] = "controller",
    namespace: Annotated[str, typer.Option(help="Kubernetes: where Jobs are made.")] = "default",
    kubeconfig: Annotated[str | None, typer.Option(help="Kubernetes: default as kubectl's.")] = None,
    pending_seconds: Annotated[
        float, typer.Option(min=1, help="Kubernetes: a pod that does not run by then has failed.")
    ] = 600,
    sweep: Annotated[bool, typer.Option("--sweep", help="Kubernetes: delete all Jobs of --name, and end.")] = False,
) -> None:
    """Run queued rollouts. Ctrl-C stops local agents; Jobs go on for the next controller of that name."""
    import asyncio
    import logging
    import math

    from harnessrl.controller.reconcile import Pace
    from harnessrl.controller.serve import serve

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    pace = Pace(lease_seconds=lease_seconds, shutdown_seconds=grace_seconds + 3)
    agent_url = agent_gateway or gateway

    async def local() -> None:
        from harnessrl.controller.local import LocalOptions, LocalRunner

        # `python` in a command means the one that this runs in, also where no environment was activated.
        os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
        # What an agent printed before it was killed is wanted most of all.
        os.environ.setdefault("PYTHONUNBUFFERED", "1")
        options = LocalOptions(grace_seconds, lease_seconds, keep_failed, memory_mb)
        with LocalRunner(workdir, agent_url, key, options) as running:
            await serve(gateway, key, running, concurrency, pace)

    async def kubernetes() -> None:
        from harnessrl.controller.kubernetes import JobOptions, KubernetesOptions, KubernetesRunner

        jobs = JobOptions(pending_seconds=pending_seconds, grace_seconds=math.ceil(grace_seconds))
        options = KubernetesOptions(name, agent_url, namespace, kubeconfig, keep_failed=keep_failed, jobs=jobs)
        async with KubernetesRunner(options) as running:
            if sweep:
                typer.echo(f"deleted {await running.sweep()} Jobs of {name} in {namespace}")
            else:
                await serve(gateway, key, running, concurrency, pace)

    asyncio.run({RunnerName.local: local, RunnerName.kubernetes: kubernetes}[runner]())
