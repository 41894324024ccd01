"""Rollouts: what the trainer creates, controllers run, and both follow."""

from typing import Annotated

from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from harnessrl.gateway.api.wire import AttemptId, GatewayDep, GuardedRoute, RolloutId, answer, event_stream
from harnessrl.schemas import (
    AttemptEnd,
    Claim,
    ClaimRequest,
    LeaseRenewal,
    LeaseState,
    NewRollout,
    Rollout,
    RolloutDetail,
    State,
    StatusPatch,
    TerminalPage,
)

__all__ = ["router"]

router = APIRouter(prefix="/api", route_class=GuardedRoute)

_MOST = 100_000
_LARGEST = 2**62
_TOKEN_GRACE_SECONDS = 86_400
"""A key outlives its attempt's timeout by this, which leaves room for held calls; the end voids it anyway."""

Limit = Annotated[int, Query(ge=1, le=_MOST)]
After = Annotated[int, Query(ge=0, le=_LARGEST)]


class RolloutPatch(BaseModel):
    status: StatusPatch = StatusPatch()


class Consumed(BaseModel):
    rollout_ids: list[str]


@router.post("/rollouts", status_code=201, response_model=list[Rollout])
async def create(new: list[NewRollout], gateway: GatewayDep) -> Response:
    return answer(await gateway.store.create_rollouts(new), 201)


@router.get("/rollouts", response_model=list[Rollout])
async def list_rollouts(
    gateway: GatewayDep, state_in: Annotated[list[State], Query()], limit: Limit = 500
) -> Response:
    return Response(await gateway.store.list_rollouts(state_in, limit), media_type="application/json")


@router.get("/rollouts/terminal", response_model=TerminalPage)
async def terminal(gateway: GatewayDep, after: After = 0, limit: Limit = 1000) -> Response:
    return answer(await gateway.store.terminal(after, limit))


@router.get("/rollouts/stream", response_class=StreamingResponse)
async def stream(gateway: GatewayDep, after: Annotated[int | None, Query(ge=0, le=_LARGEST)] = None) -> Response:
    """Server-sent events: each `data:` line is `[cursor, rollout_id, state]`; with `after`, first those since."""
    return event_stream(gateway.store.changes(after), gateway.ending)


@router.post("/rollouts/consumed", status_code=204)
async def consumed(body: Consumed, gateway: GatewayDep) -> Response:
    """The trainer is done with these rollouts: retention may remove them."""
    await gateway.store.mark_consumed(body.rollout_ids)
    return Response(status_code=204)


@router.get("/rollouts/{rollout_id}", response_model=RolloutDetail)
async def get(rollout_id: RolloutId, gateway: GatewayDep) -> Response:
    store = gateway.store
    return answer({"rollout": await store.get_rollout(rollout_id), "attempts": await store.attempts(rollout_id)})


@router.patch("/rollouts/{rollout_id}", response_model=Rollout)
async def patch(rollout_id: RolloutId, body: RolloutPatch, gateway: GatewayDep) -> Response:
    return answer(await gateway.store.patch_status(rollout_id, body.status))


@router.delete("/rollouts/{rollout_id}", status_code=204)
async def delete(rollout_id: RolloutId, gateway: GatewayDep) -> Response:
    await gateway.store.delete_rollout(rollout_id)
    return Response(status_code=204)


@router.post("/rollouts/{rollout_id}/claim", response_model=Claim)
async def claim(rollout_id: RolloutId, body: ClaimRequest, gateway: GatewayDep) -> Response:
    rollout, attempt_id = await gateway.store.claim(rollout_id, body.controller, body.lease_seconds)
    gateway.heard("controller", body.controller)
    config = rollout.config
    lasts = config.timeout_seconds + _TOKEN_GRACE_SECONDS
    token = gateway.auth.token
    return answer(
        Claim(
            rollout=rollout,
            attempt_id=attempt_id,
            agent_key=token("agent", lasts, rollout_id, attempt_id),
            evaluator_key=token("evaluator", lasts, rollout_id, attempt_id) if config.evaluated else None,
        )
    )


@router.post("/rollouts/{rollout_id}/attempt/{attempt_id}/end", response_model=Rollout)
async def end(rollout_id: RolloutId, attempt_id: AttemptId, body: AttemptEnd, gateway: GatewayDep) -> Response:
    return answer(await gateway.store.end_attempt(rollout_id, attempt_id, body))


@router.post("/leases", response_model=LeaseState)
async def leases(body: LeaseRenewal, gateway: GatewayDep) -> Response:
    gateway.heard("controller", body.controller)
    return answer(await gateway.store.renew(body.controller, body.rollout_ids, body.lease_seconds))
