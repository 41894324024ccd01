"""`harnessrl eval CONFIG`: the held-out tasks, without training."""

from pathlib import Path
from typing import Annotated

import typer

from harnessrl.cli import app


@app.command("eval")
def evaluate(
    config: Annotated[Path, typer.Argument(help="Configuration file (YAML).")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes, e.g. model.path=CHECKPOINT.")] = None,
) -> None:
    """Run the agent on the held-out tasks and print the mean reward."""
    from harnessrl.cli.train import run
    from harnessrl.config import load_config

    loaded = load_config(config, [*(overrides or []), "train.updates=0"])
    if not loaded.data.eval:
        raise ValueError("data.eval is not set: name a file of held-out tasks")
    run(loaded)
