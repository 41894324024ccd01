"""When to start groups, when to update, and with which: rules over what is in flight, without clocks or I/O.

Synchronous training is the case in which no more groups are in flight than an update takes: nothing then runs while
the weights change. With more in flight, harnesses go on while the model is updated (collocated async): whatever is
complete is taken, oldest version first, and the rest carries over within the bound on staleness.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from harnessrl.config import CollectConfig

__all__ = ["Flight", "Plan", "Schedule"]


@dataclass(frozen=True)
class Flight:
    """A group that was started and not taken yet."""

    group_id: str
    started: int
    """Number of updates when it was started."""
    complete: bool


@dataclass(frozen=True)
class Plan:
    take: list[str]
    """Groups to update with now; empty: not yet."""
    drop: list[str]
    """Groups that are too old to be waited for; their tasks are dealt again."""
    blocking: list[str]
    """Groups that the update waits for, because they would become too old."""


class Schedule:
    def __init__(self, config: CollectConfig):
        self._config = config
        self.in_flight = config.groups_in_flight or config.groups_per_update

    def to_start(self, flights: Sequence[Flight]) -> int:
        return max(0, self.in_flight - len(flights))

    def plan(self, flights: Sequence[Flight], updates: int) -> Plan:
        """What to do after `updates` updates. Groups are ordered by age, then by id, whatever `flights`' order."""
        ordered = sorted(flights, key=lambda flight: (flight.started, flight.group_id))
        take = [flight for flight in ordered if flight.complete][: self._config.groups_per_update]
        if len(take) < self._config.groups_per_update:
            return Plan([], [], [])
        rest = [flight for flight in ordered if flight not in take]
        drop: list[str] = []
        while late := self._too_late(rest, updates + 1):
            waiting = [flight for flight in rest if not flight.complete and flight.started <= late.started]
            if self._config.when_stale == "wait":
                return Plan([], [], [flight.group_id for flight in waiting])
            rest.remove(waiting[0])
            drop.append(waiting[0].group_id)
        return Plan([flight.group_id for flight in take], drop, [])

    def _too_late(self, rest: Sequence[Flight], updates: int) -> Flight | None:
        """The first group that would be too old even if those left over are taken by age from now on."""
        for position, flight in enumerate(rest):
            taken_at = updates + position // self._config.groups_per_update
            if taken_at - flight.started > self._config.max_staleness:
                return flight
        return None
