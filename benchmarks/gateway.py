"""What a call costs at the gateway: CPU, latency, memory and storage, beside the reference's figures.

`python -m benchmarks.gateway [--quick] [--json]`. The gateway, a fake engine and the load generator are
processes of this machine, on loopback; the gateway's store is durable as always (SQLite, WAL,
`synchronous=NORMAL`). The reference's figures (Agent Lightning v1.0) were taken on two cores with the same sizes
and the same kind of engine and generator. On a busy machine compare figures of one run only.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import orjson
import psutil

from benchmarks.kit.load import run

SIZES = ("500x100", "8000x300", "32000x500")
MODEL = "policy"
CONCURRENCY = 16
LEG = 100
"""Calls between two looks at the memory."""


@dataclass
class Row:
    figure: str
    reference: str
    must: float
    measured: float
    unit: str

    def text(self) -> str:
        mark = "ok" if self.measured <= self.must else "OVER"
        return f"{self.figure:52} {self.reference:>10} {self.must:>8g} {self.measured:>9.2f} {self.unit:8} {mark}"


@dataclass
class Bench:
    gateway: psutil.Process
    gateway_url: str
    engine_url: str
    api: httpx.Client
    quick: bool

    def register(self, size: str, delay_ms: int = 0) -> str:
        """Make the fake engine of this size the policy's only endpoint; returns its base URL."""
        base = f"{self.engine_url}/{size}/{delay_ms}/v1"
        self.api.delete("/api/models").raise_for_status()
        self.api.post("/api/models", json=[{"model": MODEL, "endpoint": base}]).raise_for_status()
        return base

    def rollouts(self, count: int) -> list[str]:
        """Chat URLs of new rollouts."""
        created = self.api.post("/api/rollouts", json=[{"input": i} for i in range(count)]).raise_for_status()
        return [self.chat_url(r["rollout_id"]) for r in created.json()]

    def chat_url(self, rollout_id: str) -> str:
        path = f"/proxy/rollout/{rollout_id}/attempt/0/mode/train/openai/v1/chat/completions"
        return self.gateway_url + path

    def cpu_seconds(self) -> float:
        times = self.gateway.cpu_times()
        return times.user + times.system

    def memory_mb(self) -> float:
        return self.gateway.memory_info().rss / 2**20


def request_body(size: str) -> bytes:
    prompt = int(size.split("x")[0])
    return orjson.dumps({"messages": [{"role": "user", "content": "lorem ipsu" * (prompt * 4 // 10)}]})


def added_latency(bench: Bench, size: str) -> Row:
    """Median at concurrency 1, through the gateway less straight to the engine, the quietest stretch of each."""
    base = bench.register(size)
    body, urls = request_body(size), bench.rollouts(1)
    calls, rounds = (30, 4) if bench.quick else (100, 6)
    asyncio.run(run(urls, body, 1, 20))
    direct, through = [], []
    for _ in range(rounds):
        direct.append(asyncio.run(run([f"{base}/chat/completions"], body, 1, calls)).p50_ms())
        through.append(asyncio.run(run(urls, body, 1, calls)).p50_ms())
    reference, must = {"500x100": (5, 1.2), "8000x300": (8, 2.0), "32000x500": (16.5, 4.5)}[size]
    return Row(f"added p50 at concurrency 1, {size}", str(reference), must, min(through) - min(direct), "ms")


def cost(bench: Bench, size: str) -> list[Row]:
    """CPU of all calls, and growth of resident memory: the slope over legs of 100 calls, after a warm-up of 1,000.

    Until then caches of fixed size fill (SQLite's pages, the store's ends of chains). After it the allocator gives
    back more or less of what a leg took: at 32000x500 memory jumps between two levels 5 MB apart, for ever. So the
    slope is the median of those between all pairs of legs (Theil and Sen), which single jumps don't move.
    """
    bench.register(size)
    body, urls = request_body(size), bench.rollouts(CONCURRENCY)
    asyncio.run(run(urls, body, CONCURRENCY, 10 * LEG))
    before, memory_mb = bench.cpu_seconds(), []
    legs = 20 if bench.quick else 40
    for _ in range(legs):
        leg = asyncio.run(run(urls, body, CONCURRENCY, LEG))
        assert leg.statuses == {"200": LEG}, leg.statuses
        memory_mb.append(bench.memory_mb())
    cpu = (bench.cpu_seconds() - before) * 1000 / (legs * LEG)
    pairs = itertools.combinations(enumerate(memory_mb), 2)
    memory = statistics.median((late - early) / (j - i) for (i, early), (j, late) in pairs) * 1000 / LEG
    cpu_reference, cpu_must = {"500x100": (4.3, 1.2), "8000x300": (8.6, 2.5), "32000x500": (17.8, 5.0)}[size]
    memory_reference = {"500x100": 76, "8000x300": 502, "32000x500": 1696}[size]
    return [
        Row(f"CPU for 1,000 calls, {size}", str(cpu_reference), cpu_must, cpu, "s"),
        Row(f"memory growth for 1,000 calls, {size}", str(memory_reference), 5, memory, "MB"),
    ]


def storage(bench: Bench, store: Path) -> Row:
    """A rollout of 50 turns of 300 sampled tokens that grows to 32,000 tokens."""
    bench.register("0x300")
    (url,) = bench.rollouts(1)
    messages = [{"role": "user", "content": "task" * 300}]
    before, tokens = stored_bytes(store), 0
    with httpx.Client(timeout=60) as client:
        for turn in range(50):
            answer = client.post(url, json={"messages": messages}).raise_for_status().json()
            tokens = answer["usage"]["total_tokens"]
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            messages.append({"role": "user", "content": f"{turn:04}" * 340})
    size = (stored_bytes(store) - before) / 2**20
    return Row(f"stored for a 50-turn rollout of {tokens} tokens", "5.6", 0.6, size, "MB")


def stored_bytes(store: Path) -> int:
    """Pages in use, whether in the file or still in its log."""
    import sqlite3

    with contextlib.closing(sqlite3.connect(store)) as db:
        pages, free, size = (
            db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
    return (pages - free) * size


def at_once(bench: Bench) -> Row:
    bench.register("500x100", 4000)
    leg = asyncio.run(run(bench.rollouts(256), request_body("500x100"), 256, 256))
    assert leg.statuses == {"200": 256}, leg.statuses
    return Row("256 calls of 4 s at once, median", "15.4", 4.5, leg.p50_ms() / 1000, "s")


def streams(bench: Bench) -> Row:
    """Five tokens a second each; all have to complete."""
    count, tokens = (200, 25) if bench.quick else (1000, 150)
    bench.register(f"500x{tokens}")
    body = orjson.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True})
    cpu, start = bench.cpu_seconds(), time.perf_counter()
    leg = asyncio.run(run(bench.rollouts(count), body, count, count))
    assert leg.statuses == {"200": count}, leg.statuses
    cores = (bench.cpu_seconds() - cpu) / (time.perf_counter() - start)
    return Row(f"{count} streams of {tokens // 5} s at once", "refused", 1.0, cores, "cores")


def stall(bench: Bench) -> Row:
    """Longest wait of a small request beside 50 MB, which are refused, and bodies just under the limit."""
    bench.register("500x100")
    (url,) = bench.rollouts(1)
    text = orjson.dumps({"messages": [{"role": "user", "content": "def f(x):\n\treturn 'é' + x\n" * 500_000}]})
    bodies = [b"x" * 50_000_000, text, b'{"messages":[' + b"[]," * 5_000_000 + b"0]}"]
    worst = 0.0
    with ThreadPoolExecutor(1) as pool, httpx.Client(timeout=60) as client:
        for body in bodies:
            answering = pool.submit(client.post, url, content=body)
            while not answering.done():
                begun = time.perf_counter()
                bench.api.get("/healthz").raise_for_status()
                worst = max(worst, time.perf_counter() - begun)
    return Row("a request beside bodies of 50 and 16 MB waits", "", 100, worst * 1000, "ms")


def listing(bench: Bench) -> Row:
    batch = [{"input": {"prompt": "What is 1+1? " * 10, "data_id": str(i)}} for i in range(1000)]
    for _ in range(20 if bench.quick else 100):
        bench.api.post("/api/rollouts", json=batch).raise_for_status()
    lists = 40
    cpu = bench.cpu_seconds()
    for _ in range(lists):
        bench.api.get("/api/rollouts?state_in=queuing&limit=500").raise_for_status()
    spent = (bench.cpu_seconds() - cpu) * 1000 / lists
    among = "20,000" if bench.quick else "100,000"
    return Row(f"list of 500 queued among {among}, CPU", "26", 8, spent, "ms")


@contextlib.contextmanager
def process(*command: str) -> Iterator[tuple[psutil.Process, str]]:
    """A Python process that prints `… ready at URL`; ended at the end."""
    child = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        line = next((line for line in child.stdout if " ready at " in line), None)
        assert line is not None, f"{command} did not start"
        yield psutil.Process(child.pid), line.split()[-1]
    finally:
        child.terminate()
        child.wait(20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer calls, under a minute")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        store = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "store.db"
        gateway = (
            "-m",
            "harnessrl",
            "gateway",
            "--port",
            "0",
            "--key",
            "",
            "--store",
            str(store),
            "--model",
            MODEL,
            "--log-level",
            "error",  # the fake engine's log-probabilities know nothing of temperature
        )
        gateway_process, gateway_url = stack.enter_context(process(*gateway))
        _, engine_url = stack.enter_context(process("-m", "benchmarks.kit.fake_engine"))
        api = stack.enter_context(httpx.Client(base_url=gateway_url, timeout=60))
        bench = Bench(gateway_process, gateway_url, engine_url, api, options.quick)
        rows = [row for size in SIZES for row in cost(bench, size)]
        rows += [added_latency(bench, size) for size in SIZES]
        rows += [storage(bench, store), at_once(bench), streams(bench), stall(bench), listing(bench)]
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print(f"{'figure':52} {'reference':>10} {'must':>8} {'measured':>9}")
    for row in rows:
        print(row.text())


if __name__ == "__main__":
    main()
