"""What the Rollout Controller costs and withstands: real gateway, real controllers, real agents, as processes.

python -m benchmarks.controller [--quick] [--json]; exit code 1 if results are wrong, not if they are slow.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from harnessrl.client import Client, create_rollouts, get_events, get_rollout, list_rollouts, terminal_rollouts
from harnessrl.schemas import KubernetesRun, LocalRun, NewRollout, Rollout, RolloutConfig

KEY = "benchmark"
TICKS = os.sysconf("SC_CLK_TCK")
REPOSITORY = Path(__file__).parent.parent
CLUSTER = REPOSITORY.parent / "shared" / "kube" / "cluster.py"
TRIVIAL = LocalRun(agent_class="benchmarks.kit.trivial_agents:Rewarder")


@dataclass
class Row:
    figure: str
    reference: str
    must: str
    measured: str
    ok: bool
    right: bool = True
    """False: not just slow, but a rollout failed, was lost or run twice."""


class Process:
    """`python -m harnessrl …` in a process of its own, once it says that it is ready."""

    def __init__(self, folder: Path, *arguments: str):
        log = folder / f"{arguments[0]}-{time.monotonic_ns()}.log"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])}
        with open(log, "wb") as file:
            command = [sys.executable, "-m", "harnessrl", *arguments]
            self.popen = subprocess.Popen(command, stdout=file, stderr=file, cwd=REPOSITORY, env=environment)
        while " ready " not in log.read_text():
            if self.popen.poll() is not None:
                sys.exit(log.read_text())
            time.sleep(0.02)
        self.text = log.read_text()

    def end(self, number: int = signal.SIGTERM) -> None:
        self.popen.send_signal(number)
        self.popen.wait()


def cpu_seconds(pid: int, alone: bool = False) -> float:
    """Of the process, its live descendants, and all that they have waited for; or of it `alone`."""
    if alone:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS
    parents: dict[int, list[tuple[int, int]]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents.setdefault(int(fields[1]), []).append((int(path.parent.name), sum(map(int, fields[11:15]))))
    own = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    total, todo = sum(map(int, own[11:15])), [pid]
    while todo:
        for child, ticks in parents.get(todo.pop(), []):
            total += ticks
            todo.append(child)
    return total / TICKS


class Bench:
    def __init__(self, folder: Path):
        self.folder = folder
        store = str(folder / "store.db")
        self.gateway = Process(folder, "gateway", "--port", "0", "--key", KEY, "--store", store)
        self.url = next(word for word in self.gateway.text.split() if word.startswith("http"))
        self.ask = Client(self.url, KEY)

    def start(self, concurrency: int, workdir: str) -> Process:
        where = ("--gateway", self.url, "--key", KEY, "--workdir", str(self.folder / workdir))
        return Process(self.folder, "controller", *where, "--concurrency", str(concurrency))

    @contextmanager
    def controller(self, concurrency: int, workdir: str = "one") -> Iterator[Process]:
        process = self.start(concurrency, workdir)
        try:
            yield process
        finally:
            process.end()

    def post(self, run: LocalRun, n: int) -> list[Rollout]:
        return self.ask(create_rollouts([NewRollout(input={}, config=RolloutConfig(local=run))] * n))

    def ended(self) -> int:
        return self.ask(terminal_rollouts(limit=1)).total_terminal

    def wait(self, target: int, seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while self.ended() < target:
            if time.monotonic() > deadline:
                sys.exit(f"only {self.ended()} of {target} rollouts ended within {seconds:g} s")
            time.sleep(0.01)

    def states(self, rollouts: list[Rollout]) -> "Counter[str]":
        return Counter(self.ask(get_rollout(r.rollout_id)).rollout.status.state for r in rollouts)

    def running(self) -> int:
        return len(self.ask(list_rollouts("running", limit=5000)))


def trivial(bench: Bench, n: int) -> list[Row]:
    """Wall and CPU time of agents that only post a reward, and how soon the end is known after it."""
    with bench.controller(8) as controller:
        for size in (8, n):  # first a few, so that the libraries are warm
            cpu, ended, begun = cpu_seconds(controller.popen.pid), bench.ended(), time.monotonic()
            rollouts = bench.post(TRIVIAL, size)
            bench.wait(ended + size)
            wall = time.monotonic() - begun
        each = (cpu_seconds(controller.popen.pid) - cpu) / n
    lags = []
    for rollout in rollouts:
        (reward,) = bench.ask(get_events(rollout.rollout_id, "reward"))
        lags.append(bench.ask(get_rollout(rollout.rollout_id)).rollout.status.updated_at - reward.timestamp)
    lag, right = statistics.median(lags), bench.states(rollouts) == {"succeeded": n}
    return [
        Row(
            f"{n} trivial rollouts, POST to all terminal",
            "110 s (200)",
            "6 s (200)",
            f"{wall:.2f} s",
            right and wall <= 6,
            right,
        ),
        Row("CPU per trivial rollout", "0.51 s", "0.03 s", f"{each:.4f} s", each <= 0.03),
        Row("reward posted to terminal, median", "8.0 s", "50 ms", f"{lag * 1000:.0f} ms", lag <= 0.05),
    ]


def command_cost(bench: Bench, n: int) -> list[Row]:
    """CPU of a `true` under the controller, without `true` itself: to claim and report it, and to keep it."""
    with bench.controller(8) as controller:
        pid = controller.popen.pid
        for size in (8, n):
            cpu, own, ended = cpu_seconds(pid), cpu_seconds(pid, alone=True), bench.ended()
            bench.post(LocalRun(command=["true"]), size)
            bench.wait(ended + size)
        own = (cpu_seconds(pid, alone=True) - own) / n * 1000
        each = (cpu_seconds(pid) - cpu) / n * 1000
    before = os.times()
    for _ in range(n):
        subprocess.run(["true"], check=True)
    after = os.times()
    bare = (after.children_user + after.children_system - before.children_user - before.children_system) / n * 1000
    text = f"{each - own - bare:.1f} ms + {own:.1f} ms of the controller (`true`: {bare:.1f} ms)"
    return [Row("CPU of a command beyond its own", "–", "3 ms", text, each - own - bare <= 3)]


def sleepers(bench: Bench, n: int, seconds: int) -> list[Row]:
    most = 0
    with bench.controller(n):
        target, begun = bench.ended() + n, time.monotonic()
        rollouts = bench.post(LocalRun(command=["sleep", str(seconds)]), n)
        while bench.ended() < target and most < n:
            most = max(most, bench.running())
            time.sleep(0.5)
        full = time.monotonic() - begun
        bench.wait(target)
    right = bench.states(rollouts) == {"failed": n}  # `sleep` never calls a model
    text = f"{most} after {full:.1f} s"
    return [Row(f"{n} sleeping harnesses at once", "50", str(n), text, right and most == n, right)]


def killed(bench: Bench, n: int) -> list[Row]:
    """kill -9 of the controller while all run; some end before its successor is there, some after."""
    target = bench.ended() + n
    controller = bench.start(n, "one")
    rollouts = []
    for seconds in ("5", "8"):
        run = LocalRun(agent_class="benchmarks.kit.trivial_agents:Sleeper", env={"SECONDS": seconds})
        rollouts += bench.post(run, n // 2)
    while bench.running() < n:
        time.sleep(0.02)
    time.sleep(1)
    controller.end(signal.SIGKILL)
    time.sleep(5)
    with bench.controller(n):
        bench.wait(target)
    return [_adopted(bench, rollouts, "local")]


def _adopted(bench: Bench, rollouts: list[Rollout], runner: str) -> Row:
    n, right = len(rollouts), bench.states(rollouts)["succeeded"]
    first = sum(bench.ask(get_rollout(r.rollout_id)).rollout.status.last_attempt_id == "0" for r in rollouts)
    text = f"{right} right, {first} in their first attempt"
    ok = right == first == n
    return Row(f"kill -9 with {n} running, {runner}", f"{n} failed", f"{n} right", text, ok, ok)


def two_controllers(bench: Bench, n: int) -> list[Row]:
    with bench.controller(8), bench.controller(8, "two"):
        target, begun = bench.ended() + n, time.monotonic()
        rollouts = bench.post(TRIVIAL, n)
        bench.wait(target)
        wall = time.monotonic() - begun
    rewards = Counter(len(bench.ask(get_events(r.rollout_id, "reward"))) for r in rollouts)
    text = f"{rewards[1]} once, {n - rewards[1]} otherwise, {wall:.1f} s"
    ok = rewards == {1: n}
    return [Row(f"two controllers, {n} rollouts", "run twice", "each once", text, ok, ok)]


JOB = """
import json, os, sys, time, urllib.request as u
time.sleep(float(sys.argv[1]))
body = json.dumps({"event_type": "reward", "data": {"value": 1.0}}).encode()
head = {"content-type": "application/json", "authorization": "Bearer " + os.environ["AGL_KEY"]}
u.urlopen(u.Request(os.environ["AGL_EVENT_URL"], body, head)).read()
"""


class Kubernetes:
    """The test cluster, whose pods are processes of this machine, and controllers for it."""

    def __init__(self, bench: Bench, kubeconfig: str):
        self.bench, self.kubeconfig = bench, kubeconfig

    def start(self) -> Process:
        where = ("--gateway", self.bench.url, "--key", KEY, "--kubeconfig", self.kubeconfig)
        return Process(self.bench.folder, "controller", "--runner", "kubernetes", *where, "--concurrency", "100")

    def post(self, seconds: float, n: int) -> list[Rollout]:
        run = KubernetesRun(image="python", command=[sys.executable, "-c", JOB, str(seconds)])
        return self.bench.ask(create_rollouts([NewRollout(input={}, config=RolloutConfig(k8s=run))] * n))

    def left(self) -> int:
        """Jobs, pods and Secrets that are still there."""

        async def count() -> int:
            from kubernetes_asyncio import client, config

            settings = client.Configuration()
            await config.load_kube_config(self.kubeconfig, client_configuration=settings)
            async with client.ApiClient(settings) as api:
                core = client.CoreV1Api(api)
                where: dict[str, Any] = {"namespace": "default", "label_selector": "harnessrl/controller"}
                reads = (
                    client.BatchV1Api(api).list_namespaced_job,
                    core.list_namespaced_pod,
                    core.list_namespaced_secret,
                )
                return sum([len((await read(**where)).items) for read in reads])

        return asyncio.run(count())

    def many(self, n: int) -> list[Row]:
        controller = self.start()
        target, begun = self.bench.ended() + n, time.monotonic()
        rollouts = self.post(0, n)
        self.bench.wait(target, 600)
        wall = time.monotonic() - begun
        while self.left() and time.monotonic() - begun < wall + 400:
            time.sleep(0.5)
        gone, left = time.monotonic() - begun, self.left()
        controller.end()
        right = self.bench.states(rollouts)["succeeded"]
        text = f"{right} right after {wall:.0f} s, {left} left after {gone:.0f} s"
        ok = right == n and not left
        return [Row(f"{n} Jobs on a real API server", "–", "all right, none left", text, ok, ok)]

    def killed(self, n: int) -> list[Row]:
        target, controller = self.bench.ended() + n, self.start()
        rollouts = self.post(15, n // 2) + self.post(25, n // 2)
        while self.bench.running() < n or self.left() < 3 * n:
            time.sleep(0.1)
        controller.end(signal.SIGKILL)
        time.sleep(8)
        controller = self.start()
        self.bench.wait(target)
        controller.end()
        return [_adopted(self.bench, rollouts, "k8s")]


def on_kubernetes(bench: Bench, quick: bool) -> list[Row]:
    if not CLUSTER.exists():
        return [Row("Jobs on a real API server", "–", "all right", f"skipped: no {CLUSTER}", True)]
    folder = str(bench.folder / "kube")
    command = [sys.executable, str(CLUSTER)]
    up = subprocess.run([*command, "up", folder, "--pods", "600"], capture_output=True, text=True)
    if up.returncode:
        sys.exit(up.stdout + up.stderr)
    try:
        cluster = Kubernetes(bench, up.stdout.splitlines()[-1].partition("=")[2])
        return cluster.many(500) + cluster.killed(50) if not quick else cluster.many(10)
    finally:
        subprocess.run([*command, "down", folder], capture_output=True, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller numbers, under a minute")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        try:
            rows = trivial(bench, 200)
            rows += command_cost(bench, 100)
            rows += sleepers(bench, *((200, 6) if options.quick else (1000, 30)))
            rows += killed(bench, 50)
            rows += two_controllers(bench, 100 if options.quick else 500)
            rows += on_kubernetes(bench, options.quick)
        finally:
            bench.gateway.end()
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        table = Table("figure", "reference", "must", "measured", "")
        for row in rows:
            table.add_row(row.figure, row.reference, row.must, row.measured, _verdict(row))
        Console().print(table)
    if not all(row.right for row in rows):
        sys.exit(1)


def _verdict(row: Row) -> str:
    return "ok" if row.ok else "MISSED" if row.right else "WRONG"


if __name__ == "__main__":
    main()
