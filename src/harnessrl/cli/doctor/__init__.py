"""`harnessrl doctor [CONFIG]`: what would go wrong, found before it costs time.

A check is a function of the configuration. It returns what is so, in a few words, or None where it doesn't apply;
what is wrong it raises, as one sentence with the remedy.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.text import Text

from harnessrl.cli import app
from harnessrl.cli.doctor import machine, model, services
from harnessrl.cli.source import AsJson
from harnessrl.client import GatewayError
from harnessrl.config import Config, load_config

Check = Callable[[Config], str | None]

OF_THE_MACHINE: dict[str, Check] = {
    "python": machine.python,
    "packages": machine.packages,
    "gpus": machine.gpus,
    "nccl": machine.nccl,
}
OF_A_RUN: dict[str, Check] = {
    "disk": machine.disk,
    "memory": machine.memory,
    "ports": machine.ports,
    "tasks": model.tasks,
    "agent": model.agent,
    "model": model.files,
    "hugging face": model.hugging_face,
    "renderer": model.renderer,
    "continuity": model.continuity,
    "tool calls": model.tool_calls,
    "store": services.store,
    "gateway": services.gateway,
    "clock": services.clock,
    "controller": services.controller,
    "engine": services.engine,
    "kubernetes": services.kubernetes,
}


@dataclass(frozen=True)
class Finding:
    check: str
    ok: bool
    said: str


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="Of a run; none: only the machine.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes to it, as key=value.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check what a run needs: a line each, ✓ or ✗ with what to do; exit code 1 if there is a ✗."""
    loaded = load_config(config, overrides or [])
    console = Console(soft_wrap=True, highlight=False)
    findings = []
    for name, check in (OF_THE_MACHINE | (OF_A_RUN if config else {})).items():
        finding = examine(name, check, loaded)
        if finding is None:
            continue
        findings.append(finding)
        if not as_json:
            mark = ("✓", "green") if finding.ok else ("✗", "red")
            console.print(Text.assemble(mark, f" {name:<13} {finding.said}"))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings]))
    raise typer.Exit(0 if all(finding.ok for finding in findings) else 1)


def examine(name: str, check: Check, config: Config) -> Finding | None:
    try:
        said = check(config)
    except (ValueError, RuntimeError, OSError, ImportError, GatewayError, httpx.HTTPError) as error:
        return Finding(name, False, " ".join(str(error).split()) or type(error).__name__)
    return said and Finding(name, True, said) or None
