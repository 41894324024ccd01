"""mini-swe-agent's own command, in a fresh directory."""

import os
import subprocess
import sys
import tempfile

command = [os.path.join(os.path.dirname(sys.executable), "mini"), "-m", "openai/any", "-t", os.environ["TASK"]]
with tempfile.TemporaryDirectory() as home:
    more = {
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_API_BASE": os.environ["OPENAI_BASE_URL"],
        "HOME": home,
    }
    run = subprocess.run([*command, "-y", "--exit-immediately"], cwd=home, env={**os.environ, **more}, check=False)
sys.exit(run.returncode)
