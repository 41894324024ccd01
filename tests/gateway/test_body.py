"""Large bodies: nobody else has to wait long while one is read."""

import asyncio
import time
from collections.abc import Awaitable

import pytest
from proxy_kit import TOKENIZER

from harnessrl.gateway.body import parse_json, read_json

SIZE = 12 << 20


async def worst_lag(work: Awaitable[object]) -> float:
    """Seconds by which a timer was late while `work` was done, at most."""
    task, worst = asyncio.ensure_future(work), 0.0
    while not task.done():
        begun = time.perf_counter()
        await asyncio.sleep(0.002)
        worst = max(worst, time.perf_counter() - begun - 0.002)
    await asyncio.gather(task, return_exceptions=True)
    return worst


@pytest.mark.parametrize("unit", [b"[" * 150 + b"]" * 150, b"[]", b'{"a":1}', b'"ab"', b"1"])
async def test_millions_of_values_are_refused_before_they_are_made(unit: bytes) -> None:
    body = b'{"x":[' + b",".join([unit] * (SIZE // (len(unit) + 1))) + b"]}"
    with pytest.raises(ValueError, match="more than 500,000"):
        parse_json(body)
    assert await worst_lag(read_json(body)) < 0.3  # the first took 0.8 s


def test_text_with_many_commas_is_not_many_values() -> None:
    body = b'{"x":"' + b"a,[{" * (SIZE // 4) + b'"}'
    assert len(parse_json(body)["x"]) == SIZE // 4 * 4


@pytest.mark.parametrize(
    "last", [b"oops", b"NaN", b"1e99999999999999999999", b"9" * 5000, b'"\\ud800"', b'"\xff"', b"1 2", b"["]
)
def test_what_is_no_json_is_a_value_error_in_large_bodies_too(last: bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(b'["' + b"a," * 600_000 + b'",' + last + b"]")


async def test_others_run_while_a_long_text_is_tokenized() -> None:
    begun = time.perf_counter()
    lag = await worst_lag(asyncio.to_thread(TOKENIZER.encode, "a" * 3_000_000))
    assert lag < (time.perf_counter() - begun) / 2
