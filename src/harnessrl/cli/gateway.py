"""`harnessrl gateway`: runs the API Gateway."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from harnessrl.cli import app

LogLevel = Literal["debug", "info", "warning", "error"]


@app.command()
def gateway(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8080,
    key: Annotated[
        str | None,
        typer.Option(
            envvar="HARNESSRL_KEY",
            help='Admin key. On loopback one is made and kept beside the store; "" turns keys off there.',
        ),
    ] = None,
    store: Annotated[Path, typer.Option(help="SQLite file; made if it is not there.")] = Path("harnessrl.db"),
    model: Annotated[
        str | None, typer.Option(help="Name of the policy; default: the only registered model.")
    ] = None,
    hold_seconds: Annotated[
        float, typer.Option(help="How long calls wait while paused; 0 answers 429 at once.", min=0)
    ] = 600,
    drain_seconds: Annotated[float, typer.Option(help="How long SIGTERM waits for calls in flight.", min=0)] = 30,
    train_temperature: Annotated[float, typer.Option(help="Temperature of training calls.", min=0)] = 1.0,
    val_temperature: Annotated[
        float | None, typer.Option(help="Temperature of evaluation calls; default: as asked.", min=0)
    ] = None,
    max_body_mb: Annotated[float, typer.Option(help="Larger request bodies are refused.", min=0)] = 16,
    keep_days: Annotated[
        float | None, typer.Option(help="Remove consumed rollouts older than this.", min=0)
    ] = None,
    keep_bytes: Annotated[
        int | None, typer.Option(help="Remove the oldest consumed rollouts while the store is larger.", min=0)
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(help="debug shows each call.")] = "info",
) -> None:
    """Run the API Gateway: rollouts, events, and the proxy between harnesses and engines."""
    from harnessrl.gateway.server import admin_key, serve
    from harnessrl.gateway.settings import Settings

    def settings(key: str) -> Settings:
        return Settings(
            host=host,
            port=port,
            key=key,
            store=store,
            model=model,
            hold_seconds=hold_seconds,
            drain_seconds=drain_seconds,
            train_temperature=train_temperature,
            val_temperature=val_temperature,
            max_body_bytes=int(max_body_mb * 2**20),
            keep_days=keep_days,
            keep_bytes=keep_bytes,
            log_level=log_level,
        )

    serve(settings(admin_key(key, settings("").loopback, store)))
