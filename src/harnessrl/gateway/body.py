"""Reading JSON that strangers send: strictly JSON, and bounded in depth.

`NaN`, `Infinity`, lone surrogates and bad UTF-8 are refused here, so that nothing behind has to expect them.
"""

from typing import Any

import orjson

__all__ = ["MAX_DEPTH", "check_depth", "parse_json"]

_WRITER_DEPTH = 254
"""Deepest nesting that orjson writes; it reads four times as much."""
MAX_DEPTH = 200
"""Leaves room for what an answer puts around a value."""


def parse_json(body: bytes | bytearray) -> Any:
    """Raises `ValueError` with what is wrong with the body."""
    value = orjson.loads(body)
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Raises `ValueError` if `value` is nested too deep to be written again.

    Writing it in deep enough a nest costs a small part of what walking through it in Python would.
    """
    nest = value
    for _ in range(_WRITER_DEPTH - MAX_DEPTH):
        nest = [nest]
    try:
        orjson.dumps(nest)
    except TypeError as error:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep") from error
