"""What happened in a rollout: events, rewards and model calls."""

import math
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Response

from harnessrl.gateway.api.wire import AttemptId, CallerDep, GatewayDep, GuardedRoute, RolloutId, answer
from harnessrl.gateway.store.v1 import triplets
from harnessrl.schemas import Call, Event, Json, NewEvent

__all__ = ["router"]

router = APIRouter(prefix="/api/rollouts/{rollout_id}", route_class=GuardedRoute)


@router.post("/attempt/{attempt_id}/events", response_model=Event)
async def add(
    rollout_id: RolloutId, attempt_id: AttemptId, event: NewEvent, gateway: GatewayDep, caller: CallerDep
) -> Response:
    access = await gateway.store.access(rollout_id)
    caller.check_event(event.event_type, access)
    is_reward = event.event_type == "reward"
    if is_reward and not _is_finite(event.data.get("value")):
        raise HTTPException(422, "A reward event needs data.value, a finite number")
    if is_reward and not _names_a_call(event.data):
        raise HTTPException(422, "A reward event's data.call_id is a string, its data.turn a whole number")
    late = is_reward and access.reward_from == "evaluator" and caller.role in ("evaluator", "admin")
    return answer(await gateway.store.add_event(rollout_id, attempt_id, event.event_type, event.data, late))


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _names_a_call(data: Json) -> bool:
    return isinstance(data.get("call_id"), str | None) and isinstance(data.get("turn"), int | None)


@router.get("/events", response_model=list[Event])
async def events(
    rollout_id: RolloutId,
    gateway: GatewayDep,
    event_type: str | None = None,
    form: Annotated[str | None, Query(alias="format")] = None,
) -> Response:
    found = await gateway.store.events(rollout_id, event_type=event_type)
    return answer(triplets(found) if form == "triplet" else found)


@router.get("/calls", response_model=list[Call])
async def calls(rollout_id: RolloutId, gateway: GatewayDep) -> Response:
    return answer(await gateway.store.calls(rollout_id))
