"""The HTTP API beside the proxy: rollouts, events, models and the gate."""

from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, Response

from harnessrl import __version__
from harnessrl.gateway.api import control, events, models, rollouts, runs
from harnessrl.gateway.api.wire import GuardedRoute, answer
from harnessrl.gateway.auth import Refused
from harnessrl.gateway.store import Conflict, NotFound, StoreError

if TYPE_CHECKING:
    from harnessrl.gateway.app import Gateway

__all__ = ["build_api"]


def build_api(gateway: "Gateway") -> FastAPI:
    api = FastAPI(title="HarnessRL gateway", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    api.state.gateway = gateway
    api.router.route_class = GuardedRoute
    for router in (rollouts.router, events.router, models.router, runs.router, control.router, *gateway.routers):
        api.include_router(router)

    @api.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return answer(api.openapi())

    @api.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return get_swagger_ui_html(openapi_url="/openapi.json", title=api.title)

    @api.exception_handler(NotFound)
    async def not_found(_: Request, error: NotFound) -> Response:
        return answer({"detail": str(error)}, 404)

    @api.exception_handler(Conflict)
    async def conflict(_: Request, error: Conflict) -> Response:
        return answer({"detail": str(error)}, 409)

    @api.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        return answer({"detail": error.detail}, error.status)

    @api.exception_handler(StoreError)
    async def not_written(_: Request, error: StoreError) -> Response:
        return answer({"detail": str(error)}, 503)

    @api.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        kept = ("type", "loc", "msg")
        return answer(
            {"detail": [{k: e[k] for k in kept} | {"input": _brief(e.get("input"))} for e in error.errors()]}, 422
        )

    return api


def _brief(value: object) -> object:
    """What was wrong, if it is short: a body is not sent back whole."""
    return value if value is None or isinstance(value, bool | int | float) else str(value)[:200]
