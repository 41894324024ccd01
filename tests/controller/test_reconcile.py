"""Concurrency, order, leases, and what becomes of agents when a controller or the gateway dies."""

import asyncio
import os
import signal
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from processes import Gateway, Start, alive, until

from harnessrl.client import (
    create_rollouts,
    delete_rollout,
    get_events,
    list_rollouts,
    patch_rollout,
    pause,
    register_endpoints,
    resume,
)
from harnessrl.controller.environment import StartError
from harnessrl.controller.warm import WarmServers, Warmth
from harnessrl.schemas import Endpoint, LocalRun, NewRollout, Pause, RolloutConfig, StatusPatch


def sleepers(mark: str, seconds: str = "60") -> LocalRun:
    return LocalRun(agent_class="harness_agents:Sleeper", env={"MARK": mark, "SECONDS": seconds})


def commands(mark: str, seconds: str = "60") -> LocalRun:
    return LocalRun(command=["sleep", seconds], env={"MARK": mark})


def test_concurrency_is_exact(gateway: Gateway, start: Start) -> None:
    start("--concurrency", "3")
    rollouts = gateway.post(sleepers("x", "0.4"), n=7)
    seen = []
    while any(gateway.rollout(r.rollout_id).status.state not in ("succeeded", "failed") for r in rollouts):
        seen.append(len(gateway.ask(list_rollouts("running"))))
    assert max(seen) == 3
    assert {gateway.rollout(r.rollout_id).status.state for r in rollouts} == {"succeeded"}


def test_priority_then_age(gateway: Gateway, start: Start) -> None:
    run = LocalRun(agent_class="harness_agents:Rewarder")
    priorities = [0, 5, None, 9, 5]
    new = [NewRollout(input={}, config=RolloutConfig(local=run, priority=p)) for p in priorities]
    rollouts = gateway.ask(create_rollouts(new))
    start("--concurrency", "1")
    ended = [gateway.ended(rollout).status.updated_at for rollout in rollouts]
    assert sorted(range(5), key=lambda i: ended[i]) == [3, 1, 4, 0, 2]


def test_sigterm_stops_all_agents(gateway: Gateway, start: Start) -> None:
    mark = uuid.uuid4().hex
    controller = start("--concurrency", "6")
    rollouts = gateway.post(commands(mark), n=6)
    until(lambda: len(alive(mark)) == 6)
    begun = time.monotonic()
    assert controller.end(signal.SIGINT) == 0
    assert time.monotonic() - begun < 4
    assert not alive(mark)
    status = gateway.ended(rollouts[0], seconds=1).status
    assert (status.failure_kind, "the controller was stopped" in (status.error_message or "")) == ("infra", True)


@pytest.mark.parametrize("how", ["cancelled", "deleted"])
def test_cancelling_stops_it_at_once(gateway: Gateway, start: Start, how: str) -> None:
    start("--lease-seconds", "60")
    mark = uuid.uuid4().hex
    (rollout,) = gateway.post(LocalRun(command=["sleep", "60"], env={"MARK": mark}))
    until(lambda: alive(mark))
    if how == "cancelled":
        gateway.ask(patch_rollout(rollout.rollout_id, StatusPatch(state="failed", error_message="by the user")))
    else:
        gateway.ask(delete_rollout(rollout.rollout_id))
    until(lambda: not alive(mark), seconds=8)  # a lease would be renewed after 20
    if how == "cancelled":
        assert gateway.rollout(rollout.rollout_id).status.error_message == "by the user"


def test_an_id_that_is_used_again_waits_for_its_predecessor(gateway: Gateway, start: Start) -> None:
    start("--concurrency", "2", "--keep-failed")
    deaf = LocalRun(command=["sh", "-c", "trap '' TERM; echo once; ls; touch left; sleep 1; sleep 1; exit 3"])
    new = NewRollout(rollout_id="again", input={}, config=RolloutConfig(local=deaf))
    (rollout,) = gateway.ask(create_rollouts([new]))
    gateway.running(rollout)
    gateway.ask(delete_rollout("again"))
    (rollout,) = gateway.ask(create_rollouts([new]))
    assert "exited with code 3" in (gateway.ended(rollout).status.error_message or "")
    assert gateway.ask(get_events("again", "log"))[0].data["text"] == "once\n"


@pytest.mark.slow
def test_agents_of_a_killed_controller_are_adopted(gateway: Gateway, start: Start, tmp_path: Path) -> None:
    """Commands that go on, agents that end while nobody watches, and a timeout that is still kept."""
    mark = uuid.uuid4().hex
    controller = start("--concurrency", "20")
    going, *_ = gateway.post(sleepers(mark, "4"))
    ending, *_ = gateway.post(sleepers(mark, "1"))
    (late,) = gateway.post(commands(mark), timeout_seconds=4)
    until(lambda: len(alive(mark)) == 1)  # a forked agent's environment is not seen in /proc
    for rollout in (going, ending, late):
        gateway.running(rollout)
    until(lambda: sum('"stage"' in p.read_text() for p in tmp_path.glob("w/attempts/*/state.jsonl")) == 3)
    controller.kill()
    time.sleep(1.2)
    assert gateway.rollout(ending.rollout_id).status.state == "running"
    start("--concurrency", "20")
    assert gateway.ended(ending).status.state == "succeeded"
    assert gateway.ended(going).status.state == "succeeded"
    assert "timed out" in (gateway.ended(late).status.error_message or "")
    assert gateway.rollout(going.rollout_id).status.last_attempt_id == "0"
    assert len(gateway.ask(get_events(going.rollout_id, "reward"))) == 1
    assert not alive(mark)


def test_what_was_claimed_but_not_started_is_started(gateway: Gateway, start: Start, tmp_path: Path) -> None:
    controller = start()
    (first,) = gateway.post(LocalRun(agent_class="harness_agents:Rewarder"))
    gateway.ended(first)
    children = Path(f"/proc/{controller.pid}/task/{controller.pid}/children").read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGSTOP)
    (claimed,) = gateway.post(LocalRun(agent_class="harness_agents:Rewarder"))
    until(lambda: list(tmp_path.glob("w/attempts/*/spec.json")))
    controller.kill()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    start()
    status = gateway.ended(claimed).status
    assert (status.state, status.last_attempt_id) == ("succeeded", "0"), status.error_message


def test_agents_without_a_controller_end_by_themselves(gateway: Gateway, start: Start) -> None:
    mark = uuid.uuid4().hex
    controller = start("--lease-seconds", "1.5")
    gateway.post(commands(mark))
    until(lambda: alive(mark))
    controller.kill()
    until(lambda: not alive(mark), seconds=6)


def test_a_killed_keeper_leaves_nothing(gateway: Gateway, start: Start, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    start()
    (rollout,) = gateway.post(commands(mark))
    (agent,) = until(lambda: alive(mark))
    with open(f"/proc/{agent}/stat") as file:
        keeper = int(file.read().rsplit(")", 1)[1].split()[1])
    os.kill(keeper, signal.SIGKILL)
    status = gateway.ended(rollout).status
    assert (status.failure_kind, status.error_message) == ("infra", "the agent's keeper was killed")
    until(lambda: not alive(mark))


def test_two_controllers_run_each_rollout_once(gateway: Gateway, start: Start) -> None:
    start("--concurrency", "8", workdir="one")
    start("--concurrency", "8", workdir="two")
    rollouts = gateway.post(LocalRun(agent_class="harness_agents:Rewarder"), n=60)
    for rollout in rollouts:
        assert gateway.ended(rollout).status.state == "succeeded"
    rewards = Counter(len(gateway.ask(get_events(r.rollout_id, "reward"))) for r in rollouts)
    assert rewards == {1: 60}


@pytest.mark.slow
def test_a_hung_controllers_rollouts_go_to_another(gateway: Gateway, start: Start) -> None:
    mark = uuid.uuid4().hex
    hung = start("--lease-seconds", "2", workdir="one")
    (rollout,) = gateway.post(commands(mark, "3"), max_attempts=2)
    (agent,) = until(lambda: alive(mark))
    os.kill(hung.pid, signal.SIGSTOP)
    try:
        start(workdir="two")
        until(lambda: gateway.rollout(rollout.rollout_id).status.last_attempt_id == "1")
        until(lambda: not os.path.exists(f"/proc/{agent}"))
    finally:
        os.kill(hung.pid, signal.SIGCONT)
    gateway.ended(rollout)


@pytest.mark.slow
def test_ends_reach_a_gateway_that_was_away(gateway: Gateway, start: Start) -> None:
    mark = uuid.uuid4().hex
    start()
    (rollout,) = gateway.post(commands(mark, "1"))
    gateway.running(rollout)
    until(lambda: alive(mark))
    gateway.process.kill()
    until(lambda: not alive(mark))
    gateway.start()
    assert "never called the model" in (gateway.ended(rollout).status.error_message or "")
    (after,) = gateway.post(LocalRun(agent_class="harness_agents:Rewarder"))
    assert gateway.ended(after).status.state == "succeeded"


@pytest.mark.slow
def test_agents_go_on_while_a_gateway_hangs(gateway: Gateway, start: Start) -> None:
    start("--lease-seconds", "1.5")
    mark = uuid.uuid4().hex
    gateway.post(commands(mark))
    until(lambda: alive(mark))
    gateway.process.popen.send_signal(signal.SIGSTOP)
    try:
        time.sleep(3.5)
        assert alive(mark)
    finally:
        gateway.process.popen.send_signal(signal.SIGCONT)


def test_one_controller_per_workdir(gateway: Gateway, start: Start) -> None:
    start()
    try:
        start()
    except AssertionError as error:
        assert "another controller uses" in str(error)
    else:
        raise AssertionError("two controllers shared a folder")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("--key", "wrong", "API key"), ("--gateway", "localhost:80", "such as http://")],
)
def test_a_start_that_cannot_work_is_refused(start: Start, option: str, value: str, message: str) -> None:
    with pytest.raises(AssertionError, match=f"^error: .*{message}"):
        start(option, value)


class Refusing(BaseHTTPRequestHandler):
    """An engine that is there."""

    def do_POST(self) -> None:
        self.send_error(400)


@pytest.fixture
def engine(gateway: Gateway) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        gateway.ask(register_endpoints([Endpoint(model="m", endpoint=url)]))
        yield
        server.shutdown()


@pytest.mark.usefixtures("engine")
@pytest.mark.slow
def test_waiting_for_an_update_is_not_counted(gateway: Gateway, start: Start) -> None:
    start()
    gateway.ask(pause(Pause(reason="an update")))
    try:
        run = LocalRun(agent_class="harness_agents:Caller")
        held, *_ = gateway.post(run, timeout_seconds=4)
        slow, *_ = gateway.post(commands("x"), timeout_seconds=4)
        assert "timed out" in (gateway.ended(slow).status.error_message or "")
        time.sleep(3)
        assert gateway.rollout(held.rollout_id).status.state == "running"
    finally:
        gateway.ask(resume())
    status = gateway.ended(held).status
    assert status.state == "succeeded" and (status.held_seconds or 0) > 5, status


def test_memory_is_limited(gateway: Gateway, start: Start) -> None:
    start("--memory-mb", "100")
    hungry = [sys.executable, "-c", "import time; time.sleep(0.2); bytearray(300 << 20)"]
    (rollout,) = gateway.post(LocalRun(command=hungry))
    (larger,) = gateway.post(LocalRun(command=hungry, memory_mb=1000))
    assert gateway.ended(rollout).status.error_message == "local subprocess exited with code 1: MemoryError"
    assert "never called" in (gateway.ended(larger).status.error_message or "")


def test_an_import_that_hangs_does_not_hang_the_controller(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hanging.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("harnessrl.controller.warm.START_SECONDS", 0.5)

    async def fork() -> None:
        servers = WarmServers(tmp_path / "log", frozenset())
        with pytest.raises(StartError, match="hanging did not get ready"):
            await servers.fork(Warmth(preload=("hanging",)), str(tmp_path))
        servers.close()

    asyncio.run(fork())
