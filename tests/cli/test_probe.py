"""`harnessrl probe` on a harness that can be trained and on one that cannot."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
TINY = Path(__file__).parent.parent / "assets" / "tiny"
HARNESS = """
import sys
from openai import OpenAI
messages = [{"role": "user", "content": sys.argv[1]}]
for stream in (False, True):
    answer = OpenAI().chat.completions.create(model="any", messages=messages, max_tokens=8, stream=stream)
    if not stream:
        said = answer.choices[0].message.content
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
    else:
        list(answer)
"""


def probe(folder: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    options = ("--model", str(TINY), "--max-len", "512")
    return subprocess.run(
        [sys.executable, "-m", "harnessrl", "probe", *options, "--", *command],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "COLUMNS": "150"},
    )


def test_a_harness_that_can_be_trained(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(HARNESS)
    run = probe(tmp_path, sys.executable, "agent.py", "{{ no {% endraw %} template }} [/b]")
    assert run.returncode == 0, run.stdout + run.stderr
    for said in ("2 of 2 calls – yes", "1 of 2 calls", "exact: 1", "openai_chat: 2"):
        assert said in run.stdout


def test_one_that_never_calls_the_model(tmp_path: Path) -> None:
    run = probe(tmp_path, "echo", "no model here")
    assert run.returncode == 1
    assert "0 of 0 calls – no" in run.stdout and "no model here" in run.stdout
