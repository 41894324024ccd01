"""A real gateway and real controllers, as processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from harnessrl.client import Client, create_rollouts, get_rollout
from harnessrl.schemas import TERMINAL, LocalRun, NewRollout, Rollout, RolloutConfig

T = TypeVar("T")
KEY = "test-key"
HERE = Path(__file__).parent


def until(condition: Callable[[], T | None], seconds: float = 15) -> T:
    """The first true value of `condition`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)
    return value


def alive(mark: str) -> list[int]:
    """Processes whose environment has `MARK=mark`, wherever they went."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"\0MARK={mark}\0".encode() in b"\0" + path.read_bytes():
                found.append(int(path.parent.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


class Process:
    """`python -m harnessrl …`, ready when it says so."""

    def __init__(self, log: Path, *arguments: str, cwd: Path):
        path = os.pathsep.join([str(HERE), *(p for p in sys.path if p)])
        with open(log, "wb") as file:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "harnessrl", *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env={**os.environ, "PYTHONPATH": path},
            )
        self.log = log
        self.pid = self.popen.pid
        try:
            until(lambda: " ready " in log.read_text() or self.popen.poll() is not None, 60)
            assert self.popen.poll() is None, log.read_text()
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def end(self, number: int = signal.SIGTERM) -> int:
        self.popen.send_signal(number)
        return self.popen.wait(timeout=15)


class Gateway:
    def __init__(self, folder: Path):
        self.folder, self.port = folder, "0"
        self.start()

    def start(self) -> None:
        store = str(self.folder / "store.db")
        log = self.folder / "gateway.log"
        arguments = ("gateway", "--port", self.port, "--key", KEY, "--store", store)
        self.process = Process(log, *arguments, cwd=self.folder)
        self.url = next(word for word in log.read_text().split() if word.startswith("http"))
        self.port = self.url.rpartition(":")[2]
        self.ask = Client(self.url, KEY)

    def post(self, local: LocalRun, n: int = 1, task: Any = None, **config: Any) -> list[Rollout]:
        config = {"timeout_seconds": 60, **config}
        new = NewRollout(input={} if task is None else task, config=RolloutConfig(local=local, **config))
        return self.ask(create_rollouts([new] * n))

    def rollout(self, rollout_id: str) -> Rollout:
        return self.ask(get_rollout(rollout_id)).rollout

    def ended(self, rollout: Rollout, seconds: float = 20) -> Rollout:
        def terminal() -> Rollout | None:
            now = self.rollout(rollout.rollout_id)
            return now if now.status.state in TERMINAL else None

        return until(terminal, seconds)

    def running(self, rollout: Rollout) -> None:
        until(lambda: self.rollout(rollout.rollout_id).status.state == "running")


Start = Callable[..., Process]
