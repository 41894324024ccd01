"""Where the policy is served while it is trained: on the trainer's own weights, or by a server that is given them.

No token is sampled between the beginning of an update and its publish, whoever serves.
"""

from contextlib import AbstractContextManager
from typing import Protocol

from torch import nn

from harnessrl.config import EngineConfig
from harnessrl.engine.embedded import EmbeddedEngine
from harnessrl.engine.server import serve

__all__ = ["MODEL", "Embedded", "Serving"]

MODEL = "policy"
"""The policy's name at the engine and at the gateway."""


class Serving(Protocol):
    @property
    def url(self) -> str:
        """Of a token endpoint."""
        ...

    def updating(self) -> AbstractContextManager[None]:
        """The weights change inside this block; `publish` ends it."""
        ...

    def publish(self, version: int) -> None:
        """Serve the weights as they are now, as this policy version, with every cache dropped."""
        ...

    def close(self) -> None: ...


class Embedded:
    """The embedded engine in this process: it samples from the trainer's own parameters."""

    def __init__(self, model: nn.Module, config: EngineConfig, seed: int, version: int):
        self.engine = EmbeddedEngine(
            model, max_batch=config.max_batch, max_len=config.max_len, seed=seed, version=version
        )
        self.engine.start()
        self._server = serve(self.engine, model=MODEL)

    @property
    def url(self) -> str:
        return self._server.url

    def updating(self) -> AbstractContextManager[None]:
        return self.engine.updating()

    def publish(self, version: int) -> None:
        self.engine.publish(version)

    def close(self) -> None:
        self._server.close()
        self.engine.stop()
