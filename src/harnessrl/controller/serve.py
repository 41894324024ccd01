"""A controller as a process: until SIGINT or SIGTERM."""

import asyncio
import contextlib
import logging
import signal
from typing import Any

import httpx

from harnessrl.client import AsyncClient, GatewayError, list_rollouts
from harnessrl.controller.reconcile import Controller, Pace, Runner

log = logging.getLogger(__name__)

_CHECK_SECONDS = 3
"""Agents to be adopted wait meanwhile for a sign of life."""


async def serve(gateway_url: str, key: str | None, runner: Runner[Any], concurrency: int, pace: Pace) -> None:
    """Run a controller. A first signal stops all agents and ends it, a second one kills them.

    ValueError for a URL that cannot be one, GatewayError for a wrong key.
    """
    async with AsyncClient(gateway_url, key) as gateway:
        await _check(gateway, gateway_url)
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


async def _check(gateway: AsyncClient, url: str) -> None:
    """What waiting will not mend; a gateway that is away, or busy, is waited for."""
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CHECK_SECONDS):
                await gateway(list_rollouts("queuing", limit=1))
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise ValueError(f"--gateway {url}: give its URL, such as http://127.0.0.1:8080") from error
    except GatewayError as error:
        if error.status in (401, 403):
            raise
        log.warning("the gateway does not answer well: %s", error)
    except httpx.TransportError as error:
        log.warning("no gateway yet at %s: %s", url, error)
