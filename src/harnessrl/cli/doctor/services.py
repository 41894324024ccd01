"""What else has to answer: the gateway, its store and controllers, engines, a cluster."""

import sqlite3
import tempfile
import time
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TypeVar

import httpx

from harnessrl.client import Client, Request, list_endpoints, list_rollouts
from harnessrl.config import Config

T = TypeVar("T")

_SECONDS = 10.0
_SKEW_SECONDS = 5.0
_REMOTE = ("nfs", "cifs", "smb", "fuse.sshfs", "lustre", "ceph", "glusterfs")


def store(config: Config) -> str | None:
    """Where the run's own gateway keeps it."""
    if config.gateway.url:
        return None
    import psutil

    folder = Path(config.runs_dir).absolute()
    made = folder
    while not made.exists():
        made = made.parent
    try:
        with tempfile.NamedTemporaryFile(dir=made, suffix=".db") as file:
            db = sqlite3.connect(file.name)
            mode = db.execute("PRAGMA journal_mode=WAL").fetchone()[0]
            db.close()
    except (OSError, sqlite3.Error) as error:
        raise ValueError(f"nothing can be written in {made} ({error}): set runs_dir") from None
    mounts = [part for part in psutil.disk_partitions(all=True) if made.is_relative_to(part.mountpoint)]
    kind = max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else ""
    if mode != "wal" or kind.startswith(_REMOTE):
        raise ValueError(
            f"{made} is on a file system ({kind}) where SQLite is not safe: set runs_dir to a local disk"
        )
    return f"SQLite {sqlite3.sqlite_version} in {folder}"


def gateway(config: Config) -> str | None:
    if (url := config.gateway.url) is None:
        return None
    try:
        httpx.get(f"{url}/healthz", timeout=_SECONDS).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ValueError(
            f"no gateway answers at {url} ({type(error).__name__}): start one with `harnessrl gateway`, or correct "
            "gateway.url"
        ) from None
    _ask(config, list_rollouts("running", limit=1))
    return f"{url} answers, and takes our key"


def _ask(config: Config, request: Request[T]) -> T:
    assert config.gateway.url
    with Client(config.gateway.url, config.gateway.key, _SECONDS) as client:
        return client(request)


def clock(config: Config) -> str | None:
    """Leases and time limits compare this machine's clock with the gateway's."""
    if config.gateway.url is None:
        return None
    began = time.time()
    answered = httpx.get(f"{config.gateway.url}/healthz", timeout=_SECONDS)
    if "date" not in answered.headers:
        return None
    there = parsedate_to_datetime(answered.headers["date"]).timestamp() + 0.5  # it has whole seconds only
    skew = there - (began + time.time()) / 2
    if abs(skew) > _SKEW_SECONDS:
        raise ValueError(f"the gateway's clock is {skew:+.0f} s off ours: set both by NTP")
    return "agrees with the gateway's"


def controller(config: Config) -> str | None:
    if config.controller.runner == "local":
        return f"started with the run, {config.controller.concurrency} agents at once"
    if config.gateway.url is None:
        raise ValueError(
            "controller.runner is none, but the gateway is started with the run: set gateway.url, or local"
        )
    if _ask(config, list_rollouts("running", limit=1)):
        return "rollouts run"
    if waiting := _ask(config, list_rollouts("queuing", limit=100)):
        raise ValueError(
            f"{len(waiting)} rollouts wait at the gateway and none runs: start "
            f"`harnessrl controller --gateway {config.gateway.url}`"
        )
    return "no rollout waits; whether one is there is seen when the run begins"


def engine(config: Config) -> str | None:
    """Engines that are registered, or that the configuration names."""
    from harnessrl.cli.services import vllm_command

    if config.engine.kind == "vllm" and not config.engine.url:
        vllm_command(config)  # says what to do where there is none
    urls = [config.engine.url] if config.engine.url else []
    if config.gateway.url:
        urls += [endpoint.endpoint.removesuffix("/v1") for endpoint in _ask(config, list_endpoints())]
    if not urls:
        return None
    for url in urls:
        try:
            httpx.get(f"{url}/health", timeout=_SECONDS).raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ValueError(
                f"no engine answers at {url} ({type(error).__name__}): start it, or correct its address"
            ) from None
    return f"{', '.join(urls)} answer{'s' if len(urls) == 1 else ''}"


def kubernetes(config: Config) -> str | None:
    """What a controller may do, by the kubeconfig and the namespace of this shell."""
    if config.agent.k8s is None:
        return None
    import asyncio

    from harnessrl.controller.kubernetes import current_namespace, missing_rights

    namespace = current_namespace()
    if missing := asyncio.run(missing_rights(namespace)):
        raise ValueError(
            f"no right to {', '.join(missing)} in the namespace {namespace}: apply deploy/controller.yaml, or ask "
            "who runs the cluster"
        )
    return f"all rights of a controller in the namespace {namespace}"
