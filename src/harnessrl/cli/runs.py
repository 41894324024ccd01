"""`harnessrl runs ls | compare`: what was trained here, what came of it, and what was different."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harnessrl.cli import app
from harnessrl.cli.source import AsJson
from harnessrl.cli.sparkline import sparkline
from harnessrl.schemas import Json

runs = typer.Typer(no_args_is_help=True, help="Look at runs, finished or not.")
app.add_typer(runs, name="runs")

_OWN = ("name", "runs_dir", "gateway.url", "gateway.key", "gateway.port")
"""Settings that say nothing of how a run was trained; a key is never shown."""


@dataclass(frozen=True)
class Ran:
    run: str
    state: str
    """`training`, `finished`, or `stopped` before its end."""
    model: str
    updates: int
    of_updates: int
    reward_before: float | None
    """Held-out, where it was evaluated; else of the first update's rollouts."""
    reward_after: float | None
    held_out: bool
    rewards: list[float]
    """Mean of each update's rollouts."""
    seconds: float | None
    """From the first row of metrics to the last, or as `result.json` says."""
    settings: Json
    """By dotted name."""


@runs.command("ls")
def ls(
    folder: Annotated[Path, typer.Argument(help="Where runs are.")] = Path("runs"), as_json: AsJson = False
) -> None:
    """List the runs of a folder, the latest last."""
    found = [
        read_run(path.parent) for path in sorted(folder.glob("*/config.yaml"), key=lambda p: p.stat().st_mtime)
    ]
    if as_json:
        typer.echo(json.dumps([_plain(ran) for ran in found]))
        return
    if not found:
        raise ValueError(f"there are no runs in {folder}")
    table = Table(box=None)
    for column in ("run", "state", "updates", "reward", "curve", "time"):
        table.add_column(column, no_wrap=True)
    for ran in found:
        table.add_row(ran.run, ran.state, _updates(ran), _reward(ran), sparkline(ran.rewards), _time(ran))
    _console().print(table)


@runs.command("compare")
def compare(
    folders: Annotated[list[Path], typer.Argument(help="Two runs or more, runs/NAME.")], as_json: AsJson = False
) -> None:
    """Show what came of each run, and the settings in which they differ."""
    compared = [read_run(folder) for folder in folders]
    names = dict.fromkeys(name for ran in compared for name in ran.settings if name not in _OWN)
    differing = {name: [ran.settings.get(name) for ran in compared] for name in names}
    differing = {name: values for name, values in differing.items() if any(v != values[0] for v in values)}
    if as_json:
        typer.echo(json.dumps({"runs": [_plain(ran) for ran in compared], "differences": differing}))
        return
    table = Table("")
    for ran in compared:
        table.add_column(Text(ran.run))
    table.add_row("updates", *(_updates(ran) for ran in compared))
    table.add_row("held-out reward", *(_reward(ran) if ran.held_out else "–" for ran in compared))
    table.add_row("training reward", *(_range(ran.rewards) for ran in compared))
    table.add_row("curve", *(sparkline(ran.rewards) for ran in compared))
    table.add_row("time", *(_time(ran) for ran in compared))
    table.add_section()
    for name, values in differing.items():
        table.add_row(name, *(Text(_setting(value)) for value in values), style="bold")
    _console().print(table)
    if not differing:
        _console().print("their settings are the same")


def read_run(folder: Path) -> Ran:
    """ValueError if `folder` holds no run."""
    from harnessrl.trainer.run import is_training, read_metrics, series

    try:
        config = yaml.safe_load((folder / "config.yaml").read_text())
    except OSError:
        raise ValueError(f"{folder} is no run: it holds no config.yaml") from None
    rows, finished = read_metrics(folder), folder / "result.json"
    trained, held_out = series(rows, "reward/train"), series(rows, "reward/eval")
    rewards = list((held_out or trained).values())
    seconds = rows[-1]["time"] - rows[0]["time"] if rows else None
    if finished.exists():
        result = json.loads(finished.read_text())
        seconds = result.get("seconds_total", seconds)
    state = "training" if is_training(folder) else "finished" if finished.exists() else "stopped"
    return Ran(
        run=folder.name,
        state=state,
        model=config["model"]["path"],
        updates=max((*trained, *held_out), default=0),
        of_updates=config["train"]["updates"],
        reward_before=rewards[0] if rewards else None,
        reward_after=rewards[-1] if rewards else None,
        held_out=bool(held_out),
        rewards=list(trained.values()),
        seconds=seconds,
        settings=_flat(config),
    )


def _flat(tree: Json, prefix: str = "") -> Json:
    flat: Json = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _plain(ran: Ran) -> Json:
    plain = asdict(ran)
    del plain["settings"]
    return plain


def _updates(ran: Ran) -> str:
    return f"{ran.updates}/{ran.of_updates}"


def _reward(ran: Ran) -> str:
    before, after = ran.reward_before, ran.reward_after
    return "–" if before is None or after is None else f"{before:.3f} → {after:.3f}"


def _range(rewards: list[float]) -> str:
    return f"{rewards[0]:.3f} → {rewards[-1]:.3f}" if rewards else "–"


def _time(ran: Ran) -> str:
    return "–" if ran.seconds is None else f"{ran.seconds:.0f} s"


def _setting(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _console() -> Console:
    """Off a terminal, wide enough for whole names."""
    console = Console()
    return console if console.is_terminal else Console(width=200)
