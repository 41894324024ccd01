"""The typed client of the gateway's API: each route once, as a `Request`, sent by either client.

gateway = Client(url, key)
rollout, = gateway(create_rollouts([NewRollout(input={"question": "1+1?"})]))

async with AsyncClient(url, key) as gateway:
    detail = await gateway(get_rollout(rollout.rollout_id))
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar
from urllib.parse import quote

import httpx
import numpy as np
from pydantic import BaseModel, TypeAdapter

from harnessrl.schemas import (
    AttemptEnd,
    Call,
    Change,
    Claim,
    ClaimRequest,
    Endpoint,
    Event,
    LeaseRenewal,
    LeaseState,
    NewEvent,
    NewRollout,
    Pause,
    ProxyState,
    Rollout,
    RolloutDetail,
    Run,
    RunRecord,
    State,
    StatusPatch,
    TerminalPage,
)

T = TypeVar("T")


class GatewayError(Exception):
    """The gateway refused a request; `status` is the HTTP status, the message is the gateway's."""

    def __init__(self, status: int, detail: str):
        super().__init__(detail)
        self.status = status


@dataclass(frozen=True)
class Request(Generic[T]):
    method: str
    path: str
    parse: Callable[[bytes], T]
    body: Any = None
    params: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        content = None if self.body is None else _json(self.body)
        return {
            "method": self.method,
            "url": self.path,
            "content": content,
            "params": self.params,
            "headers": {"content-type": "application/json"} if content else {},
        }


def _json(body: Any) -> bytes:
    return TypeAdapter(type(body)).dump_json(body) if isinstance(body, BaseModel) else _ANY.dump_json(body)


_ANY = TypeAdapter(Any)


def _as(kind: type[T]) -> Callable[[bytes], T]:
    return TypeAdapter(kind).validate_json


def _id(rollout_id: str) -> str:
    return quote(rollout_id, safe="")


def _nothing(_: bytes) -> None:
    return None


def create_rollouts(rollouts: Iterable[NewRollout]) -> Request[list[Rollout]]:
    return Request("POST", "/api/rollouts", _as(list[Rollout]), list(rollouts))


def list_rollouts(*states: State, limit: int = 500) -> Request[list[Rollout]]:
    return Request("GET", "/api/rollouts", _as(list[Rollout]), params={"state_in": states, "limit": limit})


def terminal_rollouts(after: int = 0, limit: int = 1000) -> Request[TerminalPage]:
    return Request("GET", "/api/rollouts/terminal", _as(TerminalPage), params={"after": after, "limit": limit})


def get_rollout(rollout_id: str) -> Request[RolloutDetail]:
    return Request("GET", f"/api/rollouts/{_id(rollout_id)}", _as(RolloutDetail))


def patch_rollout(rollout_id: str, status: StatusPatch) -> Request[Rollout]:
    changed = {"status": status.model_dump(exclude_unset=True)}
    return Request("PATCH", f"/api/rollouts/{_id(rollout_id)}", _as(Rollout), changed)


def delete_rollout(rollout_id: str) -> Request[None]:
    return Request("DELETE", f"/api/rollouts/{_id(rollout_id)}", _nothing)


def mark_consumed(rollout_ids: Iterable[str]) -> Request[None]:
    """They are trained on, and a checkpoint holds what came of it: retention may remove them."""
    return Request("POST", "/api/rollouts/consumed", _nothing, {"rollout_ids": list(rollout_ids)})


def claim_rollout(rollout_id: str, claim: ClaimRequest) -> Request[Claim]:
    """Take a queuing rollout (409 if another controller was first)."""
    return Request("POST", f"/api/rollouts/{_id(rollout_id)}/claim", _as(Claim), claim)


def end_attempt(rollout_id: str, attempt_id: str, end: AttemptEnd) -> Request[Rollout]:
    path = f"/api/rollouts/{_id(rollout_id)}/attempt/{_id(attempt_id)}/end"
    return Request("POST", path, _as(Rollout), end)


def renew_leases(renewal: LeaseRenewal) -> Request[LeaseState]:
    return Request("POST", "/api/leases", _as(LeaseState), renewal)


def post_event(rollout_id: str, attempt_id: str, event: NewEvent) -> Request[Event]:
    path = f"/api/rollouts/{_id(rollout_id)}/attempt/{_id(attempt_id)}/events"
    return Request("POST", path, _as(Event), event)


def get_events(rollout_id: str, event_type: str | None = None, format: str | None = None) -> Request[list[Event]]:
    params = {k: v for k, v in (("event_type", event_type), ("format", format)) if v is not None}
    return Request("GET", f"/api/rollouts/{_id(rollout_id)}/events", _as(list[Event]), params=params)


def get_calls(rollout_id: str) -> Request[list[Call]]:
    """The calls of the rollout's last attempt, in the order of their start."""
    return Request("GET", f"/api/rollouts/{_id(rollout_id)}/calls", _as(list[Call]))


def register_endpoints(endpoints: Iterable[Endpoint]) -> Request[list[Endpoint]]:
    return Request("POST", "/api/models", _as(list[Endpoint]), list(endpoints))


def list_endpoints() -> Request[list[Endpoint]]:
    return Request("GET", "/api/models", _as(list[Endpoint]))


def delete_endpoints() -> Request[None]:
    return Request("DELETE", "/api/models", _nothing)


def pause(how: Pause) -> Request[ProxyState]:
    return Request("POST", "/proxy/pause", _as(ProxyState), how)


def resume() -> Request[ProxyState]:
    return Request("POST", "/proxy/resume", _as(ProxyState))


def proxy_state() -> Request[ProxyState]:
    return Request("GET", "/proxy/state", _as(ProxyState))


def report_run(run_id: str, records: Iterable[RunRecord]) -> Request[None]:
    """For those who watch the run. No records: the trainer is alive."""
    return Request("POST", f"/api/runs/{_id(run_id)}/records", _nothing, list(records))


def list_runs() -> Request[list[Run]]:
    return Request("GET", "/api/runs", _as(list[Run]))


def run_records(run_id: str, after: int = 0) -> Request[list[RunRecord]]:
    return Request("GET", f"/api/runs/{_id(run_id)}/records", _as(list[RunRecord]), params={"after": after})


def full_prompts(calls: Iterable[Call]) -> dict[str, np.ndarray]:
    """Prompt ids of each call (int32, by call id), put together from the stored differences."""
    contexts: dict[str, np.ndarray] = {}
    prompts: dict[str, np.ndarray] = {}
    for call in calls:
        new = np.asarray(call.new_prompt_ids, dtype=np.int32)
        prompt = np.concatenate([contexts[call.parent][: call.shared], new]) if call.parent else new
        prompts[call.call_id] = prompt
        contexts[call.call_id] = np.concatenate([prompt, np.asarray(call.sampled_ids, dtype=np.int32)])
    return prompts


def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    try:
        detail = response.json()["detail"]
    except (ValueError, KeyError, TypeError):
        detail = response.text or response.reason_phrase
    raise GatewayError(response.status_code, detail if isinstance(detail, str) else str(detail))


def _auth(key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


class Client:
    """Blocking client. Raises `GatewayError` for refusals and httpx's errors for lost connections."""

    def __init__(self, url: str, key: str | None = None, timeout: float = 60):
        self._http = httpx.Client(base_url=url, headers=_auth(key), timeout=timeout)

    def __call__(self, request: Request[T]) -> T:
        response = self._http.request(**request.arguments())
        _check(response)
        return request.parse(response.content)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()


RETRY_SECONDS = 0.5


class AsyncClient:
    """Asynchronous client; otherwise as `Client`. `transport`: another way to the gateway than the network.

    `patience`: seconds for which a request is sent again while the gateway is lost. Only for callers whose requests
    may take effect twice.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        timeout: float = 60,
        transport: httpx.AsyncBaseTransport | None = None,
        patience: float = 0,
    ):
        self._patience = patience
        self._http = httpx.AsyncClient(base_url=url, headers=_auth(key), timeout=timeout, transport=transport)

    async def __call__(self, request: Request[T]) -> T:
        deadline = time.monotonic() + self._patience
        while True:
            try:
                response = await self._http.request(**request.arguments())
            except httpx.TransportError:
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(RETRY_SECONDS)
            else:
                _check(response)
                return request.parse(response.content)

    async def rollout_changes(
        self, after: int | None = None, connected: asyncio.Event | None = None
    ) -> AsyncIterator[tuple[int, str, Change]]:
        """(cursor, rollout id, new state or `deleted`) as they happen; ends when the connection does.

        With `after`, first those since that cursor; without, only new ones: those after `connected` is set.
        """
        params = {} if after is None else {"after": after}
        async with self._http.stream("GET", "/api/rollouts/stream", params=params, timeout=None) as response:
            if not response.is_success:
                await response.aread()
            _check(response)
            if connected is not None:
                connected.set()
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    cursor, rollout_id, state = _CHANGE.validate_json(line[5:])
                    yield cursor, rollout_id, state

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()


_CHANGE = TypeAdapter(tuple[int, str, Change])
