"""The registered engines."""

from fastapi import APIRouter, HTTPException, Response

from harnessrl.gateway.api.wire import GatewayDep, GuardedRoute, answer
from harnessrl.schemas import Endpoint

__all__ = ["router"]

router = APIRouter(prefix="/api/models", route_class=GuardedRoute)


@router.post("", status_code=201, response_model=list[Endpoint])
async def register(endpoints: list[Endpoint], gateway: GatewayDep) -> Response:
    """Add engines; one with the same model and URL is replaced."""
    for endpoint in endpoints:
        if not endpoint.endpoint.startswith(("http://", "https://")):
            raise HTTPException(422, f"The endpoint {endpoint.endpoint!r} is no URL: it has to begin with http://")
    await gateway.store.put_endpoints(endpoints)
    await gateway.proxy.endpoints_changed()
    gateway.proxy.probe()
    return answer(endpoints, 201)


@router.get("", response_model=list[Endpoint])
async def list_endpoints(gateway: GatewayDep) -> Response:
    return answer(await gateway.store.endpoints())


@router.delete("")
async def delete(gateway: GatewayDep) -> Response:
    await gateway.store.delete_endpoints()
    await gateway.proxy.endpoints_changed()
    return answer({"status": "ok"})
