"""Gateway, controller, engine: child processes of `harnessrl train`, adopted by a resumed run, ended with it."""

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil

from harnessrl.config import Config

__all__ = [
    "Service",
    "controller_service",
    "gateway_key",
    "gateway_service",
    "secret",
    "vllm_command",
    "vllm_service",
]

OURS = (sys.executable, "-m", "harnessrl")
READY_SECONDS = 60
STOP_SECONDS = 15
YOUNG_SECONDS = 5
"""A process that ends within this time of its start is not started again."""
ERROR = r"(?im)\b\w*error\b[:,] (?!Engine core initialization failed).+"
READY = r"gateway ready at (\S+)"
VLLM_READY_SECONDS = 1800
"""A large model is loaded and compiled first."""
VLLM_READY = r"server on (http://\S+)(?s:.*)Application startup complete"
VLLM_MISSING = (
    "engine.command: there is no {} here: install vLLM in an environment of its own (`python -m venv .venv-vllm; "
    ".venv-vllm/bin/pip install vllm`) and name its command, engine.command=[.venv-vllm/bin/vllm], or a running "
    "server by engine.url"
)


class Service:
    """A command in a session of its own, its output in `folder/NAME.log`; a context manager.

    A process that an earlier trainer of this run left running is adopted. `command` is asked for at each start.
    With `ready`, entering waits for output that matches it (RuntimeError with the last error in the log if none
    comes): `address` is its first group.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        command: Callable[[], Sequence[str]],
        env: Mapping[str, str],
        ready: str | None = None,
        ready_seconds: float = READY_SECONDS,
        revives: bool = True,
    ):
        self._name, self._command, self._env = name, command, env
        self._ready, self._ready_seconds = ready, ready_seconds
        self._revives = revives
        self._log, self._known = folder / f"{name}.log", folder / f"{name}.json"
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
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **self._env}
        command = self._command()  # which may read the log
        with self._log.open("wb") as out:
            started = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
            )
        process = psutil.Process(started.pid)
        self._known.write_text(json.dumps({"pid": started.pid, "since": process.create_time()}))
        return process

    def _wait_ready(self, pattern: str) -> str:
        deadline = time.monotonic() + self._ready_seconds
        while time.monotonic() < deadline:
            if match := re.search(pattern, self._log.read_text(errors="replace")):
                return match[1]
            if self._ended():
                break
            time.sleep(0.05)
        raise RuntimeError(f"the {self._name} did not start: {self._last_words()} (see {self._log})")

    def revive(self) -> str | None:
        """Start the process again if it has ended on its own, and say so.

        Blocking. Raises RuntimeError if it had only just been started: it would end again.
        """
        if not self._ended():
            return None
        ended = f"the {self._name} has ended: {self._last_words()} (see {self._log})"
        if not self._revives or time.time() - json.loads(self._known.read_text())["since"] < YOUNG_SECONDS:
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
        """The last error that the end of the log names, or its last line."""
        lines = self._log.read_text(errors="replace").strip().splitlines()[-200:]
        errors = re.findall(ERROR, "\n".join(lines))
        return " ".join(errors[-1:] or lines[-1:])[:500]

    def __exit__(self, *_: object) -> None:
        try:
            self._process.terminate()
            self._process.wait(STOP_SECONDS)
        except psutil.TimeoutExpired:
            self._process.kill()
        except psutil.NoSuchProcess:
            pass
        with contextlib.suppress(ProcessLookupError):  # vLLM's workers outlive a server that was killed
            os.killpg(self._process.pid, signal.SIGKILL)
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

    def command() -> list[str]:
        before = re.search(READY, log.read_text(errors="replace")) if log.exists() else None
        port = config.gateway.port or (int(before[1].rpartition(":")[2]) if before else 0)
        given = [
            "--port", str(port), "--store", str(folder / "rollouts.db"),
            "--hold-seconds", str(config.gateway.hold_seconds), "--train-temperature", str(collect.temperature),
        ]  # fmt: skip
        if collect.eval_temperature is not None:
            given += ["--val-temperature", str(collect.eval_temperature)]
        if config.gateway.accept_rendered:
            given.append("--accept-rendered")
        for name, pattern in config.gateway.agents.items():
            given += ["--agent", f"{name}={pattern}"]
        return [*OURS, "gateway", *given]

    return Service(folder, "gateway", command, secret(key), READY)


def controller_service(config: Config, folder: Path, url: str, key: str) -> Service:
    arguments = [
        "--gateway", url, "--runner", "local", "--concurrency", str(config.controller.concurrency),
        "--workdir", str(folder / "work"), *(["--keep-failed"] if config.controller.keep_failed else []),
    ]  # fmt: skip
    return Service(folder, "controller", lambda: [*OURS, "controller", *arguments], secret(key))


def secret(key: str) -> dict[str, str]:
    """The key travels in the environment: a command line can be read by every user of the machine."""
    return {"HARNESSRL_KEY": key}


def vllm_command(config: Config) -> list[str]:
    """Raises ValueError, with the remedy, where vLLM is not installed."""
    command = config.engine.command
    if shutil.which(command[0]) is None:
        raise ValueError(VLLM_MISSING.format(command[0]))
    return [*command, "serve"]


def vllm_service(config: Config, folder: Path) -> Service:
    """A token endpoint whose weights are handed to it (docs/engines.md says what each argument is for)."""
    from harnessrl.engine.model import best_device, resolve

    engine, base = config.engine, vllm_command(config)
    arguments = [
        str(resolve(config.model.path)), "--served-model-name", "policy", "--dtype", config.model.dtype,
        "--host", "127.0.0.1", "--port", str(_free_port()), "--max-model-len", str(engine.max_len),
        "--max-num-seqs", str(engine.max_batch), "--seed", str(config.seed),
        "--generation-config", "vllm", "--logprobs-mode", "processed_logprobs", "--enable-scale-out",
        "--load-format", "dummy", "--disable-uvicorn-access-log",
        *(["--enable-sleep-mode"] if engine.sleep else []),
        *(["--hf-overrides", '{"tie_word_embeddings": false}'] if best_device() != "cuda" else []), *engine.args,
    ]  # fmt: skip
    return Service(
        folder,
        "engine",
        lambda: [*base, *arguments],
        {"VLLM_SERVER_DEV_MODE": "1"},
        VLLM_READY,
        VLLM_READY_SECONDS,
        revives=False,  # it would begin without weights
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
