"""Shells start background jobs with SIGINT ignored, and children inherit that; tests of Ctrl-C need the usual."""

import re
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

signal.signal(signal.SIGINT, signal.default_int_handler)

METRICS_PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"


@pytest.fixture
def undocumented() -> Callable[[Iterable[str]], list[str]]:
    """Which of the given metrics have no row, with a unit, in docs/metrics.md."""
    rows = re.findall(r"^\| `([a-z]+/[^`]+)` \| [^ |][^|]* \|", METRICS_PAGE.read_text(), re.MULTILINE)
    page = re.compile("|".join(name.replace("REASON", ".+").replace("_N", r"_(\d|4\+)") for name in rows))
    return lambda names: [name for name in names if not page.fullmatch(name)]
