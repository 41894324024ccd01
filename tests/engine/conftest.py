from collections.abc import Iterator

import pytest
import torch
from engine_checks import TINY
from transformers import PreTrainedModel

from harnessrl.engine.embedded import EmbeddedEngine
from harnessrl.engine.model import load_model


@pytest.fixture
def model() -> PreTrainedModel:
    torch.set_num_threads(1)
    return load_model(TINY)


@pytest.fixture
def engine(model: PreTrainedModel) -> Iterator[EmbeddedEngine]:
    engine = EmbeddedEngine(model, max_batch=8, max_len=512)
    engine.start()
    yield engine
    engine.stop()
