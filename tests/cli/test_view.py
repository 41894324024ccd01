"""What is shown of a run: plain lines off a terminal, and on one bars with a curve and the time left."""

import io

import pytest
from rich.console import Console

from harnessrl.cli import view
from harnessrl.cli.view import View


def shown(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    clock = iter([0.0, *[100.0 * n for n in range(1, 10)]])
    monkeypatch.setattr(view.time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=80, color_system=None)
    with View(4, console) as running:
        for number, reward in enumerate((0.25, 0.5, 0.75), 1):
            running.phase("collect", 8)
            running.phase("update", 0)
            running.update(number, {"reward/train": reward, "time/collect": 1.0, "time/update": 1.5})
    return out.getvalue()


def test_off_a_terminal_there_is_a_plain_line_per_update(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(False, monkeypatch).splitlines() == [
        "update    1/4  reward 0.250  2.5 s",
        "update    2/4  reward 0.500  2.5 s",
        "update    3/4  reward 0.750  2.5 s",
    ]


def test_on_a_terminal_the_bars_tell_the_curve_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    said = shown(True, monkeypatch)
    assert "3/4" in said and "▁▅█ 0.75  2 min left" in said and "0/8" in said
    assert "0/8" not in said.split("▁▅█")[-1]
    assert "update    3/4  reward 0.750" in said
