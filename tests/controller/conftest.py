"""A real gateway and real controllers, as processes."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from processes import KEY, Gateway, Process, Start


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    gateway = Gateway(tmp_path_factory.mktemp("gateway"))
    yield gateway
    gateway.process.kill()


@pytest.fixture
def start(gateway: Gateway, tmp_path: Path) -> Iterator[Start]:
    """Start a controller: `start("--concurrency", "3", workdir="w")`; it is killed after the test."""
    with ExitStack() as stack:

        def start(*options: str, workdir: str = "w") -> Process:
            folder = tmp_path / workdir
            folder.mkdir(exist_ok=True)
            arguments = ("controller", "--gateway", gateway.url, "--key", KEY, "--workdir", str(folder))
            process = Process(folder / "controller.log", *arguments, "--grace-seconds", "1", *options, cwd=tmp_path)
            stack.callback(lambda: process.popen.poll() is None and process.end())
            return process

        yield start


@pytest.fixture(scope="module")
def controller(gateway: Gateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One controller for a module's tests; its workdir."""
    folder = tmp_path_factory.mktemp("controller")
    arguments = ("controller", "--gateway", gateway.url, "--key", KEY, "--workdir", str(folder))
    options = ("--grace-seconds", "0.5", "--lease-seconds", "3")
    process = Process(folder / "log", *arguments, *options, cwd=folder)
    yield folder
    process.end()
