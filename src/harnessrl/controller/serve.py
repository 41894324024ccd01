"""A controller as a process: until SIGINT or SIGTERM."""

import asyncio
import logging
import signal
from typing import Any

from harnessrl.client import AsyncClient
from harnessrl.controller.reconcile import Controller, Pace, Runner

log = logging.getLogger(__name__)


async def serve(gateway_url: str, key: str | None, runner: Runner[Any], concurrency: int, pace: Pace) -> None:
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
