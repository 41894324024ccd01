"""Gateway and controller as child processes of `harnessrl train`: adopted by a resumed run, ended with it."""

import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import psutil

from harnessrl.config import Config

__all__ = ["Service", "controller_service", "gateway_key", "gateway_service"]

READY_SECONDS = 60
STOP_SECONDS = 15
YOUNG_SECONDS = 5
"""A process that ends within this time of its start is not started again."""
READY = r"gateway ready at (\S+)"


class Service:
    """`harnessrl NAME ARGUMENTS` in a session of its own, its output in `folder/NAME.log`; a context manager.

    A process that an earlier trainer of this run left running is adopted. `arguments` are asked for at each start.
    With `ready`, entering waits for a line of output that matches it (RuntimeError with the log's end if none
    comes): `address` is its first group.
    """

    def __init__(
        self, folder: Path, name: str, arguments: Callable[[], Sequence[str]], key: str, ready: str | None = None
    ):
        self._name, self._arguments, self._ready = name, arguments, ready
        self._log, self._known = folder / f"{name}.log", folder / f"{name}.json"
        self._key = key
        self.address = ""

    def __enter__(self) -> Self:
        self._bring_up()
        return self

    def _bring_up(self) -> None:
        self._process = self._running() or self._start()
        if self._ready:
            try:
                self.address = self._wait_ready(self._ready)
            except BaseException:
                self.__exit__()
                raise

    def _running(self) -> psutil.Process | None:
        try:
            known = json.loads(self._known.read_text())
            process = psutil.Process(known["pid"])
            return process if process.create_time() == known["since"] else None
        except (FileNotFoundError, psutil.NoSuchProcess):
            return None

    def _start(self) -> psutil.Process:
        # The key travels in the environment: a command line can be read by every user of the machine.
        env = os.environ | {"PYTHONUNBUFFERED": "1", "HARNESSRL_KEY": self._key}
        command = [sys.executable, "-m", "harnessrl", self._name, *self._arguments()]
        with self._log.open("wb") as out:
            started = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
            )
        process = psutil.Process(started.pid)
        self._known.write_text(json.dumps({"pid": started.pid, "since": process.create_time()}))
        return process

    def _wait_ready(self, pattern: str) -> str:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            if match := re.search(pattern, self._log.read_text(errors="replace")):
                return match[1]
            if self._ended():
                break
            time.sleep(0.05)
        raise RuntimeError(f"`harnessrl {self._name}` did not start: {self._last_words()} (see {self._log})")

    def revive(self) -> str | None:
        """Start the process again if it has ended on its own, and say so.

        Blocking. Raises RuntimeError if it had only just been started: it would end again.
        """
        if not self._ended():
            return None
        ended = f"`harnessrl {self._name}` has ended: {self._last_words()} (see {self._log})"
        if time.time() - json.loads(self._known.read_text())["since"] < YOUNG_SECONDS:
            raise RuntimeError(ended)
        self._known.unlink()
        self._bring_up()
        return f"{ended}; it was started again"

    def _ended(self) -> bool:
        try:
            return self._process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def _last_words(self) -> str:
        return " ".join(self._log.read_text(errors="replace").strip().splitlines()[-1:])

    def __exit__(self, *_: object) -> None:
        try:
            self._process.terminate()
            self._process.wait(STOP_SECONDS)
        except psutil.TimeoutExpired:
            self._process.kill()
        except psutil.NoSuchProcess:
            pass
        self._known.unlink(missing_ok=True)


def gateway_key(config: Config, folder: Path) -> str:
    """The configured key, or one of the run's own, kept for when it is resumed."""
    if config.gateway.key is not None:
        return config.gateway.key
    file = folder / "gateway.key"
    if not file.exists():
        file.touch(mode=0o600)
        file.write_text(secrets.token_urlsafe(24))
    return file.read_text()


def gateway_service(config: Config, folder: Path, key: str) -> Service:
    """The run's own gateway, its store in the run's folder. It keeps its port when it is started again."""
    collect, log = config.collect, folder / "gateway.log"

    def arguments() -> list[str]:
        before = re.search(READY, log.read_text(errors="replace")) if log.exists() else None
        port = config.gateway.port or (int(before[1].rpartition(":")[2]) if before else 0)
        given = [
            "--port", str(port), "--store", str(folder / "rollouts.db"),
            "--hold-seconds", str(config.gateway.hold_seconds), "--train-temperature", str(collect.temperature),
        ]  # fmt: skip
        if collect.eval_temperature is not None:
            given += ["--val-temperature", str(collect.eval_temperature)]
        return given

    return Service(folder, "gateway", arguments, key, READY)


def controller_service(config: Config, folder: Path, url: str, key: str) -> Service:
    arguments = [
        "--gateway", url, "--runner", "local", "--concurrency", str(config.controller.concurrency),
        "--workdir", str(folder / "work"), *(["--keep-failed"] if config.controller.keep_failed else []),
    ]  # fmt: skip
    return Service(folder, "controller", lambda: arguments, key)
