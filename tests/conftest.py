"""Shells start background jobs with SIGINT ignored, and children inherit that; tests of Ctrl-C need the usual.

Tests marked `vllm` run against the vLLM that HARNESSRL_VLLM names (`make test-vllm`), and are skipped without one.
"""

import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in each run; `HYPOTHESIS_PROFILE=explore pytest …` looks for new ones.
settings.register_profile("fixed", derandomize=True)
settings.register_profile("explore")
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

signal.signal(signal.SIGINT, signal.default_int_handler)

METRICS_PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"
VLLM = os.environ.get("HARNESSRL_VLLM")
TINY = str(Path(__file__).parent / "assets" / "tiny")


@pytest.fixture
def undocumented() -> Callable[[Iterable[str]], list[str]]:
    """Which of the given metrics have no row, with a unit, in docs/metrics.md."""
    rows = re.findall(r"^\| `([a-z]+/[^`]+)` \| [^ |][^|]* \|", METRICS_PAGE.read_text(), re.MULTILINE)
    page = re.compile("|".join(name.replace("REASON", ".+").replace("_N", r"_(\d|4\+)") for name in rows))
    return lambda names: [name for name in names if not page.fullmatch(name)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not VLLM:
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(reason="needs a vLLM: make test-vllm"))


@pytest.fixture(scope="session")
def vllm_settings() -> dict:
    """Of the section `engine`, for a vLLM on two cores."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "DO_NOT_TRACK": "1"}
    return {"kind": "vllm", "command": [VLLM], "args": ["--enforce-eager"]}


@pytest.fixture(scope="session")
def vllm_url(tmp_path_factory: pytest.TempPathFactory, vllm_settings: dict) -> Iterator[str]:
    """A running vLLM for the tiny model, started as a run starts it: it has no weights yet."""
    from harnessrl.cli.services import vllm_service
    from harnessrl.config import Config

    engine = {**vllm_settings, "max_len": 4096, "max_batch": 16}
    config = Config.model_validate({"model": {"path": TINY}, "engine": engine})
    with vllm_service(config, tmp_path_factory.mktemp("vllm")) as service:
        yield service.address
