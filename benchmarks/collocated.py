"""What collocated async buys: the same run, synchronous and asynchronous, with long-tailed harness times.

Real: the gateway, its proxy, the schedule, the trainer's loop. Simulated in real time: the engine (a fixed rate for
each call), the update (a fixed time, the engine at rest), the harnesses (sleeps and model calls, in this process,
in place of the controller).

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
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvicorn
from rich.console import Console
from rich.table import Table

from benchmarks.kit.simulated_engine import simulated_engine
from harnessrl.cli.services import gateway_service
from harnessrl.client import AsyncClient, claim_rollout, end_attempt
from harnessrl.config import Config
from harnessrl.schemas import AttemptEnd, ClaimRequest, Endpoint
from harnessrl.trainer.batch import Update
from harnessrl.trainer.loop import train
from harnessrl.trainer.rollout import FinishedRollout
from harnessrl.trainer.run import Run

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


class SimulatedBackend:
    def __init__(self, url: str, seconds: float):
        self._url, self._seconds, self.version = url, seconds, 0

    def endpoints(self) -> list[Endpoint]:
        endpoint = Endpoint(model="policy", endpoint=self._url, version=self.version, kind="token")
        return [endpoint.model_copy(update={"tokenizer": str(TINY), "renderer": {"name": "chatml"}})]

    def update(self, update: Update) -> dict[str, float]:
        time.sleep(self._seconds)
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
    """One agent: sleeps its share, calls the model, …, rewards itself. Its time follows from its id."""
    claim = await gateway(claim_rollout(rollout_id, ClaimRequest(controller="benchmark", lease_seconds=3600)))
    # The id ends in GROUP-SAMPLE, which are the same in each run.
    rng = random.Random(rollout_id.split("-", 2)[2])
    seconds = scale.median_seconds * math.exp(rng.gauss(0, math.log(10) / 2.326))
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
    event = {"event_type": "reward", "data": {"value": rng.random()}}
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


async def measure(case: Case, scale: Scale, engine_url: str, folder: Path) -> dict[str, float]:
    """Mean seconds of each part of an update, and the wall time of them all."""
    (folder / "tasks.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(64)))
    collect = {
        "groups_per_update": 4,
        "group_size": 4,
        "groups_in_flight": case.groups_in_flight,
        "rest": case.rest,
    }
    config = Config.model_validate(
        {
            "name": case.name,
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
            await train(SimulatedBackend(engine_url, scale.update_seconds), gateway, run, Silent())
            wall = time.monotonic() - began
            agents.cancel()
            await asyncio.gather(agents, return_exceptions=True)
    means = {
        name: statistics.fmean(row[name] for row in run.history)
        for name in ("time/collect", "time/rest", "time/update", "staleness/mean")
    }
    return {"wall": wall, "rest_max": max(row["time/rest"] for row in run.history), **means}


@contextlib.contextmanager
def served(scale: Scale):
    server = uvicorn.Server(uvicorn.Config(simulated_engine(scale.tokens_per_second), port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def table(title: str, results: dict[str, dict[str, float]]) -> Table:
    shown = Table(title=title)
    for column in ("schedule", "wall s", "collect s", "rest s", "longest rest s", "update s", "mean staleness"):
        shown.add_column(column, justify="left" if column == "schedule" else "right")
    for name, r in results.items():
        figures = (
            r["wall"],
            r["time/collect"],
            r["time/rest"],
            r["rest_max"],
            r["time/update"],
            r["staleness/mean"],
        )
        shown.add_row(name, *(f"{figure:.2f}" for figure in figures))
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
    schedules = (Case("synchronous", 4), Case("collocated", 8), Case("collocated, 3 x in flight", 12))
    rests = (Case("cut", 12, "cut"), Case("drain", 12, "drain"))

    def run(cases: tuple[Case, ...], scale: Scale) -> dict[str, dict[str, float]]:
        with tempfile.TemporaryDirectory() as folder, served(scale) as url:
            return {case.name: asyncio.run(measure(case, scale, url, Path(folder))) for case in cases}

    by_schedule, by_rest = run(schedules, scale), run(rests, long_calls)
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
