"""`harnessrl config`: every setting with its default and its meaning."""

from pathlib import Path
from typing import Annotated

import typer

from harnessrl.cli import app


@app.command()
def config(
    file: Annotated[Path | None, typer.Argument(help="Show this file's settings among the defaults.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes, as key=value.")] = None,
) -> None:
    """Print the whole configuration tree, as YAML that `harnessrl train` takes."""
    from harnessrl.config import load_config, to_yaml

    typer.echo(to_yaml(load_config(file, overrides or []), comments=True), nl=False)
