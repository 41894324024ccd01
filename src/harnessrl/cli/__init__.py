"""The command line: one file per command. A user's mistake ends in one sentence, not in a traceback."""

import os
import sys

import typer

__all__ = ["app", "main"]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def harnessrl() -> None:
    """Train the model inside any AI agent, in the harness that it runs in production."""


def main() -> None:
    from harnessrl.cli import config, controller, engine, gateway, key  # noqa: F401  (each registers its command)
    from harnessrl.client import GatewayError

    try:
        app()
    except KeyboardInterrupt:
        sys.exit("stopped")
    except (ValueError, RuntimeError, OSError, GatewayError) as error:
        if os.environ.get("HARNESSRL_DEBUG"):
            raise
        sys.exit(f"error: {error}")
