"""Reading JSON that strangers send: strictly JSON, bounded in depth and number, and never for long at a stretch.

`NaN`, `Infinity`, lone surrogates and bad UTF-8 are refused here, so that nothing behind has to expect them. To
make and to free a million values takes a tenth of a second in which no other thread can run, so large bodies are
counted before they are parsed.
"""

import asyncio
from typing import Any

import ijson
import orjson

__all__ = ["LARGE", "MAX_DEPTH", "check_depth", "parse_json", "read_json"]

LARGE = 1 << 20
"""Bytes from which work on a body is done beside the event loop."""
_MAX_PARTS = 500_000
"""Of a large body: values, keys, beginnings and ends of lists and objects."""
_PIECE = 1 << 16

_WRITER_DEPTH = 254
"""Deepest nesting that orjson writes; it reads four times as much."""
MAX_DEPTH = 200
"""Leaves room for what an answer puts around a value."""


def parse_json(body: bytes | bytearray) -> Any:
    """Raises `ValueError` with what is wrong with the body."""
    if len(body) > LARGE and sum(map(body.count, (b",", b"[", b"{"))) > _MAX_PARTS // 4:
        _check_number(body)
    value = orjson.loads(body)
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        check_depth(value)
    return value


async def read_json(body: bytes | bytearray) -> Any:
    """As `parse_json`, without stopping the event loop."""
    return await asyncio.to_thread(parse_json, body) if len(body) > LARGE else parse_json(body)


def _check_number(body: bytes | bytearray) -> None:
    """Raises `ValueError` if the body has too many parts, or is no JSON up to where it has."""
    parts = ijson.sendable_list()
    counter = ijson.basic_parse_coro(parts, use_float=True)
    number, begin, size = 0, 0, _PIECE
    try:
        while begin < len(body):
            counter.send(bytes(body[begin : begin + size]))
            begin += size
            size = _PIECE if parts else 2 * size  # an unfinished string is read from its start again
            number += len(parts)
            parts.clear()
            if number > _MAX_PARTS:
                raise ValueError(f"more than {_MAX_PARTS:,} values, keys and brackets in a body this large")
    except ijson.JSONError as error:
        raise ValueError(str(error).partition("\n")[0]) from error


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
