"""Collecting: groups of rollouts are started at the gateway and come back whole, when their last member ended.

The gateway's stream of state changes drives it; nothing is polled, and a lost gateway is waited for. Rollout ids
follow from the group's, and creating a known one returns it as it is: so starting a group again adopts it.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import httpx
import structlog

from harnessrl.client import (
    AsyncClient,
    GatewayError,
    create_rollouts,
    delete_rollout,
    get_calls,
    get_events,
    get_rollout,
    list_rollouts,
)
from harnessrl.config import AgentConfig
from harnessrl.schemas import TERMINAL, Json, Metadata, NewRollout, RolloutConfig
from harnessrl.trainer.rollout import FinishedRollout, deleted_rollout, finished_rollout

__all__ = ["CollectedGroup", "Collector"]

log = structlog.get_logger()

RECONNECT_SECONDS = 0.5


@dataclass(eq=False)
class CollectedGroup:
    """The rollouts of one task that are compared with each other."""

    group_id: str
    task: Json
    size: int
    started: int
    """Number of updates when it was started."""
    is_train: bool = True
    rollouts: list[FinishedRollout] = field(default_factory=list)

    @property
    def rollout_ids(self) -> list[str]:
        return [f"{self.group_id}-{sample}" for sample in range(self.size)]

    @property
    def complete(self) -> bool:
        return len(self.rollouts) == self.size


class Collector:
    """Starts groups and gathers their rollouts; `on_rollout` is told of each that ended.

    Use as an asynchronous context manager.
    """

    def __init__(
        self,
        gateway: AsyncClient,
        agent: AgentConfig,
        on_rollout: Callable[[FinishedRollout], None] = lambda _: None,
    ):
        self._gateway, self._agent, self._on_rollout = gateway, agent, on_rollout
        self._running: dict[str, CollectedGroup] = {}
        self._changed = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self.groups: dict[str, CollectedGroup] = {}
        """What was started and not forgotten, by id."""

    async def __aenter__(self) -> Self:
        self._watcher = asyncio.create_task(self._watch())
        self._watcher.add_done_callback(lambda _: self._changed.set())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._watcher
        self._watcher.cancel()
        await asyncio.gather(self._watcher, return_exceptions=True)

    async def start(self, groups: Sequence[CollectedGroup]) -> None:
        """Start each group's rollouts, or adopt those that the gateway knows already."""
        config = RolloutConfig(
            timeout_seconds=self._agent.timeout_seconds,
            local=self._agent.local,
            k8s=self._agent.k8s,
            max_attempts=self._agent.max_attempts,
            reward_from=self._agent.reward_from,
        )
        new = []
        for group in groups:
            self.groups[group.group_id] = group
            for sample, rollout_id in enumerate(group.rollout_ids):
                self._running[rollout_id] = group
                metadata = Metadata(group_id=group.group_id, sample_idx_in_batch=sample, batch_idx=group.started)
                new.append(
                    NewRollout(
                        input=group.task,
                        is_train=group.is_train,
                        config=config,
                        metadata=metadata,
                        rollout_id=rollout_id,
                    )
                )
        for rollout in await self._gateway(create_rollouts(new)):
            if rollout.status.state in TERMINAL:
                await self._finish(rollout.rollout_id)

    async def changed(self, timeout: float) -> bool:
        """Wait until a group may have become complete; False after `timeout` seconds without one."""
        assert self._watcher
        if self._watcher.done():
            self._watcher.result()
        try:
            await asyncio.wait_for(self._changed.wait(), timeout)
        except TimeoutError:
            return False
        self._changed.clear()
        return True

    async def why_waiting(self, groups: Sequence[CollectedGroup]) -> str:
        """What keeps these groups from becoming complete, and what to do about it."""
        ids = {rollout_id for group in groups for rollout_id in group.rollout_ids} & self._running.keys()
        running = [r for r in await self._gateway(list_rollouts("running", limit=10_000)) if r.rollout_id in ids]
        calls = await asyncio.gather(*(self._gateway(get_calls(rollout.rollout_id)) for rollout in running))
        silent = sum(not made for made in calls)
        if not running:
            return f"no controller has taken any of {len(ids)} rollouts; is one running, and free?"
        if silent:
            return (
                f"{silent} of {len(running)} harness processes have not called the model; see their logs with "
                "`harnessrl rollouts logs ID`"
            )
        return (
            f"{len(running)} harnesses are still at work on {len(groups)} tasks; agent.timeout_seconds bounds them"
        )

    def forget(self, group_id: str) -> CollectedGroup:
        """Take a group out of flight."""
        group = self.groups.pop(group_id)
        for rollout_id in group.rollout_ids:
            self._running.pop(rollout_id, None)
        return group

    async def cancel(self, group_id: str) -> CollectedGroup:
        """Stop what still runs of a group and forget it."""
        running = [r for r in self.groups[group_id].rollout_ids if r in self._running]
        group = self.forget(group_id)
        for rollout_id in running:
            await self._gateway(delete_rollout(rollout_id))
        return group

    async def _watch(self) -> None:
        seen, lost = 0, False
        while True:
            try:
                async for cursor, rollout_id, state in self._gateway.rollout_changes(after=seen):
                    seen, lost = cursor, False
                    if (state in TERMINAL or state == "deleted") and rollout_id in self._running:
                        await self._finish(rollout_id)
            except httpx.TransportError as error:
                if not lost:
                    log.warning("lost the gateway, trying again", error=str(error))
                lost = True
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _finish(self, rollout_id: str) -> None:
        try:
            detail, events, calls = await asyncio.gather(
                self._gateway(get_rollout(rollout_id)),
                self._gateway(get_events(rollout_id, event_type="reward")),
                self._gateway(get_calls(rollout_id)),
            )
        except GatewayError as error:
            if error.status != 404:
                raise
            detail, events, calls = None, [], []
        group = self._running.pop(rollout_id, None)
        if group is None:
            return
        finished = (
            finished_rollout(detail.rollout, events, calls)
            if detail
            else deleted_rollout(rollout_id, group.group_id)
        )
        group.rollouts.append(finished)
        self._on_rollout(finished)
        if group.complete:
            group.rollouts.sort(key=lambda rollout: rollout.rollout_id)
            self._changed.set()
