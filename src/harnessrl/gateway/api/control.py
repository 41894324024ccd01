"""The gate of the proxy, whether the gateway is alive, and its metrics."""

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from harnessrl.gateway.api.wire import GatewayDep, GuardedRoute, answer
from harnessrl.schemas import Pause, ProxyState

__all__ = ["router"]

router = APIRouter(route_class=GuardedRoute)


@router.get("/healthz")
async def healthz() -> Response:
    return answer({"status": "ok"})


@router.get("/metrics")
async def metrics(gateway: GatewayDep) -> Response:
    text = gateway.metrics.text(await gateway.store.size_bytes())
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.post("/proxy/pause", response_model=ProxyState)
async def pause(how: Pause, gateway: GatewayDep) -> Response:
    return answer(await gateway.gate.pause(how))


@router.post("/proxy/resume", response_model=ProxyState)
async def resume(gateway: GatewayDep) -> Response:
    return answer(await gateway.gate.resume())


@router.get("/proxy/state", response_model=ProxyState)
async def state(gateway: GatewayDep) -> Response:
    return answer(gateway.gate.state())
