"""What users get wrong, and what goes wrong around them: one clear sentence, and the run goes on or ends."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parent.parent
TINY = ROOT / "tests" / "assets" / "tiny"

pytestmark = pytest.mark.slow

CALL = """
import json, os, sys, time, urllib.request
def post(url, body, key):
    request = urllib.request.Request(url, json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": "Bearer " + key})
    return urllib.request.urlopen(request, timeout=60).read()
def call():
    post(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
         {"model": "policy", "max_tokens": 4, "messages": [{"role": "user", "content": "1+1?"}]},
         os.environ["OPENAI_API_KEY"])
def reward(value):
    post(os.environ["AGL_EVENT_URL"], {"event_type": "reward", "data": {"value": value}}, os.environ["AGL_KEY"])
"""


def train(folder: Path, agent: str, *overrides: str, tasks: str = '{"x": 1}\n') -> subprocess.CompletedProcess[str]:
    """`harnessrl train` on the tiny model with `agent` as the harness's source."""
    (folder / "agent.py").write_text(CALL + agent)
    (folder / "tasks.jsonl").write_text(tasks)
    config = {
        "name": "run",
        "runs_dir": str(folder / "runs"),
        "model": {"path": str(TINY)},
        "data": {"train": "tasks.jsonl"},
        "agent": {"local": {"command": [sys.executable, "agent.py"], "cwd": "."}, "max_attempts": 1},
        "engine": {"max_len": 256, "max_batch": 4},
        "collect": {"groups_per_update": 2, "group_size": 2},
        "train": {"updates": 1},
    }
    (folder / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "harnessrl", "train", str(folder / "config.json"), *overrides]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"COLUMNS": "200"})


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr.strip().splitlines()[-1]


GOOD = "call(); reward(1.0)"


def test_a_task_that_does_not_parse_is_named_with_its_line(tmp_path: Path) -> None:
    done = train(tmp_path, GOOD, tasks='{"x": 1}\n{"x": \n')
    assert done.returncode == 1
    assert "tasks.jsonl, line 2: not JSON" in last_line(done)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    done = train(tmp_path, GOOD, "model.path=./no-such-model")
    assert done.returncode == 1
    assert "no-such-model" in last_line(done)


def test_a_vllm_that_is_not_installed(tmp_path: Path) -> None:
    done = train(tmp_path, GOOD, "engine.kind=vllm", "engine.command=[no-such-vllm]")
    assert done.returncode == 1
    assert "there is no no-such-vllm here" in last_line(done) and "pip install vllm" in last_line(done)


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = train(tmp_path, GOOD, f"gateway.port={port}")
    assert done.returncode == 1
    assert str(port) in last_line(done)


def test_a_harness_that_cannot_start_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    done = train(tmp_path, "sys.exit(3)")
    assert done.returncode == 1
    assert "no group can complete" in last_line(done)
    assert "code 3" in last_line(done)


def test_a_harness_that_never_calls_the_model_is_said(tmp_path: Path) -> None:
    done = train(tmp_path, "pass")
    assert done.returncode == 1
    assert "never called the model" in last_line(done)


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ("call(); sys.exit(4)", "code 4"),
        ("call(); time.sleep(60)", "timed out"),
        ("call(); print('no reward')", "reward"),
        ("call(); reward(float('nan'))", "code 1"),
    ],
    ids=["crash", "hang", "no-reward", "nan-reward"],
)
def test_an_agents_own_failure_is_an_outcome_and_the_run_goes_on(tmp_path: Path, agent: str, said: str) -> None:
    done = train(tmp_path, agent, f"agent.timeout_seconds={3 if said == 'timed out' else 60}")
    assert done.returncode == 0, done.stderr
    assert said in done.stderr
    metrics = json.loads((tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert metrics["reward/train"] == 0
    assert metrics["batch/rollouts_agent_failed"] == 4


def test_equal_rewards_are_said(tmp_path: Path) -> None:
    done = train(tmp_path, GOOD, "train.updates=5")
    assert done.returncode == 0, done.stderr
    assert "nothing is learned" in done.stderr


def test_a_full_disk_costs_the_checkpoint_not_the_run(tmp_path: Path) -> None:
    run = tmp_path / "full.py"
    run.write_text(
        "import sys\n"
        "from harnessrl.cli import main\n"
        "from harnessrl.trainer.backends.torch import TorchBackend\n"
        "def save(self, folder):\n"
        "    (folder / 'half').write_text('x')\n"
        "    with open('/dev/full', 'w') as disk: disk.write('x' * 100000)\n"
        "TorchBackend.save = save\n"
        "main()\n"
    )
    train(tmp_path, GOOD, "train.updates=0")
    command = [sys.executable, str(run), "train", str(tmp_path / "config.json"), "name=full"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "No space left on device" in done.stderr
    assert not list((tmp_path / "runs" / "full" / "checkpoints").iterdir())


def test_ctrl_c_ends_everything_in_seconds(tmp_path: Path) -> None:
    process = training_with_a_harness_at_work(tmp_path)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert said.decode().strip().splitlines()[-1] == "stopped"
    assert not running_in(tmp_path)


@pytest.mark.parametrize("service", ["gateway", "controller"])
def test_a_service_that_dies_again_and_again_ends_the_run_and_says_so(tmp_path: Path, service: str) -> None:
    process = training_with_a_harness_at_work(tmp_path)
    while process.poll() is None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            known = json.loads((tmp_path / "runs" / "stopped" / f"{service}.json").read_text())
            os.kill(known["pid"], signal.SIGKILL)
        time.sleep(0.5)
    said = process.communicate(timeout=40)[1].decode()
    assert process.returncode == 1
    assert "Traceback" not in said and f"the {service} has ended" in said


def training_with_a_harness_at_work(folder: Path) -> subprocess.Popen[bytes]:
    train(folder, "call(); time.sleep(60)", "train.updates=0")
    process = subprocess.Popen(
        [sys.executable, "-m", "harnessrl", "train", str(folder / "config.json"), "name=stopped"],
        stderr=subprocess.PIPE,
    )
    while not any(p.info["cwd"] == str(folder) for p in running_in(folder)):
        assert process.poll() is None
        time.sleep(0.2)
    return process


def running_in(folder: Path) -> list[psutil.Process]:
    """Harnesses and services of a run."""
    return [
        p
        for p in psutil.process_iter(["cmdline", "cwd"])
        if p.info["cwd"] == str(folder) or str(folder / "runs") in " ".join(p.info["cmdline"] or [])
    ]
