"""What a schedule could do at best that knows how long each harness will take: in virtual time, without overheads.

The rules are those of the real one: so many groups in flight, an update as soon as enough of them are complete,
model calls that stand still while the weights change. Free is the order in which groups are started: the best one
that a search finds.
"""

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Load", "best_offline", "busy_seconds"]

Interval = tuple[float, float]


@dataclass(frozen=True)
class Load:
    groups_in_flight: int
    groups_per_update: int
    updates: int
    update_seconds: float
    calls: int
    """Of each harness, evenly spread over its own time."""
    call_seconds: float


def best_offline(groups: Sequence[Sequence[float]], load: Load, tries: int = 300) -> tuple[float, float]:
    """Wall seconds and idle share of the best order found; `groups`: each rollout's own seconds, in real order."""
    rng = random.Random(0)
    by_length = sorted(groups, key=max)
    orders = [list(groups), by_length, by_length[::-1]]
    best = min((simulate(order, load), order) for order in orders)
    for _ in range(tries):
        order = list(best[1])
        i, j = rng.sample(range(len(order)), 2)
        order[i], order[j] = order[j], order[i]
        best = min(best, (simulate(order, load), order))
    return best[0]


def simulate(groups: Sequence[Sequence[float]], load: Load) -> tuple[float, float]:
    """Wall seconds and idle share if groups are started in this order."""
    waiting = list(reversed(groups))
    events: list[tuple[float, int, int, int, bool]] = []
    """(time, group, sample, calls done, a call ends then)"""
    left: dict[int, int] = {}
    own: dict[int, Sequence[float]] = {}
    complete: list[int] = []
    busy: list[Interval] = []
    now = resting_until = 0.0
    for _ in range(load.updates):
        while waiting and len(left) < load.groups_in_flight:
            number = len(groups) - len(waiting)
            own[number] = waiting.pop()
            left[number] = len(own[number])
            for sample, seconds in enumerate(own[number]):
                heapq.heappush(events, (now + seconds / load.calls, number, sample, 0, False))
        while len(complete) < load.groups_per_update:
            now, number, sample, done, ends = heapq.heappop(events)
            if not ends:
                start = max(now, resting_until)
                heapq.heappush(events, (start + load.call_seconds, number, sample, done, True))
                continue
            busy.append((now - load.call_seconds, now))
            if done + 1 < load.calls:
                pause = own[number][sample] / load.calls
                heapq.heappush(events, (now + pause, number, sample, done + 1, False))
                continue
            left[number] -= 1
            if not left[number]:
                complete.append(number)
        now = max(now, resting_until)
        for number in complete[: load.groups_per_update]:
            del left[number]
        del complete[: load.groups_per_update]
        resting_until = now + load.update_seconds
        busy.append((now, resting_until))
        # Calls that have begun stand still for the update; what was sampled before it is counted behind it.
        events = [(t + ends * load.update_seconds, n, s, done, ends) for t, n, s, done, ends in events]
        heapq.heapify(events)
        now = resting_until
    return now, 1 - busy_seconds(busy) / now


def busy_seconds(intervals: Sequence[Interval]) -> float:
    """Seconds that at least one of them covers."""
    total, covered = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return total
