"""One keeper per attempt: the small process that starts the agent, keeps its log and ends all that it started.

Invariant: when a keeper has exited, none of its descendants is alive and the last line of its `state.jsonl`
tells how the attempt ended. It depends on nobody: if the controller and the fork server die, the keeper stays, so
that a successor can adopt it; if no controller gives a sign of life for `orphan_seconds`, it stops the agent by
itself.

Standard library only, Python 3.9 or later: it runs in the agent's own interpreter. Linux (subreaper, /proc). What
it does is paid for by every attempt: each page it touches is copied, each file it makes costs as much as `true`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_prctl = ctypes.CDLL(None).prctl

Spec = dict[str, Any]
"""`attempt` (whose it is, for the controller), `stages` (each `name`, `env`, `cwd` and `argv` or `python`), `env`
(beyond the fork server's own), `log`, `log_bytes`, `grace_seconds`, `heartbeat`, `orphan_seconds`, `memory_mb`,
`cpu_seconds`; written by `harnessrl.controller.local`."""


def start_time(pid: int) -> int | None:
    """Clock ticks between boot and the start of `pid`; None if there is no such process (or a zombie)."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            fields = file.read().rsplit(b")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == b"Z" else int(fields[19])


class BoundedLog:
    """The first and the last `limit / 2` bytes (at least) of what is written; readable while it grows."""

    def __init__(self, path: str, limit: int):
        self.path, self.half, self.size = path, limit // 2, 0
        self.tail_size = 0

    def write(self, data: bytes) -> None:
        head, rest = data[: max(0, self.half - self.size)], data[max(0, self.half - self.size) :]
        self.size += len(data)
        if head:
            self._append(self.path, head)
        if rest:
            if self.tail_size + len(rest) > self.half:
                if self.tail_size:
                    os.replace(self.path + ".tail", self.path + ".before")
                self.tail_size = 0
            self._append(self.path + ".tail", rest)
            self.tail_size += len(rest)

    def close(self) -> None:
        """Join the pieces into one file that says how much is missing between them."""
        tail = b"".join(self._take(self.path + end) for end in (".before", ".tail"))
        if tail:
            missing = self.size - self.half - len(tail)
            gap = f"\n[… {missing} bytes left out …]\n".encode() if missing else b""
            self._append(self.path, gap + tail)

    @staticmethod
    def _append(path: str, data: bytes) -> None:
        with open(path, "ab", buffering=0) as file:
            file.write(data)

    @staticmethod
    def _take(path: str) -> bytes:
        try:
            with open(path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            return b""
        os.unlink(path)
        return data


def _descendants(pid: int) -> list[int]:
    found = [pid]
    for parent in found:  # which grows meanwhile
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children") as file:
                    found += map(int, file.read().split())
    return found[1:]


def _oom_kills() -> int:
    with contextlib.suppress(OSError), open("/proc/vmstat", "rb", buffering=0) as file:
        found = file.read().partition(b"\noom_kill ")[2]
        return int(found.split(None, 1)[0]) if found else 0
    return 0


class Keeper:
    def __init__(self, state: int, spec: Spec, run_python: Callable[[Any], None], agent_fd: int | None):
        self.state, self.spec, self.run_python, self.agent_fd = state, spec, run_python, agent_fd
        self.log = BoundedLog(spec["log"], spec["log_bytes"])
        self.stop: str | None = None
        self.grace: float = spec["grace_seconds"]
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        os.setsid()
        _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_stop)
        signal.signal(signal.SIGINT, self._on_stop)
        pid = os.getpid()
        self._note({"attempt": self.spec["attempt"], "pid": pid, "start": start_time(pid)})
        end: dict[str, Any] = {}
        for stage in self.spec["stages"]:
            end = self._stage(stage)
            if end.get("code") != 0:
                break
        with contextlib.suppress(OSError):
            self.log.close()
        self._note({"end": end})

    def _note(self, news: dict[str, Any]) -> None:
        os.write(self.state, json.dumps(news).encode() + b"\n")

    def _on_stop(self, number: int, _: Any) -> None:
        """SIGTERM: with the grace period; SIGINT: at once."""
        self.stop = self.stop or "asked"
        if number == signal.SIGINT:
            self.grace = 0

    def _stage(self, stage: dict[str, Any]) -> dict[str, Any]:
        """Run one stage until it and all its descendants are gone; how its own process ended."""
        if self.stop:
            return {"stage": stage["name"], "stopped": self.stop}
        self._note({"stage": stage["name"], "started_at": time.time()})
        oom_before = _oom_kills()
        output, write_end = os.pipe2(os.O_CLOEXEC)
        try:
            os.chdir(stage["cwd"])
            pid = self._start(stage, {**self.spec["env"], **stage["env"]}, write_end)
        except (OSError, ValueError) as error:
            os.close(output)
            return {"stage": stage["name"], "error": f"could not start the {stage['name']}: {error}"}
        finally:
            os.close(write_end)
        status, cpu_seconds, stopped = self._keep(pid, output)
        os.close(output)
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        code = None if number else os.WEXITSTATUS(status)
        by = number or (code or 0) - 128  # a shell tells of its child's signal like that
        limit = self.spec["cpu_seconds"]
        killed = by == signal.SIGKILL and not stopped
        return {
            "stage": stage["name"],
            "code": code,
            "signal": number,
            "oom": killed and _oom_kills() > oom_before,
            "cpu": bool(limit) and (by == signal.SIGXCPU or killed and cpu_seconds >= limit),
            "stopped": stopped,
        }

    def _start(self, stage: dict[str, Any], env: dict[str, str], output: int) -> int:
        if "argv" in stage:
            os.environ["PATH"] = env.get("PATH", os.defpath)  # where `posix_spawnp` looks
            pid = os.posix_spawnp(
                stage["argv"][0],
                stage["argv"],
                env,
                file_actions=[(os.POSIX_SPAWN_DUP2, output, 1), (os.POSIX_SPAWN_DUP2, output, 2)],
                setsid=True,
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
            )
            self._limit(pid)
            return pid
        pid = os.fork()
        if pid == 0:
            self._become_agent(stage, env, output)
        if self.agent_fd is not None:
            os.close(self.agent_fd)
            self.agent_fd = None
        return pid

    def _limit(self, pid: int) -> None:
        """Of each process; those that it starts inherit it."""
        memory_mb, cpu_seconds = self.spec["memory_mb"], self.spec["cpu_seconds"]
        if not memory_mb and not cpu_seconds:
            return
        import resource

        with contextlib.suppress(ProcessLookupError):
            if memory_mb:
                resource.prlimit(pid, resource.RLIMIT_DATA, (memory_mb << 20, memory_mb << 20))
            if cpu_seconds:  # SIGXCPU, then SIGKILL for those who ignore it
                resource.prlimit(pid, resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))

    def _become_agent(self, stage: dict[str, Any], env: dict[str, str], output: int) -> None:
        """In the forked child: look like a fresh interpreter, then run the agent; never returns."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.setsid()
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            self._limit(os.getpid())
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            os.close(self.state)
            os.close(self.wake_read)
            os.close(self.wake_write)
            os.environ.clear()
            os.environ.update(env)
            self.run_python(stage["python"])
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)

    def _keep(self, pid: int, output: int) -> tuple[int, float, str | None]:
        """Pump the output, and wait until no child is left; of `pid`: wait status, CPU time, why it was stopped.

        Orphaned descendants become children of this process (subreaper), so "no child" means all are gone.
        """
        poll = select.poll()
        poll.register(self.wake_read, select.POLLIN)
        poll.register(output, select.POLLIN)
        status: int | None = None
        cpu_seconds = 0.0
        stopped: str | None = None
        kill_at: float | None = None
        while True:
            with contextlib.suppress(BlockingIOError):
                os.read(self.wake_read, 4096)
            try:
                while (reaped := os.wait4(-1, os.WNOHANG))[0]:
                    if reaped[0] == pid:
                        status, stopped = reaped[1], self.stop
                        cpu_seconds = reaped[2].ru_utime + reaped[2].ru_stime
            except ChildProcessError:
                self._drain(output)
                assert status is not None
                return status, cpu_seconds, stopped
            now = time.monotonic()
            if kill_at is None and (status is not None or self.stop):
                self._signal_all(signal.SIGTERM)
                kill_at = now + self.grace
            elif kill_at is not None and (now >= kill_at or (self.stop and not self.grace)):
                self._signal_all(signal.SIGKILL)
                kill_at = now + 0.1
            if self._wait(poll, (kill_at - now) if kill_at is not None else self._orphaned_in(), output):
                poll.unregister(output)

    def _wait(self, poll: select.poll, seconds: float, output: int) -> bool:
        """Until something happens, at most `seconds`; true if the output has ended."""
        for fd, _ in poll.poll(max(0, seconds) * 1000):
            if fd == output:
                data = os.read(output, 65536)
                self._keep_output(data)
                return not data
        return False

    def _drain(self, output: int) -> None:
        os.set_blocking(output, False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(output, 65536):
                self._keep_output(data)

    def _keep_output(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk costs the log, not the attempt
            self.log.write(data)

    def _signal_all(self, number: int) -> None:
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def _orphaned_in(self) -> float:
        """Seconds until the controller counts as gone; sets `stop` when they are over."""
        try:
            beat = os.stat(self.spec["heartbeat"]).st_mtime
        except FileNotFoundError:
            beat = 0.0
        left = beat + self.spec["orphan_seconds"] - time.time()
        if left <= 0:
            self.stop = "orphaned"
            return 0
        return left


def keep(folder: str, environment: dict[str, str], run_python: Callable[[Any], None], agent_fd: int | None) -> None:
    """The life of one keeper, in a process of its own; `agent_fd` is for a forked agent, closed here after.

    `spec.json` becomes `state.jsonl`: by its renaming two cannot take up the same attempt, by its emptying the
    agent cannot read the evaluator's key in it, and no further file has to be made.
    """
    os.rename(f"{folder}/spec.json", f"{folder}/state.jsonl")
    state = os.open(f"{folder}/state.jsonl", os.O_RDWR | os.O_APPEND)
    spec = json.loads(os.read(state, os.fstat(state).st_size))
    os.ftruncate(state, 0)
    spec["env"] = {**environment, **spec["env"]}
    Keeper(state, spec, run_python, agent_fd).run()
