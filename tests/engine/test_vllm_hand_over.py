"""The order of a hand-over, against a scripted vLLM; tests marked `vllm` run the same against a real one."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from harnessrl.engine.vllm import VllmServer


class Scripted:
    """Answers as vLLM does; `fails` names a path that does not work, `asked` what was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.fails: str | None = None
        self.weights = b""

        scripted = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                scripted.answer(self, 200, {"data": [{"id": "policy", "max_model_len": 512}]})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                called = json.loads(body) if body else {}
                step = called.get("method") or self.path
                scripted.asked.append(step)
                if step == "reload_weights":
                    scripted.weights = (Path(called["kwargs"]["weights_path"]) / "model").read_bytes()
                scripted.answer(self, 500 if step == scripted.fails else 200, {"success": True})

            def log_message(self, format: str, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, handler: BaseHTTPRequestHandler, status: int, content: dict) -> None:
        handler.send_response(status)
        handler.end_headers()
        handler.wfile.write(json.dumps(content).encode())

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    server = Scripted()
    yield server
    server.close()


def server_of(scripted: Scripted, folder: Path, sleep: bool = False) -> VllmServer:
    def write(into: Path) -> None:
        assert "/pause?mode=abort" not in scripted.asked, "harnesses wait no longer than they must"
        (into / "model").write_bytes(b"new")

    return VllmServer(scripted.url, folder, write, model="policy", max_len=512, sleep=sleep)


def test_weights_go_over_between_pause_and_resume_and_caches_are_dropped(
    scripted: Scripted, tmp_path: Path
) -> None:
    server = server_of(scripted, tmp_path)
    with server.updating():
        server.publish(1)
    assert scripted.asked == [
        "/pause?mode=abort",
        "update_config",
        "reload_weights",
        "/reset_prefix_cache",
        "/update_weight_version",
        "/resume",
    ]
    assert scripted.weights == b"new" and not list(tmp_path.iterdir())


def test_a_server_that_sleeps_wakes_for_its_weights_first(scripted: Scripted, tmp_path: Path) -> None:
    server = server_of(scripted, tmp_path, sleep=True)
    with server.updating():
        assert scripted.asked == ["/sleep?level=2"]
        server.publish(1)
    woken = [scripted.asked.index(f"/wake_up?tags={part}") for part in ("weights", "kv_cache")]
    assert woken[0] < scripted.asked.index("reload_weights") < woken[1] < scripted.asked.index("/resume")


@pytest.mark.parametrize("step", ["reload_weights", "/reset_prefix_cache"])
def test_a_hand_over_that_fails_leaves_the_server_paused(scripted: Scripted, tmp_path: Path, step: str) -> None:
    scripted.fails = step
    with pytest.raises(RuntimeError, match="failed at"):
        server_of(scripted, tmp_path).publish(1)
    assert "/pause?mode=abort" in scripted.asked and "/resume" not in scripted.asked


def test_what_is_no_such_server_is_said_with_the_remedy(scripted: Scripted, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--max-model-len 1024"):
        VllmServer(scripted.url, tmp_path, lambda _: None, model="policy", max_len=1024)
    scripted.close()
    with pytest.raises(RuntimeError, match="does not answer"):
        server_of(scripted, tmp_path)
