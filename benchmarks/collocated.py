"""What collocated async buys: the same run, synchronous and asynchronous, with long-tailed harness times.

Real: the gateway, its proxy, the schedule, the trainer's loop. Simulated in real time: the engine (a fixed rate for
each call), the update (a fixed time, the engine at rest), the harnesses (sleeps and model calls, in this process,
in place of the controller). Idle is the time in which neither the engine nor the update is at work; beside it is
what a schedule can reach that knows all durations beforehand.

python -m benchmarks.collocated [--quick] [--json]
"""

import argparse
import asyncio
import contextlib
import json
import math
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvicorn
from rich.console import Console
from rich.table import Table

from benchmarks.kit.offline_schedule import Load, best_offline, busy_seconds
from benchmarks.kit.simulated_engine import simulated_engine
from harnessrl.cli.services import gateway_service
from harnessrl.client import AsyncClient, claim_rollout, end_attempt
from harnessrl.config import Config
from harnessrl.schemas import AttemptEnd, ClaimRequest, Endpoint
from harnessrl.trainer.batch import Update
from harnessrl.trainer.loop import train
from harnessrl.trainer.rollout import FinishedRollout
from harnessrl.trainer.run import Run

Interval = tuple[float, float]
GROUPS, SAMPLES = 4, 4
TINY = Path(__file__).parent.parent / "tests" / "assets" / "tiny"
KEY = "benchmark"


@dataclass(frozen=True)
class Case:
    name: str
    groups_in_flight: int
    rest: str = "cut"


@dataclass(frozen=True)
class Scale:
    updates: int
    median_seconds: float
    """Of a harness's own time; the 99th percentile is ten times this."""
    update_seconds: float
    tokens_per_second: float
    tokens_per_call: int
    calls: int = 2

    def own_seconds(self, group_and_sample: str) -> float:
        """What a harness takes itself; it follows from its id, and so is the same in each run."""
        rng = random.Random(group_and_sample)
        return self.median_seconds * math.exp(rng.gauss(0, math.log(10) / 2.326))


class SimulatedBackend:
    def __init__(self, url: str, seconds: float, busy: list[Interval]):
        self._url, self._seconds, self._busy, self.version = url, seconds, busy, 0

    def endpoints(self) -> list[Endpoint]:
        endpoint = Endpoint(model="policy", endpoint=self._url, version=self.version, kind="token")
        return [endpoint.model_copy(update={"tokenizer": str(TINY), "renderer": {"name": "chatml"}})]

    def update(self, update: Update) -> dict[str, float]:
        began = time.monotonic()
        time.sleep(self._seconds)
        self._busy.append((began, time.monotonic()))
        self.version += 1
        return {}

    def stop(self) -> None: ...

    def save(self, folder: Path) -> None: ...

    def close(self) -> None: ...


class Silent:
    def phase(self, name: str, rollouts: int) -> None: ...

    def rollout(self, rollout: FinishedRollout) -> None: ...

    def update(self, number: int, metrics: dict[str, float]) -> None: ...

    def warn(self, message: str) -> None:
        print(message)


async def harness(gateway: AsyncClient, http: httpx.AsyncClient, url: str, rollout_id: str, scale: Scale) -> None:
    """One agent: sleeps its share, calls the model, …, rewards itself."""
    claim = await gateway(claim_rollout(rollout_id, ClaimRequest(controller="benchmark", lease_seconds=3600)))
    group_and_sample = rollout_id.split("-", 2)[2]
    seconds = scale.own_seconds(group_and_sample)
    headers = {"authorization": f"Bearer {claim.agent_key}"}
    base = f"{url}/proxy/rollout/{rollout_id}/attempt/{claim.attempt_id}/mode/train/openai/v1"
    messages = [{"role": "user", "content": "go"}]
    for _ in range(scale.calls):
        await asyncio.sleep(seconds / scale.calls)
        body = {"model": "policy", "messages": messages, "max_tokens": scale.tokens_per_call}
        answer = await http.post(f"{base}/chat/completions", json=body, headers=headers)
        messages += [
            answer.raise_for_status().json()["choices"][0]["message"],
            {"role": "user", "content": "go on"},
        ]
    event = {"event_type": "reward", "data": {"value": random.Random(group_and_sample).random()}}
    await http.post(
        f"{url}/api/rollouts/{rollout_id}/attempt/{claim.attempt_id}/events", json=event, headers=headers
    )
    await gateway(end_attempt(rollout_id, claim.attempt_id, AttemptEnd(ok=True)))


async def harnesses(url: str, scale: Scale) -> None:
    async with (
        AsyncClient(url, KEY) as gateway,
        httpx.AsyncClient(timeout=600) as http,
        asyncio.TaskGroup() as group,
    ):
        async for _, rollout_id, state in gateway.rollout_changes(after=0):
            if state == "queuing":
                group.create_task(harness(gateway, http, url, rollout_id, scale))


async def measure(
    case: Case, scale: Scale, engine_url: str, busy: list[Interval], folder: Path
) -> tuple[dict[str, float], list[str]]:
    """Mean seconds of each part of an update, the wall time of them all and the idle share of it; and the numbers
    of the groups that were consumed, in the order of their start."""
    busy.clear()
    (folder / "tasks.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(64)))
    collect = {
        "groups_per_update": GROUPS,
        "group_size": SAMPLES,
        "groups_in_flight": case.groups_in_flight,
        "rest": case.rest,
    }
    config = Config.model_validate(
        {
            "name": "run",
            "runs_dir": str(folder),
            "data": {"train": str(folder / "tasks.jsonl")},
            "collect": collect,
            "train": {"updates": scale.updates},
        }
    )
    run = Run.create(config)
    with gateway_service(config, run.folder, KEY) as service:
        async with AsyncClient(service.address, KEY) as gateway:
            agents = asyncio.create_task(harnesses(service.address, scale))
            began = time.monotonic()
            await train(SimulatedBackend(engine_url, scale.update_seconds, busy), gateway, run, Silent())
            wall = time.monotonic() - began
            idle = 1 - busy_seconds(busy) / wall
            agents.cancel()
            await asyncio.gather(agents, return_exceptions=True)
    means = {
        name: statistics.fmean(row[name] for row in run.history)
        for name in ("time/collect", "time/rest", "time/update", "staleness/mean")
    }
    groups = [json.loads(line)["group_id"] for line in (run.folder / "groups.jsonl").read_text().splitlines()]
    consumed = sorted(group_id.rpartition("-")[2] for group_id in groups)
    rest_max = max(row["time/rest"] for row in run.history)
    return {"wall": wall, "idle": idle, "rest_max": rest_max, **means}, consumed


def offline(case: Case, scale: Scale, consumed: Sequence[str]) -> dict[str, float]:
    """The groups that a run consumed, under a schedule that knows their durations."""
    groups = [[scale.own_seconds(f"{number}-{sample}") for sample in range(SAMPLES)] for number in consumed]
    call_seconds = scale.tokens_per_call / scale.tokens_per_second
    load = Load(case.groups_in_flight, GROUPS, scale.updates, scale.update_seconds, scale.calls, call_seconds)
    wall, idle = best_offline(groups, load)
    return {"wall": wall, "idle": idle}


@contextlib.contextmanager
def served(scale: Scale, busy: list[Interval]):
    engine = simulated_engine(scale.tokens_per_second, busy)
    server = uvicorn.Server(uvicorn.Config(engine, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def table(title: str, results: dict[str, dict[str, float]]) -> Table:
    shown = Table(title=title)
    columns = {
        "wall s": "wall", "idle share": "idle", "collect s": "time/collect", "rest s": "time/rest",
        "longest rest s": "rest_max", "update s": "time/update", "mean staleness": "staleness/mean",
    }  # fmt: skip
    shown.add_column("schedule")
    for column in columns:
        shown.add_column(column, justify="right")
    for name, r in results.items():
        shown.add_row(name, *(f"{r[figure]:.2f}" if figure in r else "–" for figure in columns.values()))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description="Wall time of the same run, synchronous and collocated async.")
    parser.add_argument("--quick", action="store_true", help="a quarter of the updates, harnesses 8 times as fast")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    speed = 8 if options.quick else 1
    scale = Scale(5 if options.quick else 20, 2 / speed, 1.5 / speed, 100 * speed, 20)
    # Calls of 30 s, so that some are always in flight when an update is due.
    long_calls = Scale(4, 2 / speed, 0.5, 20, 600 // speed, calls=1)
    schedules = (Case("synchronous", 4), Case("collocated", 8), Case("collocated, 3 x", 12))
    rests = (Case("cut", 12, "cut"), Case("drain", 12, "drain"))

    by_schedule: dict[str, dict[str, float]] = {}
    by_rest: dict[str, dict[str, float]] = {}
    busy: list[Interval] = []
    with tempfile.TemporaryDirectory() as folder, served(scale, busy) as url:
        for case in schedules:
            by_schedule[case.name], consumed = asyncio.run(measure(case, scale, url, busy, Path(folder)))
            if case.groups_in_flight > GROUPS:
                by_schedule["  durations known" + case.name[10:]] = offline(case, scale, consumed)
    with tempfile.TemporaryDirectory() as folder, served(long_calls, busy) as url:
        for case in rests:
            by_rest[case.name], _ = asyncio.run(measure(case, long_calls, url, busy, Path(folder)))
    ratio = by_schedule["synchronous"]["wall"] / by_schedule["collocated"]["wall"]
    if options.json:
        print(json.dumps({"schedules": by_schedule, "rests": by_rest, "sync/collocated": ratio}))
        return
    Console(width=110).print(table(f"{scale.updates} updates of 4 groups x 4 rollouts", by_schedule))
    Console(width=110).print(f"synchronous / collocated: {ratio:.2f}")
    Console(width=110).print(
        table(f"with calls of {long_calls.tokens_per_call / long_calls.tokens_per_second:.0f} s", by_rest)
    )


if __name__ == "__main__":
    main()
