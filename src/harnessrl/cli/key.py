"""`harnessrl key`: a key for one role."""

from enum import StrEnum
from typing import Annotated

import typer

from harnessrl.cli import app

_DAY = 86_400


class KeyRole(StrEnum):
    trainer = "trainer"
    controller = "controller"
    evaluator = "evaluator"
    viewer = "viewer"


@app.command()
def key(
    role: Annotated[KeyRole, typer.Argument(help="Who the key is for.")],
    key: Annotated[str, typer.Option(envvar="HARNESSRL_KEY", help="The gateway's admin key.")],
    days: Annotated[float, typer.Option(help="How long it is valid.", min=0)] = 365,
) -> None:
    """Print a key that can do what its role needs, and no more. A new admin key voids it."""
    from harnessrl.gateway.auth import Auth

    typer.echo(Auth(key).token(role.value, days * _DAY))
