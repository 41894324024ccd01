"""The weights of a policy handed over to a running vLLM server, in place, through a folder that both can read.

Nothing is sampled from half a policy or continued on old keys and values: new requests wait from the pause to the
resume, those in flight end with `abort`, and the resume comes only when the weights are whole and every cache is
dropped. A hand-over that fails leaves the server paused.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

__all__ = ["VllmServer"]

SECONDS = 1800.0
"""Longest time that one step of a hand-over may take."""
REMEDY = "start it with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out"


class VllmServer:
    """A vLLM server whose weights are those that `write` leaves in a folder (safetensors)."""

    def __init__(
        self,
        url: str,
        folder: Path,
        write: Callable[[Path], None],
        *,
        model: str,
        max_len: int,
        sleep: bool = False,
    ):
        """`folder`: weights pass through it, and none stay. `sleep`: the server frees its device's memory for the
        length of an update. Raises ValueError, with the remedy, for a server that can't serve `model`."""
        self.url = url.rstrip("/")
        self._folder, self._write, self._sleep = folder, write, sleep
        serves = {entry["id"]: entry["max_model_len"] for entry in self._ask("GET", "/v1/models")["data"]}
        if serves.get(model, 0) < max_len:
            raise ValueError(
                f"The engine at {self.url} serves {serves}, not {model!r} with {max_len} tokens of context: start "
                f"it with --served-model-name {model} --max-model-len {max_len}."
            )

    @contextmanager
    def updating(self) -> Iterator[None]:
        if self._sleep:
            self._ask("POST", "/sleep?level=2")
        yield

    def publish(self, version: int) -> None:
        """Raises RuntimeError where the server did not take the weights."""
        folder = (self._folder / f"version-{version}").resolve()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._write(folder)
        self._ask("POST", "/pause?mode=abort")
        if self._sleep:
            self._ask("POST", "/wake_up?tags=weights")
        self._call("update_config", overrides={"load_config": {"load_format": "auto"}})  # it may have begun empty
        self._call("reload_weights", weights_path=str(folder))
        shutil.rmtree(folder)
        if self._sleep:
            self._ask("POST", "/wake_up?tags=kv_cache")
        if not self._ask("POST", "/reset_prefix_cache")["success"]:
            raise RuntimeError(f"The engine at {self.url} still holds keys and values of the old weights.")
        self._ask("POST", "/update_weight_version", {"new_version": str(version)})
        self._ask("POST", "/resume")

    def close(self) -> None:
        """The server goes on: whoever started it ends it."""

    def _call(self, method: str, **arguments: Any) -> None:
        self._ask("POST", "/collective_rpc", {"method": method, "kwargs": arguments})

    def _ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        try:
            response = httpx.request(method, self.url + path, json=body, timeout=SECONDS)
        except httpx.TransportError as error:
            said = str(error) or type(error).__name__
            raise RuntimeError(f"The engine at {self.url} does not answer ({said}): has it ended?") from None
        if response.status_code == 404:
            raise ValueError(f"The engine at {self.url} has no {path}: {REMEDY}.")
        if response.is_error:
            raise RuntimeError(f"The engine at {self.url} failed at {path}: {response.text[:500]}")
        return response.json()
