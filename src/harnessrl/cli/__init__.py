"""The command line: one file per command."""

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def harnessrl() -> None:
    """Train the model inside any AI agent, in the harness that it runs in production."""


def main() -> None:
    app()
