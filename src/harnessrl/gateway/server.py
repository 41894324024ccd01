"""Runs the gateway on uvicorn: binds, says when it is ready, drains on SIGTERM."""

import asyncio
import gc
import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import structlog
import uvicorn
from fastapi import APIRouter

from harnessrl.gateway.app import Gateway
from harnessrl.gateway.auth import VIEW_SECONDS
from harnessrl.gateway.settings import Settings
from harnessrl.gateway.store import StoreError

__all__ = ["GatewayNotStarted", "admin_key", "serve"]

_BACKLOG = 4096
_OBJECTS_BEFORE_COLLECTION = 50_000


class GatewayNotStarted(RuntimeError):
    """One sentence: why, and what to do."""


def admin_key(given: str | None, loopback: bool, store: Path) -> str:
    """The admin key in force; on loopback one that was not given is made once and kept beside the store."""
    if not loopback and not given:
        raise GatewayNotStarted("Listening beyond this machine needs an admin key: give --key.")
    if given is not None:
        return given
    file = store.with_name(store.name + ".key")
    if file.exists():
        return file.read_text().strip()
    key = secrets.token_urlsafe(24)
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(key + "\n")
    print(f"admin key (kept in {file}): {key}", flush=True)
    return key


def serve(settings: Settings, routers: Sequence[APIRouter] = ()) -> None:
    """Blocks until SIGINT or SIGTERM; raises `GatewayNotStarted`."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(settings.log_level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    listener = _bind(settings.host, settings.port)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(settings, routers, listener))
    except StoreError as error:
        raise GatewayNotStarted(str(error)) from error
    finally:
        listener.close()


async def _serve(settings: Settings, routers: Sequence[APIRouter], listener: socket.socket) -> None:
    async with Gateway(settings, routers) as gateway:
        await _Server(gateway, listener).serve(sockets=[listener])


class _Server(uvicorn.Server):
    def __init__(self, gateway: Gateway, listener: socket.socket):
        settings = gateway.settings
        super().__init__(
            uvicorn.Config(
                gateway,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=max(1, int(settings.drain_seconds)),
            )
        )
        self._gateway = gateway
        self._url = f"http://{_in_url(settings.host)}:{listener.getsockname()[1]}"

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's, doesn't raise them again at the end: the store has still to be closed."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        _calm_the_collector()
        print(f"gateway ready at {self._url}", flush=True)
        if self._gateway.routers and sys.stdout.isatty():  # a log is no place for a key
            settings, auth = self._gateway.settings, self._gateway.auth
            key = f"#key={auth.token('viewer', VIEW_SECONDS)}" if settings.key else ""
            print(f"dashboard {self._url}/{key}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._gateway.begin_drain()
        await super().shutdown(sockets)


def _calm_the_collector() -> None:
    """What is loaded stays, and JSON dies by its counts: searching both for cycles took half of all CPU."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_BEFORE_COLLECTION)


def _loop_factory() -> "type[asyncio.AbstractEventLoop] | None":
    try:
        import uvloop
    except ImportError:  # not on every platform
        return None
    return uvloop.Loop


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise GatewayNotStarted(
            f"Can't listen on {host} port {port} ({error.strerror}): give another --port, or end what is using it."
        ) from error


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
