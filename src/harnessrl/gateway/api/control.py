"""The gate of the proxy, and whether the gateway is alive."""

from fastapi import APIRouter, Response

from harnessrl.gateway.api.wire import GatewayDep, GuardedRoute, answer
from harnessrl.schemas import Pause, ProxyState

__all__ = ["router"]

router = APIRouter(route_class=GuardedRoute)


@router.get("/healthz")
async def healthz() -> Response:
    return answer({"status": "ok"})


@router.post("/proxy/pause", response_model=ProxyState)
async def pause(how: Pause, gateway: GatewayDep) -> Response:
    return answer(await gateway.gate.pause(how))


@router.post("/proxy/resume", response_model=ProxyState)
async def resume(gateway: GatewayDep) -> Response:
    return answer(await gateway.gate.resume())


@router.get("/proxy/state", response_model=ProxyState)
async def state(gateway: GatewayDep) -> Response:
    return answer(gateway.gate.state())
