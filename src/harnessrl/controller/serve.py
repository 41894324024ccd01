"""A controller as a process: until SIGINT or SIGTERM."""

import asyncio
import logging
import signal
from pathlib import Path

from harnessrl.client import AsyncClient
from harnessrl.controller.local import LocalOptions, LocalRunner
from harnessrl.controller.reconcile import Controller, Pace, Runner

log = logging.getLogger(__name__)


async def serve_local(
    gateway_url: str,
    key: str | None,
    workdir: Path,
    agent_url: str,
    concurrency: int,
    options: LocalOptions,
    pace: Pace,
) -> None:
    """Raises `WorkdirInUse`."""
    runner = LocalRunner(workdir, agent_url, key, options)
    try:
        await serve(gateway_url, key, runner, concurrency, pace)
    finally:
        runner.close()


async def serve(gateway_url: str, key: str | None, runner: "Runner", concurrency: int, pace: Pace) -> None:
    """Run a controller. A first signal stops all agents and ends it, a second one kills them."""
    async with AsyncClient(gateway_url, key) as gateway:
        controller = Controller(gateway, runner, concurrency, pace)
        running = asyncio.ensure_future(controller.run())
        asked = False

        def end() -> None:
            nonlocal asked
            if asked:
                controller.hurry()
            else:
                asked = running.cancel()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, end)
        print(f"controller {runner.name} ready for {gateway_url}, {concurrency} at once", flush=True)
        try:
            await running
        except asyncio.CancelledError:
            log.info("stopped")
