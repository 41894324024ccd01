import gc
import json
from pathlib import Path

import pytest

from harnessrl.config import Config
from harnessrl.trainer.run import Run


def test_one_process_at_a_time_trains_in_a_folder(tmp_path: Path) -> None:
    run = Run.create(Config(runs_dir=str(tmp_path)))
    with pytest.raises(ValueError, match="being trained by another process"):
        Run.resume(run.folder)
    assert json.loads((run.folder / "run.json").read_text())["lineage"] == 0
    folder = run.folder
    run.finish({})
    del run
    gc.collect()
    with pytest.raises(ValueError, match="no whole checkpoint"):
        Run.resume(folder)
