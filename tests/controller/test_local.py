"""What the local runner runs, and how it tells the ends apart."""

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from processes import KEY, Gateway, alive, until

from harnessrl.client import get_events
from harnessrl.schemas import LocalRun, Rollout

REWARD = "import harness_agents as a; a.reward()"


@pytest.fixture(autouse=True)
def _controller(controller: Path) -> None:
    pass


def reward_of(gateway: Gateway, rollout: Rollout) -> dict[str, object]:
    (event,) = gateway.ask(get_events(rollout.rollout_id, "reward"))
    return event.data


def log_of(gateway: Gateway, rollout: Rollout) -> str:
    return until(lambda: gateway.ask(get_events(rollout.rollout_id, "log")))[0].data["text"]


@pytest.mark.parametrize("name", ["Rewarder", "Asynchronous"])
def test_agent_class(gateway: Gateway, name: str) -> None:
    (rollout,) = gateway.post(LocalRun(agent_class=f"harness_agents:{name}"))
    assert gateway.ended(rollout).status.state == "succeeded"


def test_agent_class_sees_its_own_environment_also_at_import(gateway: Gateway) -> None:
    run = LocalRun(agent_class="harness_agents.Rewarder", env_map={"QUESTION": "input.a.b"})
    for rollout in gateway.post(run, n=3, task={"a": {"b": ["1+1", 2]}}):
        gateway.ended(rollout)
        data = reward_of(gateway, rollout)
        assert data["question"] == '["1+1", 2]'
        assert data["own_environment"] == f"{gateway.url}/api/rollouts/{rollout.rollout_id}/attempt/0/events"


def test_command_templates_environment_and_fresh_folder(gateway: Gateway, controller: Path) -> None:
    script = "import os, sys; print(sys.argv[1:], os.environ['GREETING'], os.listdir()); open('left', 'w');"
    command = [sys.executable, "-c", script + REWARD, "{{ input.q }}", "{{ rollout_id }}"]
    (rollout,) = gateway.post(
        LocalRun(command=command, env={"GREETING": "hi {{ input.q }}"}), task={"q": "a b; $HOME"}
    )
    assert gateway.ended(rollout).status.state == "succeeded"
    expected = ["a b; $HOME", rollout.rollout_id]
    assert log_of(gateway, rollout) == f"{expected} hi a b; $HOME []\n"
    until(lambda: not list((controller / "attempts").iterdir()))


def test_copied_folder_setup_and_evaluation(gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("from the template")
    agent = "open('answer', 'w').write(open('data.txt').read() + open('made').read())"
    check = f"assert open('answer').read() == 'from the template!'; {REWARD}"
    run = LocalRun(
        command=[sys.executable, "-c", agent],
        cwd=str(tmp_path),
        copy_cwd=True,
        setup=[sys.executable, "-c", "open('made', 'w').write('!')"],
        evaluate=[sys.executable, "-c", check],
    )
    (rollout,) = gateway.post(run)
    status = gateway.ended(rollout).status
    assert status.state == "succeeded", status.error_message
    assert [p.name for p in tmp_path.iterdir()] == ["data.txt"]


def test_the_agent_cannot_reward_where_an_evaluator_does(gateway: Gateway) -> None:
    run = LocalRun(command=[sys.executable, "-c", REWARD], evaluate=["true"])
    (rollout,) = gateway.post(run)
    assert gateway.ended(rollout).status.state == "failed"


DEAF = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
FAILURES = {
    "exit code": (LocalRun(command=["sh", "-c", "exit 3"]), "exited with code 3", "infra"),
    "exception": (LocalRun(agent_class="harness_agents:Raiser"), "exited with code 1", "infra"),
    "signal": (LocalRun(agent_class="harness_agents:Aborter"), "killed by SIGABRT", "infra"),
    "no such class": (LocalRun(agent_class="harness_agents:Nobody"), "exited with code 1", "infra"),
    "no such program": (LocalRun(command=["no-such-program"]), "'no-such-program'", "infra"),
    "no such folder": (LocalRun(command=["true"], cwd="/no/such"), "'/no/such'", "infra"),
    "nothing to run": (LocalRun(), "needs a `command`", "infra"),
    "template": (LocalRun(command=["echo", "{{ input.nothing }}"]), "nothing", "infra"),
    "setup": (LocalRun(command=["true"], setup=["false"]), "the setup command exited with code 1", "infra"),
    "CPU time": (LocalRun(command=["sh", "-c", "while :; do :; done"], cpu_seconds=1), "used up", "agent"),
    "CPU time, deaf": (LocalRun(command=[sys.executable, "-c", DEAF], cpu_seconds=1), "used up", "agent"),
    "CPU time, forked": (LocalRun(agent_class="harness_agents:Spinner", cpu_seconds=1), "used up", "agent"),
    "unnamed signal": (LocalRun(command=["sh", "-c", "kill -40 $$"]), "killed by signal 40", "infra"),
    "template that fails": (LocalRun(command=["{{ 1 / 0 }}"]), "division by zero", "infra"),
    "no call": (LocalRun(agent_class="harness_agents:Silent"), "never called the model", "infra"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failures_are_told_apart(gateway: Gateway, name: str) -> None:
    run, message, owner = FAILURES[name]
    (rollout,) = gateway.post(run)
    status = gateway.ended(rollout).status
    assert status.state == "failed"
    assert message in (status.error_message or "")
    assert status.failure_kind == owner


def test_the_traceback_is_the_users_own(gateway: Gateway) -> None:
    (rollout,) = gateway.post(LocalRun(agent_class="harness_agents:Raiser"))
    gateway.ended(rollout)
    log = log_of(gateway, rollout)
    assert log.startswith("about to fail\nTraceback") and log.endswith("RuntimeError: broken on purpose\n")
    assert "forkserver" not in log


def test_timeout_ends_also_what_ignores_it(gateway: Gateway) -> None:
    mark = uuid.uuid4().hex
    deaf = "trap '' TERM; setsid sh -c 'trap \"\" TERM; while :; do sleep 1; done' & while :; do sleep 1; done"
    (rollout,) = gateway.post(LocalRun(command=["sh", "-c", deaf], env={"MARK": mark}), timeout_seconds=1)
    until(lambda: len(alive(mark)) >= 3)
    status = gateway.ended(rollout).status
    assert not alive(mark)
    assert status.failure_kind == "agent" and "timed out after 1 s" in (status.error_message or "")


@pytest.mark.parametrize("does", ["rm ../state.jsonl", "kill -STOP $PPID"])
def test_timeout_ends_also_what_meddles_with_its_keeper(gateway: Gateway, does: str) -> None:
    command = ["sh", "-c", f"{does}; sleep 60"]
    (rollout,) = gateway.post(LocalRun(command=command), timeout_seconds=1)
    assert gateway.ended(rollout).status.state == "failed"


def test_an_output_that_cannot_be_kept_costs_the_log_only(gateway: Gateway, controller: Path) -> None:
    script = f"import shutil; shutil.rmtree({str(controller / 'logs')!r}); print('lost', flush=True); {REWARD}"
    (rollout,) = gateway.post(LocalRun(command=[sys.executable, "-c", script]))
    try:
        assert gateway.ended(rollout).status.state == "succeeded"
    finally:
        (controller / "logs").mkdir()


def test_nothing_of_an_ended_rollout_stays(gateway: Gateway) -> None:
    mark = uuid.uuid4().hex
    (rollout,) = gateway.post(LocalRun(agent_class="harness_agents:Daemonizer", env={"MARK": mark}))
    assert gateway.ended(rollout).status.state == "succeeded"
    assert not alive(mark)


def test_infrastructure_failures_are_tried_again(gateway: Gateway, tmp_path: Path) -> None:
    script = f"import os, sys; first = not os.path.exists('x'); open('x', 'w'); first and sys.exit(1); {REWARD}"
    run = LocalRun(command=[sys.executable, "-c", script], cwd=str(tmp_path))
    (rollout,) = gateway.post(run, max_attempts=2)
    status = gateway.ended(rollout).status
    assert (status.state, status.last_attempt_id) == ("succeeded", "1")


def test_output_is_bounded_head_and_tail(gateway: Gateway, controller: Path) -> None:
    script = "print('first'); [print('x' * 1000) for _ in range(5000)]; print('last')"
    (rollout,) = gateway.post(LocalRun(command=[sys.executable, "-c", script]))
    gateway.ended(rollout)
    log = log_of(gateway, rollout)
    assert log.startswith("first\n") and log.endswith("last\n") and len(log) < 40_000
    (path,) = (controller / "logs").glob(f"{rollout.rollout_id}*")
    text = path.read_text()
    assert len(text) < 1.6 * 2**20 and text.startswith("first\n") and text.endswith("last\n")
    assert "bytes left out" in text


WARM_SCRIPT = """
import asyncio, json, os, random, signal, sys, threading
import harness_agents
class Local: pass
assert __name__ == "__main__" and sys.modules["__main__"].Local is Local
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and threading.active_count() == 1
threading.Thread(target=lambda: print("a thread is waited for")).start()
harness_agents.reward(warm="decimal" in PRELOADED, argv=sys.argv[1:], random=random.random(), cwd=os.getcwd())
sys.exit(int(os.environ.get("CODE", "0")))
""".replace("PRELOADED", "list(sys.modules)")


def test_preloaded_scripts_run_as_main(gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(WARM_SCRIPT)
    command = [sys.executable, str(tmp_path / "agent.py"), "--task", "{{ input.i }}"]
    rollouts = gateway.post(LocalRun(command=command, preload=["decimal"]), n=2, task={"i": 7})
    for rollout in rollouts:
        assert gateway.ended(rollout).status.state == "succeeded", log_of(gateway, rollout)
    first, second = (reward_of(gateway, rollout) for rollout in rollouts)
    assert first["warm"] and first["argv"] == ["--task", "7"]
    assert first["random"] != second["random"] and first["cwd"] != second["cwd"]
    assert log_of(gateway, rollouts[0]) == "a thread is waited for\n"
    (rollout,) = gateway.post(LocalRun(command=command, preload=["decimal"], env={"CODE": "4"}), task={"i": 7})
    message = gateway.ended(rollout).status.error_message
    assert message == "local subprocess exited with code 4: a thread is waited for"


def test_an_evaluation_is_forked_like_its_agent(gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("open('answer', 'w').write('1')")
    (tmp_path / "grade.py").write_text(
        "import sys, harness_agents as a; a.reward(warm='decimal' in sys.modules, answer=open('answer').read())"
    )
    command, evaluate = ([sys.executable, name] for name in ("agent.py", "grade.py"))
    run = LocalRun(command=command, evaluate=evaluate, preload=["decimal"], cwd=str(tmp_path), copy_cwd=True)
    (rollout,) = gateway.post(run)
    assert gateway.ended(rollout).status.state == "succeeded"
    assert reward_of(gateway, rollout) == {"value": 1.0, "warm": True, "answer": "1"}


def test_preload_needs_a_python_command(gateway: Gateway) -> None:
    (rollout,) = gateway.post(LocalRun(command=["sh", "-c", "true"], preload=["json"]))
    assert "[python, script.py" in (gateway.ended(rollout).status.error_message or "")


def test_a_start_is_triggered_not_polled(gateway: Gateway) -> None:
    delays = []
    for _ in range(5):
        time.sleep(0.1)
        (rollout,) = gateway.post(LocalRun(agent_class="harness_agents:Rewarder"))
        status = gateway.ended(rollout).status
        delays.append(status.updated_at - status.created_at)
    assert sorted(delays)[2] < 0.5


def test_logs_are_read_from_anywhere(gateway: Gateway) -> None:
    (rollout,) = gateway.post(LocalRun(command=["sh", "-c", "echo to stdout; echo to stderr >&2"]))
    (silent,) = gateway.post(LocalRun(command=["true"]))
    gateway.ended(rollout)
    gateway.ended(silent)

    def logs(of: Rollout) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "harnessrl", "rollouts", "logs", of.rollout_id, "--gateway", gateway.url]
        environment = {**os.environ, "PYTHONPATH": ":".join(sys.path), "HARNESSRL_KEY": KEY}
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    assert logs(rollout).stdout == "to stdout\nto stderr\n"
    assert "it wrote nothing" in logs(silent).stderr
