import random

import pytest
from pydantic import ValidationError

from harnessrl.config import CollectConfig
from harnessrl.trainer.schedule import Flight, Schedule


def flights(*groups: tuple[str, int, bool]) -> list[Flight]:
    return [Flight(*group) for group in groups]


def test_the_oldest_complete_groups_are_taken_first() -> None:
    schedule = Schedule(CollectConfig(groups_per_update=2, groups_in_flight=4))
    plan = schedule.plan(flights(("d", 2, True), ("c", 1, True), ("b", 1, False), ("a", 1, True)), updates=2)
    assert (plan.take, plan.drop, plan.blocking) == (["a", "c"], [], [])


def test_nothing_is_taken_before_there_are_enough() -> None:
    schedule = Schedule(CollectConfig(groups_per_update=2, groups_in_flight=4))
    assert schedule.plan(flights(("a", 0, True), ("b", 0, False)), updates=0).take == []


def test_a_group_about_to_grow_too_old_blocks_the_update() -> None:
    schedule = Schedule(CollectConfig(groups_per_update=1, groups_in_flight=2, max_staleness=2))
    running = flights(("old", 0, False), ("new", 2, True))
    assert schedule.plan(running, updates=1).take == ["new"]
    assert schedule.plan(running, updates=2).blocking == ["old"]
    assert schedule.plan(flights(("old", 0, True), ("new", 2, True)), updates=2).take == ["old"]


def test_or_it_is_dropped_when_the_update_could_go_on() -> None:
    config = CollectConfig(groups_per_update=1, groups_in_flight=2, max_staleness=2, when_stale="drop")
    schedule = Schedule(config)
    plan = schedule.plan(flights(("old", 0, False), ("new", 2, True)), updates=2)
    assert (plan.take, plan.drop) == (["new"], ["old"])
    assert schedule.plan(flights(("old", 0, False), ("new", 2, False)), updates=2).drop == []


def test_as_many_in_flight_as_an_update_takes_is_synchronous() -> None:
    schedule = Schedule(CollectConfig(groups_per_update=3))
    assert schedule.to_start([]) == 3
    assert schedule.to_start(flights(("a", 0, True), ("b", 0, False), ("c", 0, False))) == 0
    assert schedule.plan(flights(("a", 0, True), ("b", 0, True), ("c", 0, False)), updates=0).take == []


def test_too_many_in_flight_for_the_bound_are_refused() -> None:
    with pytest.raises(ValidationError, match="between groups_per_update"):
        CollectConfig(groups_per_update=2, groups_in_flight=7, max_staleness=2)


@pytest.mark.parametrize("when_stale", ["wait", "drop"])
@pytest.mark.parametrize("seed", range(20))
def test_no_group_is_ever_trained_too_old_and_the_schedule_never_stalls(when_stale: str, seed: int) -> None:
    """A simulated clock: groups take random, long-tailed times; each event is one completion."""
    rng = random.Random(seed)
    config = CollectConfig.model_validate(
        {"groups_per_update": 3, "groups_in_flight": 8, "max_staleness": 2, "when_stale": when_stale}
    )
    schedule = Schedule(config)
    started: dict[str, int] = {}
    ends: dict[str, float] = {}
    clock, updates, number = 0.0, 0, 0
    taken: list[str] = []
    while updates < 40:
        running = [Flight(g, v, ends[g] <= clock) for g, v in started.items()]
        plan = schedule.plan(running, updates)
        for group in plan.drop:
            del started[group]
        if plan.take:
            for group in plan.take:
                assert updates - started.pop(group) <= config.max_staleness
            taken += plan.take
            updates += 1
            clock += 1
        elif missing := schedule.to_start(running):
            for _ in range(missing):
                name, number = f"{number:05d}", number + 1
                started[name], ends[name] = updates, clock + rng.lognormvariate(0, 1.5)
        else:
            clock = min(end for group, end in ends.items() if group in started and end > clock)
    assert len(set(taken)) == len(taken) == 120
