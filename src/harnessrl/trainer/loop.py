"""The training loop: keep groups in flight, take the complete ones, update, publish, evaluate."""

import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from harnessrl.client import (
    AsyncClient,
    delete_endpoints,
    mark_consumed,
    pause,
    proxy_state,
    register_endpoints,
    resume,
)
from harnessrl.schemas import Json, Pause
from harnessrl.trainer.backends import Backend
from harnessrl.trainer.batch import Group, Update, build_update
from harnessrl.trainer.collect import CollectedGroup, Collector
from harnessrl.trainer.health import Health, staleness_metrics
from harnessrl.trainer.report import Reporter
from harnessrl.trainer.rollout import FinishedRollout
from harnessrl.trainer.run import Run
from harnessrl.trainer.schedule import Flight, Schedule
from harnessrl.trainer.tasks import TaskDealer, read_tasks

__all__ = ["Progress", "train"]

REST_POLL_SECONDS = 0.02
NORMAL_95 = 1.96
STATE = "trainer.json"
"""In a checkpoint: what the trainer needs besides the weights."""


class Progress(Protocol):
    """What is told while a run goes on."""

    def phase(self, name: str, rollouts: int) -> None:
        """One of `evaluate`, `collect`, `rest`, `update`, `publish`, `checkpoint` begins, for so many rollouts."""
        ...

    def rollout(self, rollout: FinishedRollout) -> None: ...

    def update(self, number: int, metrics: dict[str, float]) -> None: ...

    def warn(self, message: str) -> None: ...


async def train(backend: Backend, gateway: AsyncClient, run: Run, progress: Progress) -> Json:
    """Train until `train.updates` updates are done; returns what `result.json` holds.

    A run that was resumed goes on from its newest checkpoint: the groups that were in flight there are adopted.
    """
    config = run.config
    tasks = TaskDealer(read_tasks(Path(config.data.train)), config.seed)
    held_out = read_tasks(Path(config.data.eval)) if config.data.eval else []
    began = time.monotonic()
    await gateway(delete_endpoints())
    await gateway(register_endpoints(backend.endpoints()))
    await gateway(resume())
    async with (
        Reporter(gateway, run.id, run.lineage, config, progress) as progress,
        Collector(gateway, config.agent, progress.rollout) as collector,
    ):
        session = _Session(backend, gateway, run, progress, collector, tasks)
        if run.lineage:
            assert run.checkpoint
            await session.adopt(json.loads((run.checkpoint / STATE).read_text()))
        else:
            await session.evaluate(held_out)
        updates = config.train.updates
        while session.updates < updates:
            await session.update()
            n = session.updates
            best = False
            if n == updates or (config.train.eval_every and n % config.train.eval_every == 0):
                best = await session.evaluate(held_out)
            if best or n == updates or (config.train.checkpoint_every and n % config.train.checkpoint_every == 0):
                await session.checkpoint(best)
    return {
        "name": run.folder.name,
        "updates": session.updates,
        "rollouts": session.rollouts,
        "eval_before": session.rewards[0] if session.rewards else None,
        "eval_after": session.rewards[-1] if session.rewards else None,
        "seconds": round(time.monotonic() - began, 1),
        "checkpoint": str(run.checkpoint) if run.checkpoint else None,
    }


class _Session:
    """The steps of a run, with what they share."""

    def __init__(
        self,
        backend: Backend,
        gateway: AsyncClient,
        run: Run,
        progress: Progress,
        collector: Collector,
        tasks: TaskDealer,
    ):
        self._config, self._backend, self._gateway = run.config, backend, gateway
        self._run, self._progress, self._collector, self._tasks = run, progress, collector, tasks
        self._schedule = Schedule(run.config.collect)
        self._again: list[Json] = []
        """Tasks of groups that were dropped for their age."""
        self._started = 0
        self._consumed: list[str] = []
        """Rollouts trained on since the last checkpoint."""
        self._dropped_in_a_row = 0
        self._health = Health()
        self.updates = 0
        self.rollouts = 0
        self.rewards: list[float] = []
        """Of the evaluations so far."""

    def state(self) -> Json:
        """All that a resumed run needs besides the weights."""
        return {
            "updates": self.updates,
            "rollouts": self.rollouts,
            "rewards": self.rewards,
            "position": self._tasks.position,
            "started": self._started,
            "again": self._again,
            "groups": [
                {"group_id": g.group_id, "task": g.task, "size": g.size, "started": g.started}
                for g in self._collector.groups.values()
            ],
        }

    async def adopt(self, state: Json) -> None:
        """Take up what `state` left; groups started after it get the same ids again, and so are adopted too."""
        self.updates, self.rollouts, self.rewards = state["updates"], state["rollouts"], state["rewards"]
        self._tasks.position, self._started, self._again = state["position"], state["started"], state["again"]
        await self._collector.start([CollectedGroup(**group) for group in state["groups"]])

    async def evaluate(self, tasks: list[Json]) -> bool:
        """The held-out tasks, all under one version, beside the next training groups; a failed rollout earns
        `failure_reward`.

        True if the mean reward is better than ever after an update.
        """
        if not tasks:
            return False
        repeats = self._config.train.eval_repeats
        self._progress.phase("evaluate", len(tasks) * repeats)
        groups = [
            CollectedGroup(f"{self._run.id}-eval{self.updates}-{i}", task, repeats, self.updates, is_train=False)
            for i, task in enumerate(tasks)
        ]
        await self._collector.start(groups)
        await self._fill()
        while not all(group.complete for group in groups):
            await self._wait("evaluation", [g.group_id for g in groups if not g.complete])
        for group in groups:
            self._collector.forget(group.group_id)
        mean = statistics.fmean(self._outcomes(groups))
        self._report_failures(groups)
        metrics = {"reward/eval": mean, **self._interval("reward/eval", groups)}
        self._run.log(self.updates, metrics)
        self._progress.update(self.updates, metrics)
        self.rewards.append(mean)
        return self.updates > 0 and mean >= max(self.rewards[1:])

    async def update(self) -> None:
        collect = self._config.collect
        began = time.monotonic()
        self._progress.phase("collect", collect.groups_per_update * collect.group_size)
        groups = await self._take()
        enough = time.monotonic()
        self._progress.phase("rest", 0)
        await self._rest()
        at_rest = time.monotonic()
        self._progress.phase("update", 0)
        update = build_update(
            [Group(group.group_id, group.rollouts) for group in groups],
            self._config.algorithm,
            max_tokens=self._config.engine.max_len,
            seed=self._config.seed + self.updates,
        )
        sampled_by = staleness_metrics(update.rows, self._backend.version)
        self._warn_without_tokens(groups)
        metrics = await self._train(update)
        self._progress.phase("publish", 0)
        await self._gateway(register_endpoints(self._backend.endpoints()))
        await self._gateway(resume())
        outcomes = self._outcomes(groups)
        self._consumed += [rollout.rollout_id for group in groups for rollout in group.rollouts]
        staleness = [self.updates - group.started for group in groups]
        self.updates += 1
        self.rollouts += len(outcomes)
        metrics = {
            "reward/train": statistics.fmean(outcomes),
            "reward/train_std": statistics.pstdev(outcomes),
            **self._interval("reward/train", groups),
            "policy/version": float(self._backend.version),
            "staleness/mean": statistics.fmean(staleness),
            "staleness/max": float(max(staleness)),
            "time/collect": enough - began,
            "time/rest": at_rest - enough,
            "time/update": time.monotonic() - at_rest,
            **sampled_by,
            **{f"batch/{name}": value for name, value in update.metrics.items()},
            **metrics,
        }
        self._run.log(self.updates, metrics)
        self._run.log_groups(self.updates, groups)
        self._progress.update(self.updates, metrics)
        self._report_failures(groups)
        for alarm in self._health.alarms(metrics):
            self._progress.warn(alarm)

    async def checkpoint(self, best: bool) -> None:
        def save(folder: Path) -> None:
            self._backend.save(folder)
            (folder / STATE).write_text(json.dumps(self.state()))

        self._progress.phase("checkpoint", 0)
        try:
            self._run.save_checkpoint(self.updates, save, best)
        except OSError as error:
            self._progress.warn(f"no checkpoint of update {self.updates}: {error.strerror or error}")
            return
        await self._gateway(mark_consumed(self._consumed))
        self._consumed.clear()

    async def _take(self) -> list[CollectedGroup]:
        """The groups of the next update, when the schedule has them."""
        collector = self._collector
        while True:
            self._drop_unusable()
            flights = self._flights()
            plan = self._schedule.plan(flights, self.updates)
            for group_id in plan.drop:
                self._again.append((await collector.cancel(group_id)).task)
            if plan.take:
                return [collector.forget(group_id) for group_id in plan.take]
            if not await self._fill():
                waiting = plan.blocking or [flight.group_id for flight in flights if not flight.complete]
                await self._wait(f"update {self.updates + 1}", waiting)

    async def _fill(self) -> bool:
        """Start as many groups as are missing, if there is an update to come; False if none are."""
        to_come = self.updates < self._config.train.updates
        missing = self._schedule.to_start(self._flights()) if to_come else 0
        if missing:
            await self._collector.start([self._next_group() for _ in range(missing)])
        return missing > 0

    def _flights(self) -> list[Flight]:
        groups = self._collector.groups.values()
        return [Flight(g.group_id, g.started, g.complete) for g in groups if g.is_train]

    def _next_group(self) -> CollectedGroup:
        task = self._again.pop() if self._again else next(self._tasks)
        self._started += 1
        group_id = f"{self._run.id}-{self._started:06d}"
        return CollectedGroup(group_id, task, self._config.collect.group_size, self.updates)

    async def _rest(self) -> None:
        """Hold new calls and bring those in flight to rest."""
        state = await self._gateway(
            pause(Pause(reason=f"update {self.updates + 1}", rest=self._config.collect.rest))
        )
        while state.inflight:
            await asyncio.sleep(REST_POLL_SECONDS)
            state = await self._gateway(proxy_state())

    async def _train(self, update: Update) -> dict[str, float]:
        try:
            return await asyncio.to_thread(self._backend.update, update)
        except asyncio.CancelledError:
            self._backend.stop()
            raise

    async def _wait(self, purpose: str, group_ids: Iterable[str]) -> None:
        patience = self._config.collect.patience_seconds
        if not await self._collector.changed(patience):
            groups = [self._collector.groups[group_id] for group_id in group_ids]
            reason = await self._collector.why_waiting(groups)
            self._progress.warn(f"{purpose} has waited {patience} s: {reason}")

    def _drop_unusable(self) -> None:
        """A group that lost members to infrastructure trains with those it has, if enough remain."""
        smallest = min(self._config.collect.min_group_size, self._config.collect.group_size)
        for group in [g for g in self._collector.groups.values() if g.is_train and g.complete]:
            if sum(rollout.failure_kind != "infra" for rollout in group.rollouts) >= smallest:
                self._dropped_in_a_row = 0
                continue
            self._collector.forget(group.group_id)
            self._report_failures([group])
            self._dropped_in_a_row += 1
            if self._dropped_in_a_row >= self._schedule.in_flight:
                raise RuntimeError(_why_nothing_completes(group, self._dropped_in_a_row))

    def _warn_without_tokens(self, groups: Sequence[CollectedGroup]) -> None:
        calls = [call for group in groups for rollout in group.rollouts for call in rollout.calls]
        if any(call.sampled_ids for call in calls):
            return
        errors = Counter(str(call.error.get("message", call.error)) for call in calls if call.error)
        first = f"; most often: {errors.most_common(1)[0][0]}" if errors else ""
        self._progress.warn(f"nothing to train on: none of {len(calls)} model calls has an answer{first}")

    def _outcomes(self, groups: Sequence[CollectedGroup]) -> list[float]:
        failed = self._config.algorithm.failure_reward
        return [r.outcome(failed) for g in groups for r in g.rollouts if r.failure_kind != "infra"] or [failed]

    def _interval(self, name: str, groups: Sequence[CollectedGroup]) -> dict[str, float]:
        """Half the width of the mean reward's 95 % confidence interval over tasks; nothing for a single one.

        A group's rollouts share their task, so its mean counts once.
        """
        means = [statistics.fmean(self._outcomes([group])) for group in groups]
        return {f"{name}_ci95": NORMAL_95 * statistics.stdev(means) / len(means) ** 0.5} if len(means) > 1 else {}

    def _report_failures(self, groups: Sequence[CollectedGroup]) -> None:
        reasons = Counter(_reason(r) for g in groups for r in g.rollouts if r.failure_kind)
        for reason, count in reasons.most_common(3):
            self._progress.warn(f"{count} rollouts failed: {reason}")


def _reason(rollout: FinishedRollout) -> str:
    return f"{rollout.error_message} (counts as {rollout.failure_kind}'s)"


def _why_nothing_completes(group: CollectedGroup, count: int) -> str:
    reasons = Counter(_reason(r) for r in group.rollouts if r.failure_kind == "infra")
    return (
        f"no group can complete: the last {count} tasks all failed for reasons outside the agent; "
        f"the last one with: {reasons.most_common(1)[0][0]}"
    )
