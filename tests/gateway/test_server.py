"""`harnessrl gateway` as a process: start, stop, kill."""

import asyncio
import dataclasses
import inspect
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from gateway_kit import Serve, Served

from harnessrl.cli.gateway import gateway as command
from harnessrl.client import (
    AsyncClient,
    Client,
    create_rollouts,
    get_calls,
    get_rollout,
    list_rollouts,
    pause,
    proxy_state,
    register_endpoints,
)
from harnessrl.gateway.settings import Settings
from harnessrl.schemas import Endpoint, NewRollout, Pause


def test_kill_9_loses_nothing_acknowledged(serve: Serve):
    gateway = serve("--key", "k")
    with Client(gateway.url, "k") as client:
        ids = [r.rollout_id for r in client(create_rollouts([NewRollout(input=n) for n in range(50)]))]
        client(pause(Pause(reason="update")))
        gateway.kill()
    gateway = serve("--key", "k")
    with Client(gateway.url, "k") as client:
        assert [r.rollout_id for r in client(list_rollouts("queuing"))] == ids
        assert client(proxy_state()).reason == "update"


async def test_the_stream_tells_every_change_and_ends_with_the_gateway(serve: Serve):
    gateway = serve("--key", "")
    async with AsyncClient(gateway.url) as follower, AsyncClient(gateway.url) as client:
        seen = []

        async def follow() -> None:
            async for _, rollout_id, state in follower.rollout_changes(after=0):
                seen.append((rollout_id, state))

        following = asyncio.create_task(follow())
        created = await client(create_rollouts([NewRollout(input=n) for n in range(20)]))
        while len(seen) < 20:
            await asyncio.sleep(0.01)
        assert seen == [(r.rollout_id, "queuing") for r in created]
        started = time.monotonic()
        assert await asyncio.to_thread(gateway.terminate) == 0
        assert time.monotonic() - started < 5
        await asyncio.wait_for(following, 5)


def test_a_key_is_made_once_and_kept_for_the_owner_only(serve: Serve, tmp_path: Path):
    gateway = serve()
    key = (tmp_path / "store.db.key").read_text().strip()
    assert stat.S_IMODE((tmp_path / "store.db.key").stat().st_mode) == 0o600
    assert sum(key in line for line in gateway.said) == 1
    assert httpx.get(f"{gateway.url}/proxy/state").status_code == 401
    with Client(gateway.url, key) as client:
        rollout_id = client(create_rollouts([NewRollout(input=1)]))[0].rollout_id
    assert gateway.terminate() == 0
    gateway = serve()
    assert not any(key in line for line in gateway.said)
    with Client(gateway.url, key) as client:
        assert client(get_rollout(rollout_id)).rollout.input == 1
    assert key.encode() not in (tmp_path / "store.db").read_bytes()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--host", "0.0.0.0"), "needs an admin key"),
        (("--host", "0.0.0.0", "--key", ""), "needs an admin key"),
        (("--port", "PORT", "--key", ""), "give another --port"),
        (("--store", "/proc/nowhere/store.db", "--key", ""), "can't be opened"),
    ],
)
def test_what_prevents_a_start_is_one_sentence(serve: Serve, options: tuple[str, ...], words: str):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(AssertionError, match=words) as failure:
            serve(*(port if option == "PORT" else option for option in options))
    assert len(str(failure.value).splitlines()) == 1


def test_a_key_for_one_role(serve: Serve):
    command = [sys.executable, "-m", "harnessrl", "key", "controller", "--key", "k"]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    gateway = serve("--key", "k")
    headers = {"authorization": f"Bearer {made}"}
    assert httpx.get(f"{gateway.url}/api/rollouts?state_in=queuing", headers=headers).status_code == 200
    assert httpx.delete(f"{gateway.url}/api/models", headers=headers).status_code == 403


def test_each_setting_is_an_option_with_the_same_default():
    options = {name: p.default for name, p in inspect.signature(command).parameters.items()}
    settings = {f.name: f.default for f in dataclasses.fields(Settings)}
    differing = {name for name in settings if (settings[name] or None) != (options.pop(name) or None)}
    assert (differing, options) == ({"store", "port"}, {})


def chat_url(client: Client) -> str:
    (rollout,) = client(create_rollouts([NewRollout(input=1)]))
    return f"/proxy/rollout/{rollout.rollout_id}/attempt/0/mode/train/openai/v1/chat/completions"


def call_and_terminate(gateway: Served, engine: str, answers: list[httpx.Response | Exception]) -> float:
    """SIGTERM while a call is under way; the seconds until the gateway had ended."""
    with Client(gateway.url) as client:
        client(register_endpoints([Endpoint(model="policy", endpoint=engine)]))
        path = chat_url(client)

    def call() -> None:
        try:
            answers.append(httpx.post(gateway.url + path, json={"messages": []}, timeout=60))
        except httpx.TransportError as error:
            answers.append(error)

    calling = threading.Thread(target=call)
    calling.start()
    while httpx.get(f"{gateway.url}/proxy/state").json()["inflight"] == 0:
        time.sleep(0.02)
    start = time.monotonic()
    assert gateway.terminate() == 0
    seconds = time.monotonic() - start
    calling.join()
    return seconds


def test_sigterm_lets_calls_run_out(serve: Serve, engine_url: str):
    answers: list[httpx.Response | Exception] = []
    call_and_terminate(serve("--key", ""), f"{engine_url}/50x10/1500/v1", answers)
    (answer,) = answers
    assert isinstance(answer, httpx.Response) and answer.status_code == 200
    gateway = serve("--key", "")
    with Client(gateway.url) as client:
        (rollout,) = client(list_rollouts("queuing"))
        (call,) = client(get_calls(rollout.rollout_id))
    assert (len(call.sampled_ids), call.delivered) == (10, True)


def test_sigterm_ends_within_its_deadline(serve: Serve, engine_url: str):
    answers: list[httpx.Response | Exception] = []
    seconds = call_and_terminate(
        serve("--key", "", "--drain-seconds", "1"), f"{engine_url}/50x10/60000/v1", answers
    )
    assert seconds < 8
    assert len(answers) == 1
