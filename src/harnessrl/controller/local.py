"""The local runner: each attempt is a process of this machine under a keeper of its own.

Invariant: all that is known about an attempt is in its folder, so that this controller and a successor after a
crash read its end in the same way. `spec.json` is there from before the start; it becomes the keeper's
`state.jsonl`, which stays until the gateway knows the end.

    WORKDIR/lock, name, heartbeat
    WORKDIR/attempts/NAME/{spec.json | state.jsonl}, work/    (work: the agent's fresh directory)
    WORKDIR/logs/NAME.log
"""

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import stat
import time
import uuid
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Self

from harnessrl.controller.environment import StartError, mapped, model_environment, rendered, signal_name
from harnessrl.controller.keeper import start_time
from harnessrl.controller.logs import last_words, prune, shortened
from harnessrl.controller.reconcile import StopReason
from harnessrl.controller.warm import WarmServers, Warmth
from harnessrl.schemas import AttemptEnd, Claim, FailureKind, Json, LocalRun, Rollout

LOG_BYTES = 1 << 20


class WorkdirInUse(RuntimeError):
    """Another controller works in this folder."""


@dataclass(frozen=True)
class LocalOptions:
    grace_seconds: float = 5
    """Between TERM and KILL."""
    orphan_seconds: float = 30
    """An agent without a controller is stopped after this time: its lease is over by then."""
    keep_failed: bool = False
    """Keep the folders of failed attempts."""
    memory_mb: int | None = None
    """For rollouts that do not set their own."""


class LocalAttempt:
    """An attempt whose keeper runs, or has ended already."""

    job = None

    def __init__(self, folder: Path, log: Path, known: dict[str, Any], keeper: dict[str, int] | None):
        self.folder, self.log, self._keeper = folder, log, keeper
        self.rollout_id: str = known["rollout_id"]
        self.attempt_id: str = known["attempt_id"]
        self._timeout: float = known["timeout_seconds"]
        self._marker: str = known["event_url"]
        self._stopped: StopReason | None = None
        self._begun = time.time()
        """Of the current stage, when last seen: the agent may remove the folder that tells."""
        self.held_seconds = 0.0

    def deadline(self) -> float:
        """Epoch seconds. Set-up, agent and evaluation may take the timeout each; waiting for updates is free."""
        if state := _state(self.folder):
            self._begun = state.get("started_at", time.time())
        return self._begun + self._timeout + self.held_seconds

    def stop(self, reason: StopReason, at_once: bool = False) -> None:
        self._stopped = self._stopped or reason
        if self._keeper and start_time(self._keeper["pid"]) == self._keeper["start"]:
            with contextlib.suppress(ProcessLookupError):  # it may end at any moment
                os.kill(self._keeper["pid"], signal.SIGCONT)  # the agent may have stopped it
                os.kill(self._keeper["pid"], signal.SIGINT if at_once else signal.SIGTERM)

    async def wait(self) -> AttemptEnd:
        """Until the agent and all its descendants are gone."""
        if self._keeper is not None:
            await _exited(self._keeper["pid"], self._keeper["start"])
        end = _state(self.folder).get("end")
        if end is None:
            self._kill_strays()
            message = "the agent's keeper was killed" if self._keeper else "the controller ended before the start"
            return AttemptEnd(ok=False, error_message=message, failure_kind="infra")
        if self._stopped == "timeout" and end["stopped"]:
            message = f"local subprocess timed out after {self._timeout:g} s ({end['stage']})"
            kind: FailureKind = "agent" if end["stage"] == "agent" else "infra"
            return AttemptEnd(ok=False, error_message=message, failure_kind=kind)
        return _judged(end, self.log)

    async def output(self, limit: int) -> Json | None:
        try:
            with open(self.log, "rb") as file:
                text = await asyncio.to_thread(shortened, file, limit)
        except FileNotFoundError:
            return None
        return {"text": text, "path": str(self.log), "host": socket.gethostname()}

    def _kill_strays(self) -> None:
        """The keeper did not end its attempt's processes: find them by their environment."""
        marker = f"AGL_EVENT_URL={self._marker}\0".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if marker in path.read_bytes() + b"\0":
                    os.kill(int(path.parent.name), signal.SIGKILL)
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue


class LocalRunner:
    """Starts attempts on this machine; a context manager. Raises `WorkdirInUse`."""

    outlives_controller = False

    def __init__(self, workdir: Path, gateway_url: str, key: str | None, options: LocalOptions | None = None):
        self.options = options or LocalOptions()
        self._gateway_url = gateway_url.rstrip("/")
        self._workdir = workdir.absolute()
        for name in ("attempts", "logs"):
            (self._workdir / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = _locked(self._workdir / "lock")
        self.name = _kept_name(self._workdir / "name")
        self.heartbeat()
        self._warm = WarmServers(self._workdir / "forkserver.log", frozenset({key} if key else ()))
        _raise_open_files()
        prune(self._workdir / "logs")

    def accepts(self, rollout: Rollout) -> bool:
        return rollout.config.local is not None

    def heartbeat(self) -> None:
        """Tell the keepers that there is a controller."""
        (self._workdir / "heartbeat").touch()

    async def start(self, claim: Claim) -> LocalAttempt:
        """Raises `StartError` if the agent cannot be started; nothing is left of it then."""
        run = claim.rollout.config.local
        assert run is not None
        rollout_id, attempt_id = claim.rollout.rollout_id, claim.attempt_id
        readable = re.sub(r"[^A-Za-z0-9._-]", "_", rollout_id)[:40]
        name = f"{readable}-{hashlib.sha256(rollout_id.encode()).hexdigest()[:10]}-{attempt_id}"
        folder = self._workdir / "attempts" / name
        log = self._workdir / "logs" / f"{name}.log"
        own = model_environment(self._gateway_url, claim, claim.agent_key)
        try:
            warmth, stages = self._plan(run, claim, folder)
            known = {
                "rollout_id": rollout_id,
                "attempt_id": attempt_id,
                "timeout_seconds": claim.rollout.config.timeout_seconds,
                "event_url": own["AGL_EVENT_URL"],
                "warmth": astuple(warmth),
            }
            log.unlink(missing_ok=True)  # of a rollout that was deleted and made again under its old id
            _remove(folder)
            folder.mkdir(mode=0o700)
            (folder / "work").mkdir()
            new = folder / "spec.new"
            new.write_text(json.dumps({"attempt": known, **self._spec(run, stages, own, log)}))
            new.rename(folder / "spec.json")  # all or nothing, for a successor
            keeper = await self._fork(warmth, folder)
        except StartError:
            _remove(folder)
            raise
        except OSError as error:
            _remove(folder)
            raise StartError(f"could not write the attempt's folder: {error}") from error
        return LocalAttempt(folder, log, known, keeper)

    async def adopt(self) -> list[LocalAttempt]:
        """The attempts that an earlier controller with this `workdir` left, running or ended."""
        folders = list((self._workdir / "attempts").iterdir())
        if any("pid" not in _state(folder) for folder in folders):
            await asyncio.sleep(1)  # the fork server that lost its controller may be about to start one
        return await asyncio.gather(*(self._adopt(folder) for folder in folders if _state(folder)))

    async def _adopt(self, folder: Path) -> LocalAttempt:
        state = _state(folder)
        known = state["attempt"]
        keeper = {"pid": state["pid"], "start": state["start"]} if "pid" in state else None
        if (folder / "spec.json").exists():  # nobody took it up
            python, preload, module = known["warmth"]
            with contextlib.suppress(StartError):
                keeper = await self._fork(Warmth(python, tuple(preload), module), folder)
        return LocalAttempt(folder, self._workdir / "logs" / f"{folder.name}.log", known, keeper)

    async def _fork(self, warmth: Warmth, folder: Path) -> dict[str, int]:
        pid = await self._warm.fork(warmth, str(folder))
        return {"pid": pid, "start": start_time(pid) or 0}

    async def forget(self, attempt: LocalAttempt, ok: bool) -> None:
        if ok or not self.options.keep_failed:
            await asyncio.to_thread(_remove, attempt.folder)
            return
        for name in _STATES:  # its mark of being unreported
            (attempt.folder / name).unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._warm.close()
        self._lock.close()

    def _spec(self, run: LocalRun, stages: list[dict[str, Any]], own: dict[str, str], log: Path) -> dict[str, Any]:
        return {
            "stages": stages,
            "env": own,
            "log": str(log),
            "log_bytes": LOG_BYTES,
            "grace_seconds": self.options.grace_seconds,
            "heartbeat": str(self._workdir / "heartbeat"),
            "orphan_seconds": self.options.orphan_seconds,
            "memory_mb": run.memory_mb or self.options.memory_mb,
            "cpu_seconds": run.cpu_seconds,
        }

    def _plan(self, run: LocalRun, claim: Claim, folder: Path) -> tuple[Warmth, list[dict[str, Any]]]:
        """The interpreter to fork from, and the stages: copy, setup, agent, evaluate."""
        cwd = str(folder / "work")
        source = os.path.abspath(rendered(run.cwd, claim)) if run.cwd else None
        stages: list[dict[str, Any]] = []

        def add(name: str, command: list[str], env: dict[str, str]) -> None:
            argv = [rendered(item, claim) for item in command]
            python, warm = _python_command(argv, env)
            how = warm if warm and warmth.preload and python == warmth.python else {"argv": argv}
            stages.append({"name": name, "env": env, "cwd": cwd, **how})

        if source and run.copy_cwd:
            stages.append({"name": "copy", "argv": ["cp", "-a", f"{source}/.", cwd], "env": {}, "cwd": "/"})
        elif source:
            cwd = source
        env = mapped(run.env_map, claim.rollout.input)
        env.update({name: rendered(value, claim) for name, value in (run.env or {}).items()})
        warmth, agent = _agent(run, claim, env)
        if run.setup:
            add("setup", run.setup, env)
        stages.append({"name": "agent", "env": env, "cwd": cwd, **agent})
        if run.evaluate:
            if claim.evaluator_key is None:
                raise StartError("the gateway gave no key for the evaluation command")
            add("evaluate", run.evaluate, env | model_environment(self._gateway_url, claim, claim.evaluator_key))
        return warmth, stages


def _agent(run: LocalRun, claim: Claim, env: dict[str, str]) -> tuple[Warmth, dict[str, Any]]:
    preload = tuple(run.preload or ())
    if run.agent_class:
        module = run.agent_class.partition(":")[0] if ":" in run.agent_class else run.agent_class.rpartition(".")[0]
        return Warmth(preload=preload, agent_module=module), {"python": {"class": run.agent_class}}
    if not run.command:
        raise StartError("`local` needs a `command` (a list) or an `agent_class`")
    argv = [rendered(item, claim) for item in run.command]
    if not preload:
        return Warmth(), {"argv": argv}
    python, warm = _python_command(argv, env)
    if python is None or warm is None:
        raise StartError(f"`preload` needs a command [python, script.py, …] or [python, -m, module, …], not {argv}")
    return Warmth(python, preload), warm


def _python_command(argv: list[str], env: dict[str, str]) -> tuple[str | None, dict[str, Any] | None]:
    """The interpreter of `[python, script.py, …]` or `[python, -m, module, …]`, and what a warm one is to run."""
    python = shutil.which(argv[0], path=env.get("PATH"))
    if python is None or len(argv) < 2 or not os.path.basename(python).startswith("python"):
        return None, None
    if argv[1] == "-m" and len(argv) > 2:
        return python, {"python": {"module": argv[2], "argv": argv[2:]}}
    if argv[1].startswith("-"):
        return None, None
    return python, {"python": {"script": argv[1], "argv": argv[1:]}}


def _judged(end: dict[str, Any], log: Path) -> AttemptEnd:
    """What the keeper saw, told to the user. `failure_kind` None: whose it is depends on the calls."""
    stage = end["stage"]
    who = "local subprocess" if stage == "agent" else f"the {stage} command"
    kind: FailureKind | None = None if stage == "agent" else "infra"
    if end.get("error"):
        return AttemptEnd(ok=False, error_message=end["error"], failure_kind="infra")
    if end["stopped"]:
        why = "no controller gave a sign of life" if end["stopped"] == "orphaned" else "the controller was stopped"
        return AttemptEnd(ok=False, error_message=f"{who} was stopped: {why}", failure_kind="infra")
    if end["cpu"]:
        message = f"{who} used up its cpu_seconds"
        return AttemptEnd(ok=False, error_message=message, failure_kind=kind or "agent")
    if end["oom"]:
        return AttemptEnd(ok=False, error_message=f"{who} was killed: out of memory", failure_kind=kind)
    if end["signal"]:
        message = f"{who} was killed by {signal_name(end['signal'])}"
        return AttemptEnd(ok=False, error_message=message, failure_kind=kind)
    if end["code"]:
        message = f"{who} exited with code {end['code']}{last_words(log)}"
        return AttemptEnd(ok=False, error_message=message, failure_kind=kind)
    return AttemptEnd(ok=True)


async def _exited(pid: int, start: int) -> None:
    """Until that process has ended; a process that got its number later does not count."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    gone = loop.create_future()
    try:
        if start_time(pid) == start:
            loop.add_reader(fd, _resolve, gone)
            await gone
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


_STATES = ("state.jsonl", "spec.json")


def _state(folder: Path) -> dict[str, Any]:
    """All that the keeper noted of its attempt, or the spec that it is to take up; empty if there is neither."""
    for name in _STATES:
        with contextlib.suppress(FileNotFoundError):
            lines = (folder / name).read_text().splitlines()
            return {key: value for line in lines for key, value in json.loads(line).items()}
    return {}


def _remove(folder: Path) -> None:
    """Remove a tree, also one whose folders were made read-only."""

    def unlock(remove: Callable[[str], object], path: str, error: Any) -> None:
        if isinstance(error[1], FileNotFoundError):
            return
        os.chmod(os.path.dirname(path), stat.S_IRWXU)
        os.chmod(path, stat.S_IRWXU)
        remove(path)

    shutil.rmtree(folder, onerror=unlock)


def _locked(path: Path) -> Any:
    file = open(path, "a")  # noqa: SIM115 (held as long as the runner lives)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise WorkdirInUse(f"another controller uses {path.parent}: give this one its own --workdir") from error
    return file


def _kept_name(path: Path) -> str:
    """This controller's name at the gateway; the same after a restart, so that its leases are still its own."""
    if not path.exists():
        path.write_text(f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}")
    return path.read_text()


def _raise_open_files() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
