"""Training runs, as their trainers report them: for the dashboard, and whoever else watches."""

from typing import Annotated

from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse

from harnessrl.gateway.api.wire import GatewayDep, GuardedRoute, RunId, answer, event_stream
from harnessrl.schemas import Run, RunRecord

__all__ = ["router"]

router = APIRouter(prefix="/api/runs", route_class=GuardedRoute)

After = Annotated[int, Query(ge=0, le=2**62)]


@router.get("", response_model=list[Run])
async def list_runs(gateway: GatewayDep) -> Response:
    runs = await gateway.store.runs()
    for run in runs:
        run.heard_seconds_ago = gateway.silence("trainer", run.run_id)
    return answer(runs)


@router.post("/{run_id}/records", status_code=204)
async def report(run_id: RunId, records: list[RunRecord], gateway: GatewayDep) -> Response:
    """Append to what is known of the run. An empty list says that its trainer is alive."""
    gateway.heard("trainer", run_id)
    if records:
        await gateway.store.add_run_records(run_id, records)
    return Response(status_code=204)


@router.get("/{run_id}/records", response_model=list[RunRecord])
async def records(run_id: RunId, gateway: GatewayDep, after: After = 0) -> Response:
    return answer(await gateway.store.run_records(run_id, after))


@router.get("/{run_id}/stream", response_class=StreamingResponse)
async def stream(run_id: RunId, gateway: GatewayDep, after: After = 0) -> Response:
    """Server-sent events: each `data:` line is a record; first those after `after`, then what comes."""
    return event_stream(gateway.store.follow_run(run_id, after), gateway.ending)
