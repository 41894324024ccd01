"""A closed-loop HTTP client that costs little beside what it measures. Loopback only."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

__all__ = ["Leg", "run"]

_LINE_LIMIT = 1 << 22


@dataclass
class Leg:
    """What a stretch of load came to."""

    seconds: list[float] = field(default_factory=list)
    """Of each call that was answered 200."""
    statuses: dict[str, int] = field(default_factory=dict)
    wall_seconds: float = 0.0

    def p50_ms(self) -> float:
        return sorted(self.seconds)[len(self.seconds) // 2] * 1000 if self.seconds else float("nan")


async def run(urls: list[str], body: bytes, concurrency: int, calls: int) -> Leg:
    """`calls` POSTs in all over `concurrency` connections, each to one of `urls`."""
    leg = Leg()
    left = iter(range(calls))
    start = time.perf_counter()
    await asyncio.gather(*(_worker(leg, urls[i % len(urls)], body, left) for i in range(concurrency)))
    leg.wall_seconds = time.perf_counter() - start
    return leg


async def _worker(leg: Leg, url: str, body: bytes, left: Iterator[int]) -> None:
    parts = urlsplit(url)
    assert parts.hostname == "127.0.0.1" and parts.port
    head = f"POST {parts.path} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=_LINE_LIMIT)
    for _ in left:
        start = time.perf_counter()
        writer.write(request)
        status = await _read(reader)
        leg.statuses[status] = leg.statuses.get(status, 0) + 1
        if status == "200":
            leg.seconds.append(time.perf_counter() - start)
    writer.close()


async def _read(reader: asyncio.StreamReader) -> str:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"chunked" in head:
        while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
            await reader.readexactly(size + 2)
        await reader.readexactly(2)
    else:
        await reader.readexactly(int(head.partition(b"content-length:")[2].partition(b"\r\n")[0]))
    return head[9:12].decode()
