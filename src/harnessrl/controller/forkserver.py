"""A warm interpreter: it imports an agent's libraries once and forks one keeper per attempt on request.

Run as `python forkserver.py SOCKET_FD NOFILE LEARN [MODULE …]` by the interpreter that agents are to run in. Each
packet on the socket is the folder of an attempt; the answer is `folder NUL pid`, or `folder NUL error text`.
It ends when the controller closes the socket; keepers go on.

The modules named are imported at once. With LEARN 1, also the libraries that the first attempt's agent class
imports. Only the libraries: the user's own code is imported afresh in each attempt, so that code which reads
the environment, opens connections or is edited meanwhile acts as in a new interpreter.

Single-threaded, so that forking is safe. Standard library only, Python 3.9 or later. What is imported here, even
from the standard library, makes each fork dearer: what only some need is imported where it is needed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import sys
from typing import Any, NoReturn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
from harnessrl.controller import keeper  # noqa: E402

del sys.path[0]
if not sys.flags.isolated:
    sys.path[0] = os.getcwd()

_LEARN_SECONDS = 30


class AgentInterpreter:
    """What runs in the forked agent process; `learn` is the pipe on which to tell which modules it needed."""

    def __init__(self, learn: int | None):
        self.learn = learn

    def run(self, what: dict[str, Any]) -> NoReturn:
        """`{"class": "pkg.mod:Class"}`, `{"script": path, "argv": […]}` or `{"module": name, "argv": […]}`."""
        code = 1
        try:
            _reseed()
            if "class" in what:
                self._run_class(what["class"])
            else:
                _run_main(what)
            code = 0
        except SystemExit as stop:
            code = _exit_code(stop)
        except BaseException as error:
            trace = error.__traceback__
            while trace and trace.tb_frame.f_code.co_filename == __file__:
                trace = trace.tb_next
            sys.excepthook(type(error), error.with_traceback(trace), trace)
        finally:
            _finish(code)

    def _run_class(self, target: str) -> None:
        import importlib

        sys.argv = [target]
        module, _, name = target.partition(":") if ":" in target else target.rpartition(".")
        try:
            agent = getattr(importlib.import_module(module), name)
        finally:
            if self.learn is not None:
                with contextlib.suppress(BrokenPipeError), open(self.learn, "wb") as file:
                    file.write(json.dumps(_library_modules()).encode())
        result = agent().run()
        if hasattr(result, "__await__"):
            import asyncio

            asyncio.run(_await(result))


async def _await(result: Any) -> None:
    await result


def _run_main(what: dict[str, Any]) -> None:
    """As `python script.py …` or `python -m module …` would."""
    sys.argv = what["argv"]
    if "module" in what:
        import runpy

        sys.path[0] = os.getcwd()
        runpy.run_module(what["module"], run_name="__main__", alter_sys=True)
        return
    path = what["script"]
    sys.path[0] = os.path.dirname(os.path.abspath(path))
    main = type(sys)("__main__")
    main.__dict__.update(__file__=path, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    exec(code, main.__dict__)


def _reseed() -> None:
    """Forked agents must not draw the same numbers; `random` does so by itself."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(int.from_bytes(os.urandom(4), "little"))


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1


def _finish(code: int) -> NoReturn:
    """End as an interpreter does (threads joined, exit functions, flush), without tearing modules down."""
    import atexit
    import threading

    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _library_modules() -> list[str]:
    """Names of the loaded modules that come with Python or from site-packages, in the order of import."""
    import sysconfig

    libraries = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})

    def is_library(module: Any) -> bool:
        file = getattr(module, "__file__", None)
        return file is None or file.startswith(libraries)

    return [name for name, module in list(sys.modules.items()) if name != "__main__" and is_library(module)]


def _preload(modules: list[str]) -> None:
    import importlib

    for name in modules:
        # What cannot be imported here fails, or not, in the agent itself, where its owner sees why.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    _refuse_threads()


class ForkServer:
    def __init__(self, sock: int, learn: bool, environment: dict[str, str]):
        self.sock, self.learn, self.environment = sock, learn, environment

    def serve(self) -> None:
        while folder := os.read(self.sock, 65536).decode():
            os.write(self.sock, f"{folder}\0{self._fork(folder)}".encode())

    def _fork(self, folder: str) -> str:
        pipe = os.pipe() if self.learn else None
        try:
            pid = os.fork()
        except OSError as error:
            return f"could not fork: {error.strerror}"
        if pid == 0:
            self._become_keeper(folder, pipe)
        if pipe:
            os.close(pipe[1])
            self._learn_from(pipe[0])
        return str(pid)

    def _become_keeper(self, folder: str, pipe: tuple[int, int] | None) -> NoReturn:
        code = 1
        try:
            os.close(self.sock)
            if pipe:
                os.close(pipe[0])
            learn = pipe[1] if pipe else None
            keeper.keep(folder, self.environment, AgentInterpreter(learn).run, learn)
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)

    def _learn_from(self, pipe: int) -> None:
        """Import what the first attempt's agent imports; others wait meanwhile, or each would pay for it."""
        self.learn = False
        with open(pipe, "rb") as file:
            ready, _, _ = select.select([file], [], [], _LEARN_SECONDS)
            names = file.read() if ready else b""
        if names:
            _preload(json.loads(names))


def _refuse_threads() -> None:
    """A process with threads must not fork: start again without the modules that started them."""
    import threading

    if threading.active_count() > 1:
        print(f"importing started threads ({threading.enumerate()}): agents import for themselves", file=sys.stderr)
        os.execv(sys.executable, [sys.executable, *sys.argv[:3], "0"])


def _reap(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> None:
    fd, nofile, learn, modules = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1", sys.argv[4:]
    signal.signal(signal.SIGCHLD, _reap)
    resource.setrlimit(resource.RLIMIT_NOFILE, (nofile, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    environment = dict(os.environ)
    if modules:
        _preload(modules)
    else:
        gc.freeze()
    ForkServer(fd, learn, environment).serve()


if __name__ == "__main__":
    main()
