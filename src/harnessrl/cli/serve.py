"""`harnessrl serve`: a trained model behind the same templates that it was trained with."""

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

from typer import Option

from harnessrl.cli import app


@app.command()
def serve(
    model: Annotated[str, Option(help="Folder of a checkpoint, Hugging Face name, or package:NAME.")],
    engine: Annotated[
        str | None, Option(help="URL of a token endpoint that serves it; default: the embedded engine.")
    ] = None,
    renderer: Annotated[
        str | None, Option(help='As JSON, e.g. {"name": "qwen3"}; default: what the checkpoint was trained with.')
    ] = None,
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(help="0 takes a free one.", min=0, max=65535)] = 8000,
    key: Annotated[str, Option(envvar="HARNESSRL_KEY", help="Key that clients have to send; empty: none.")] = "",
    max_len: Annotated[int, Option(min=2, help="Context of the embedded engine, in tokens.")] = 8192,
) -> None:
    """Serve a model in every dialect, with the rendering and continuation of training, recording nothing."""
    import structlog
    import uvicorn

    from harnessrl.engine.model import resolve
    from harnessrl.gateway.served import ServeApp
    from harnessrl.gateway.settings import Settings
    from harnessrl.schemas import Endpoint

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("info"))
    folder = resolve(model)
    with ExitStack() as stack:
        url = engine or stack.enter_context(_Engine(model, max_len)).url
        endpoint = Endpoint(
            model=model,
            endpoint=url,
            kind="token",
            tokenizer=str(folder),
            renderer=json.loads(renderer) if renderer else _trained_with(folder),
        )
        settings = Settings(store=Path(), host=host, port=port, key=key)
        print(f"{model}: OpenAI at http://{host}:{port}/openai/v1, Anthropic at http://{host}:{port}/anthropic")
        uvicorn.run(ServeApp(endpoint, settings), host=host, port=port, log_level="warning", ws="none")


def _trained_with(folder: Path) -> dict[str, object]:
    saved = folder / "harnessrl.json"
    if not saved.is_file():
        return {"name": "chatml"}
    return json.loads(saved.read_text())["renderer"]


class _Engine:
    """`harnessrl engine` as a child process; `url` once it serves."""

    def __init__(self, model: str, max_len: int):
        arguments = ["engine", "--model", model, "--port", "0", "--max-len", str(max_len)]
        self._command = [sys.executable, "-m", "harnessrl", *arguments]
        self.url = ""

    def __enter__(self) -> "_Engine":
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        if " is served at " not in said:
            raise RuntimeError("the engine did not start")
        self.url = said.partition(" is served at ")[2].split(",")[0].strip()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
