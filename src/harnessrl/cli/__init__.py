"""The command line: one file per command. A user's mistake ends in one sentence, not in a traceback."""

import importlib
import os
import sys

import typer

__all__ = ["app", "main"]

COMMANDS = (
    "config",
    "controller",
    "diff",
    "doctor",
    "engine",
    "eval",
    "export",
    "gateway",
    "key",
    "probe",
    "quickstart",
    "rollouts",
    "runs",
    "serve",
    "train",
)
"""Modules of this package; each registers its command when it is imported."""

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback()
def harnessrl() -> None:
    """Train the model inside any AI agent, in the harness that it runs in production."""


def main() -> None:
    for command in COMMANDS:
        importlib.import_module(f"harnessrl.cli.{command}")
    import httpx

    from harnessrl.client import GatewayError

    try:
        app()
    except (ValueError, RuntimeError, OSError, GatewayError) as error:
        if os.environ.get("HARNESSRL_DEBUG"):
            raise
        sys.exit(f"error: {error}")
    except httpx.TransportError as error:
        if os.environ.get("HARNESSRL_DEBUG"):
            raise
        sys.exit(f"error: lost the gateway, or never reached it: {error}")
