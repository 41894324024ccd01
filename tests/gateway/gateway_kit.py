"""What the gateway's tests share: a client of a gateway in this process, and gateways as processes."""

import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from harnessrl.gateway.app import Gateway

KEY = "admin-key"


@asynccontextmanager
async def client_of(app: Gateway, key: str | None = KEY) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as client:
        yield client


class Served:
    """`harnessrl gateway` as a process."""

    def __init__(self, store: Path, *options: str):
        command = [sys.executable, "-m", "harnessrl", "gateway", "--port", "0", "--store", str(store), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.said: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.rstrip())
            if line.startswith("gateway ready at "):
                self.url = line.split()[-1]
                return
        raise AssertionError("\n".join(self.said))

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def terminate(self, timeout: float = 20) -> int:
        self.process.terminate()
        return self.process.wait(timeout)


Serve = Callable[..., Served]
