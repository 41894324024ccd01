"""The main job, as `make quickstart` runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_quickstart_raises_held_out_reward_by_half(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "harnessrl", "quickstart", "--", f"runs_dir={tmp_path}"]
    # As a stranger's shell has it: no environment is activated.
    env = os.environ | {"PATH": "/usr/local/bin:/usr/bin:/bin"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stderr)
    result = json.loads((tmp_path / "quickstart" / "result.json").read_text())
    assert result["eval_after"] >= result["eval_before"] + 0.5
