"""The fork servers: one warm interpreter per distinct (Python, modules), from which attempts are forked."""

import asyncio
import os
import resource
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from harnessrl.controller import forkserver
from harnessrl.controller.environment import StartError

MAX_SERVERS = 8
"""The least recently used one beyond this ends; its attempts go on."""


START_SECONDS = 120
"""Importing what agents need takes no longer, or something hangs."""


@dataclass(frozen=True)
class Warmth:
    """What an interpreter has imported before an attempt asks for it."""

    python: str = sys.executable
    preload: tuple[str, ...] = ()
    agent_module: str | None = None
    """Learn from the first attempt's import of this module which libraries to keep warm."""


@dataclass
class _Server:
    process: subprocess.Popen[bytes]
    sock: socket.socket
    waiting: dict[str, "asyncio.Future[int]"] = field(default_factory=dict)


class WarmServers:
    def __init__(self, log: Path, hidden: frozenset[str]):
        """Their own output goes to `log`; variables with a value in `hidden` are left out of what they inherit."""
        self._log = log
        self._environment = {k: v for k, v in os.environ.items() if v not in hidden}
        self._servers: dict[Warmth, _Server] = {}
        self._nofile = resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    async def fork(self, warmth: Warmth, folder: str) -> int:
        """Start the attempt described in `folder`; the process id of its keeper."""
        server = self._servers.pop(warmth, None) or self._start(warmth)
        self._servers[warmth] = server
        if len(self._servers) > MAX_SERVERS:
            idle = next((w for w, s in self._servers.items() if not s.waiting), None)
            if idle is not None:
                self._close(idle)
        loop = asyncio.get_running_loop()
        answer = server.waiting[folder] = loop.create_future()
        try:
            await loop.sock_sendall(server.sock, folder.encode())
        except ConnectionError as error:
            server.waiting.pop(folder, None)
            raise StartError(f"the fork server ended; see {self._log}") from error
        try:
            async with asyncio.timeout(START_SECONDS):
                return await answer
        except TimeoutError:
            server.process.kill()  # what else waits for it fails likewise
            what = ", ".join([*warmth.preload, *filter(None, [warmth.agent_module])]) or warmth.python
            raise StartError(f"{what} did not get ready to start agents within {START_SECONDS} s") from None

    def close(self) -> None:
        for warmth in list(self._servers):
            self._close(warmth)

    def _start(self, warmth: Warmth) -> _Server:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        learn = "1" if warmth.agent_module else "0"
        # Nothing of the user's runs in it: it need not know what is installed, and forks twice as fast.
        bare = () if warmth.preload or warmth.agent_module else ("-I", "-S")
        try:
            with theirs, open(self._log, "ab") as log:
                process = subprocess.Popen(
                    [
                        warmth.python,
                        *bare,
                        forkserver.__file__,
                        str(theirs.fileno()),
                        str(self._nofile),
                        learn,
                        *warmth.preload,
                    ],
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            raise StartError(f"could not start {warmth.python}: {error}") from error
        server = _Server(process, ours)
        asyncio.get_running_loop().add_reader(ours, self._receive, warmth, server)
        return server

    def _receive(self, warmth: Warmth, server: _Server) -> None:
        try:
            folder, _, answer = server.sock.recv(65536).decode().partition("\0")
        except ConnectionError:
            folder = answer = ""
        if not folder:
            self._lost(warmth, server)
            return
        future = server.waiting.pop(folder, None)
        if future is None or future.done():
            return
        if answer.isdecimal():
            future.set_result(int(answer))
        else:
            future.set_exception(StartError(answer))

    def _lost(self, warmth: Warmth, server: _Server) -> None:
        if self._servers.get(warmth) is server:
            self._close(warmth)
        for future in server.waiting.values():
            if not future.done():
                future.set_exception(StartError(f"the fork server ended; see {self._log}"))

    def _close(self, warmth: Warmth) -> None:
        server = self._servers.pop(warmth)
        asyncio.get_running_loop().remove_reader(server.sock)
        server.sock.close()
        try:
            server.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()
