"""Each ✗ of the doctor, provoked for real where this machine can; and that it says what to do."""

import json
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from harnessrl.cli import app
from harnessrl.cli.doctor import OF_A_RUN, OF_THE_MACHINE, Finding, examine, machine
from harnessrl.config import Config, load_config

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "assets" / "tiny"
QUICKSTART = ROOT / "examples" / "quickstart" / "config.yaml"
CHECKS = OF_THE_MACHINE | OF_A_RUN


def config(*overrides: str) -> Config:
    return load_config(QUICKSTART, [f"model.path={TINY}", *overrides])


def said(name: str, *overrides: str) -> str:
    """The ✗ of one check."""
    finding = examine(name, CHECKS[name], config(*overrides))
    assert isinstance(finding, Finding) and not finding.ok, finding
    return finding.said


def test_all_is_well_with_the_quickstart(tmp_path: Path) -> None:
    for name, check in CHECKS.items():
        finding = examine(name, check, config(f"runs_dir={tmp_path}"))
        assert finding is None or finding.ok, finding


def test_a_line_each_and_exit_code_1_if_there_is_a_cross(tmp_path: Path) -> None:
    command = ["doctor", str(QUICKSTART), f"model.path={TINY}", f"runs_dir={tmp_path}"]
    ran = CliRunner().invoke(app, [*command, "data.eval=gone.csv"])
    assert ran.exit_code == 1 and "✓ python " in ran.stdout
    (cross,) = [line for line in ran.stdout.splitlines() if line.startswith("✗")]
    assert "tasks" in cross and "gone.csv" in cross
    ran = CliRunner().invoke(app, [*command, "--json"])
    assert ran.exit_code == 0 and all(finding["ok"] for finding in json.loads(ran.stdout))


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    real = machine.metadata.version
    monkeypatch.setattr(machine.metadata, "version", lambda name: "0.1" if name == "httpx" else real(name))
    wrong = said("packages")
    assert "httpx is 0.1, we take >=0.28" in wrong and "pip install 'harnessrl[train]'" in wrong
    assert machine.needed_extras(config("backend=verl", "agent.k8s.image=a", "train.trackers=[wandb]")) == [
        "train",
        "wandb",
        "k8s",
        "verl",
    ]


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a GPU")
def test_gpus() -> None:
    assert "finds no GPU" in said("gpus", "model.device=cuda")


def test_disk_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "lower engine.max_batch" in said("memory", "engine.max_batch=1000000", "engine.max_len=100000")
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))  # type: ignore[attr-defined]
    assert "make room, or set runs_dir" in said("disk")


def test_the_estimate_of_memory_counts_what_is_configured() -> None:
    from harnessrl.trainer.sizes import sizes

    plain, kl = sizes(config()), sizes(config("algorithm.kl_coef=0.1"))
    lora = sizes(config("model.lora_rank=4", "algorithm.kl_coef=0.1", "model.dtype=bfloat16"))
    assert plain and kl and lora
    size = (TINY / "model.safetensors").stat().st_size
    assert lora.weights == pytest.approx(size, rel=0.02)  # the file is in 16 bits
    assert (plain.gradients, plain.optimizer, plain.reference) == (plain.weights, 2 * plain.weights, 0)
    assert kl.reference == kl.weights and lora.reference == 0
    assert lora.weights == plain.weights / 2 and lora.gradients < lora.weights


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "is taken" in said("ports", f"gateway.port={taken.getsockname()[1]}")


def test_tasks_and_agent() -> None:
    assert "cannot read the tasks" in said("tasks", "data.train=gone.jsonl")
    assert "no program no-such-agent" in said("agent", "agent.local.command=[no-such-agent]")
    assert "no folder" in said("agent", "agent.local.cwd=gone")
    assert "say how the agent is started" in said("agent", "agent.local.command=null")


def test_model_files(tmp_path: Path) -> None:
    assert "no-such-model" in said("model", f"model.path={tmp_path}/no-such-model")
    shutil.copytree(TINY, tmp_path / "half")
    (tmp_path / "half" / "model.safetensors").unlink()
    assert "lacks model.safetensors" in said("model", f"model.path={tmp_path}/half")


def test_hugging_face(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "set HF_TOKEN if it is gated" in said("hugging face", "model.path=harnessrl/no-such-model")


def test_the_chat_template() -> None:
    assert "no renderer 'gpt-9'" in said("renderer", "model.renderer={name: gpt-9}").lower()
    assert "model.continuity=rendered" in said("continuity", "model.renderer={name: default}")
    accepted = examine(
        "continuity", CHECKS["continuity"], config("model.renderer={name: default}", "model.continuity=rendered")
    )
    assert accepted and accepted.ok
    assert "shows the model no tools" in said("tool calls", "model.renderer={name: default}")


def test_store(tmp_path: Path) -> None:
    assert "set runs_dir" in said("store", "runs_dir=/proc/runs")


class Answers(BaseHTTPRequestHandler):
    """A gateway or an API server that says what the test wants."""

    answers: dict[str, Any] = {}
    date = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        length = int(self.headers.get("content-length", 0))
        body = json.loads(self.rfile.read(length)) if length else {}
        answer = self.answers.get(path) or self.answers.get(self.path)
        answer = answer(body) if callable(answer) else answer
        data = json.dumps([] if answer is None else answer).encode()
        self.send_response_only(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.send_header("date", self.date or self.date_time_string())
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, type[Answers]]]:
    kind = type("Mine", (Answers,), {"answers": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}", kind
        running.shutdown()


def free_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_gateway() -> None:
    assert "start one with `harnessrl gateway`" in said("gateway", f"gateway.url={free_url()}")


def test_clock(server: tuple[str, type[Answers]]) -> None:
    url, kind = server
    assert (found := examine("clock", CHECKS["clock"], config(f"gateway.url={url}"))) and found.ok
    kind.date = "Thu, 01 Jan 2026 00:00:00 GMT"
    assert "set both by NTP" in said("clock", f"gateway.url={url}")


def test_controller(server: tuple[str, type[Answers]]) -> None:
    url, kind = server
    rollout = {"rollout_id": "r", "input": {}, "is_train": True, "config": {}, "metadata": {}}
    waiting = {**rollout, "status": {"created_at": 0, "updated_at": 0}}
    kind.answers["/api/rollouts?state_in=queuing&limit=100"] = [waiting]
    assert "start `harnessrl controller" in said("controller", f"gateway.url={url}", "controller.runner=none")
    assert "set gateway.url" in said("controller", "controller.runner=none")


def test_engine(server: tuple[str, type[Answers]]) -> None:
    url, kind = server
    kind.answers["/api/models"] = [{"model": "policy", "endpoint": free_url()}]
    assert "no engine answers" in said("engine", f"gateway.url={url}")
    assert "install vLLM" in said("engine", "engine.kind=vllm", "engine.command=[no-vllm]")


def test_kubernetes_rights(
    server: tuple[str, type[Answers]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, kind = server

    def review(body: dict) -> dict:
        asked = body["spec"]["resourceAttributes"]
        return {
            "spec": body["spec"],
            "status": {"allowed": (asked["verb"], asked["resource"]) != ("create", "secrets")},
        }

    kind.answers["/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"] = review
    kubeconfig = tmp_path / "config"
    kubeconfig.write_text(
        yaml.safe_dump(
            {
                "current-context": "c",
                "clusters": [{"name": "c", "cluster": {"server": url}}],
                "users": [{"name": "u", "user": {}}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "agents"}}],
            }
        )
    )
    monkeypatch.setitem(os.environ, "KUBECONFIG", str(kubeconfig))
    monkeypatch.setattr("kubernetes_asyncio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
    denied = said("kubernetes", "agent.k8s.image=a")
    assert "no right to create secrets in the namespace agents" in denied
    kind.answers["/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"] = lambda body: {
        "spec": body["spec"],
        "status": {"allowed": True},
    }
    allowed = examine("kubernetes", CHECKS["kubernetes"], config("agent.k8s.image=a"))
    assert allowed and allowed.ok
    kubeconfig.unlink()
    assert "set KUBECONFIG" in said("kubernetes", "agent.k8s.image=a")
