"""`harnessrl gateway`: runs the API Gateway. The options are the fields of `gateway.settings.Settings`."""

from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option

from harnessrl.cli import app

LogLevel = Literal["debug", "info", "warning", "error"]
KEY_HELP = 'Admin key. On loopback one is made and kept beside the store; "" turns keys off there.'


@app.command()
def gateway(
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(help="0 takes a free one.", min=0, max=65535)] = 8080,
    key: Annotated[str | None, Option(envvar="HARNESSRL_KEY", help=KEY_HELP)] = None,
    store: Annotated[Path, Option(help="SQLite file; made if it is not there.")] = Path("harnessrl.db"),
    model: Annotated[str | None, Option(help="Name of the policy; default: the first registered model.")] = None,
    hold_seconds: Annotated[
        float, Option(help="How long calls wait while paused; 0 answers 429 at once.", min=0)
    ] = 600,
    drain_seconds: Annotated[float, Option(help="How long SIGTERM waits for calls in flight.", min=0)] = 30,
    keep_days: Annotated[float | None, Option(help="Remove consumed rollouts older than this.", min=0)] = None,
    keep_bytes: Annotated[
        int | None, Option(help="Remove the oldest consumed rollouts while the store is larger.", min=0)
    ] = None,
    agent: Annotated[
        list[str] | None, Option(help="NAME=REGEX: calls whose system text matches are that agent's. Repeatable.")
    ] = None,
    train_temperature: Annotated[float, Option(help="Of training calls, whatever the harness asks.", min=0)] = 1.0,
    val_temperature: Annotated[
        float | None, Option(help="Of evaluation calls; default: as the harness asks.", min=0)
    ] = None,
    accept_rendered: Annotated[
        bool, Option(help="Train through renderers that can't continue a history token by token.")
    ] = False,
    max_body_bytes: Annotated[int, Option(help="Larger request bodies are refused.", min=0)] = 16 << 20,
    max_calls: Annotated[int, Option(help="Model calls at once in all.", min=1)] = 10_000,
    max_calls_per_rollout: Annotated[int, Option(help="Model calls at once of one rollout.", min=1)] = 256,
    connect_seconds: Annotated[float, Option(help="How long a connection to an engine may take.", min=0)] = 5,
    read_seconds: Annotated[float, Option(help="How long a live engine may say nothing.", min=0)] = 1800,
    health_seconds: Annotated[float, Option(help="Time between probes of an engine in use.", min=0)] = 2,
    keepalive_seconds: Annotated[
        float, Option(help="Silence after which a streamed answer gets a comment.", min=0)
    ] = 15,
    log_level: Annotated[LogLevel, Option(help="debug shows each call.")] = "info",
) -> None:
    """Run the API Gateway: rollouts, events, the proxy between harnesses and engines, and the dashboard."""
    options: dict[str, Any] = locals()
    from harnessrl.dashboard import router
    from harnessrl.gateway.server import admin_key, serve
    from harnessrl.gateway.settings import Settings, is_loopback

    options["agent"] = tuple(agent or ())
    options["key"] = admin_key(key, is_loopback(host), store)
    serve(Settings(**options), [router])
