"""`harnessrl engine`: serve a model as a token endpoint."""

import threading
from typing import Annotated

import typer

from harnessrl.cli import app


@app.command()
def engine(
    model: Annotated[str, typer.Option(help="Hugging Face name, folder, or package:NAME.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8001,
    max_batch: Annotated[int, typer.Option(min=1, help="Requests decoded at once.")] = 32,
    max_len: Annotated[int, typer.Option(min=2, help="Context, prompt and answer together, in tokens.")] = 2048,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or mps; auto takes the best there is.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Serve a model: token ids in, sampled ids and log-probabilities out (vLLM's /inference/v1/generate)."""
    from harnessrl.engine.embedded import EmbeddedEngine
    from harnessrl.engine.model import place
    from harnessrl.engine.server import serve

    running = EmbeddedEngine(place(model, device, dtype), max_batch=max_batch, max_len=max_len, seed=seed)
    server = serve(running, host, port, model=model)
    running.start()
    typer.echo(f"{model} is served at {server.url}, {running.max_len} tokens of context. Ctrl-C ends it.")
    try:
        threading.Event().wait()
    finally:
        running.stop()
        server.close()
