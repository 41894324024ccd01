"""Reading JSON that strangers send: bounded in size and depth, and strictly JSON.

`NaN`, `Infinity`, lone surrogates and bad UTF-8 are refused here, so that nothing behind has to expect them.
"""

from typing import Any

import orjson

__all__ = ["MAX_DEPTH", "parse_json"]

MAX_DEPTH = 100


def parse_json(body: bytes | bytearray) -> Any:
    """Raises `ValueError` with what is wrong with the body."""
    value = orjson.loads(body)
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _deeper_than(value, MAX_DEPTH):
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    return value


def _deeper_than(value: Any, levels: int) -> bool:
    layer = [value]
    for _ in range(levels):
        layer = [
            child
            for parent in layer
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not layer:
            return False
    return any(isinstance(value, dict | list) for value in layer)
