"""The page's files, open to anybody, and its data, for those who hold a key.

No file comes from elsewhere and none is built: what is in `static/` is what the browser gets, under a policy that
lets it run nothing else.
"""

import asyncio
import mimetypes
import time
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Response
from prometheus_client.parser import text_string_to_metric_families

from harnessrl import __version__
from harnessrl.config import AlgorithmConfig
from harnessrl.dashboard.trace import Trained, trace
from harnessrl.gateway.api.wire import GatewayDep, GuardedRoute, RolloutId, answer
from harnessrl.gateway.store import NotFound, Store
from harnessrl.gateway.store.browse import Search
from harnessrl.schemas import TERMINAL, Json, Rollout, Run
from harnessrl.trainer.rollout import FinishedRollout, finished_rollout

__all__ = ["router"]

router = APIRouter(route_class=GuardedRoute)

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@cache
def _files() -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in files("harnessrl.dashboard").joinpath("static").iterdir()}


@router.get("/", include_in_schema=False)
async def page() -> Response:
    return _file("index.html")


@router.get("/static/{file}", include_in_schema=False)
async def static(file: str) -> Response:
    return _file(file)


def _file(name: str) -> Response:
    content = _files().get(name)
    if content is None:
        raise HTTPException(404, "No such file")
    return Response(content, media_type=mimetypes.guess_type(name)[0], headers=_HEADERS)


@router.get("/api/dashboard/rollouts")
async def rollouts(gateway: GatewayDep, search: Annotated[Search, Query()]) -> Response:
    return answer(await gateway.store.find(search))


@router.get("/api/dashboard/groups")
async def groups(gateway: GatewayDep, search: Annotated[Search, Query()]) -> Response:
    return answer(await gateway.store.find_groups(search))


@router.get("/api/dashboard/facets")
async def facets(gateway: GatewayDep, run: str | None = None) -> Response:
    return answer(await gateway.store.facets(run))


@router.get("/api/dashboard/rollouts/{rollout_id}")
async def rollout(rollout_id: RolloutId, gateway: GatewayDep, attempt: str | None = None) -> Response:
    """One attempt (by default the last) as the harness saw it and as the trainer takes it."""
    store = gateway.store
    shown = await store.get_rollout(rollout_id)
    last = shown.status.last_attempt_id or "0"
    attempt = attempt or last
    records = await store.call_records(rollout_id, attempt)
    events = await store.events(rollout_id, attempt)
    finished = finished_rollout(
        shown,
        [e for e in events if e.event_type == "reward"],
        await store.calls(rollout_id, attempt),
    )
    run = await _run_of(store, shown)
    tokenizers = {e.model: e.tokenizer or e.model for e in await store.endpoints() if e.kind == "token"}
    trained = Trained(
        finished,
        await _group(store, shown) if attempt == last else None,
        *_settings(run),
    )
    found = await asyncio.to_thread(trace, trained, records, tokenizers)
    return answer(
        {
            "rollout": shown,
            "run_id": run.run_id if run else None,
            "attempts": await store.attempts(rollout_id) or [last],
            "attempt_id": attempt,
            "reward": finished.reward,
            "rewards_by_call": finished.rewards_by_call,
            "failure": finished.error_message if finished.failure_kind and shown.status.state in TERMINAL else None,
            "events": [e for e in events if e.event_type not in ("model_request", "log")],
            "logs": [e for e in events if e.event_type == "log"],
            **found,
        }
    )


async def _run_of(store: Store, rollout: Rollout) -> Run | None:
    group_id = rollout.metadata.group_id or ""
    return next((run for run in await store.runs() if group_id.startswith(f"{run.run_id}-")), None)


def _settings(run: Run | None) -> tuple[AlgorithmConfig, int | None]:
    """How the run compares a group, and the longest row that it takes."""
    config = run.start.get("config", {}) if run else {}
    return AlgorithmConfig.model_validate(config.get("algorithm", {})), config.get("engine", {}).get("max_len")


async def _group(store: Store, rollout: Rollout) -> Sequence[FinishedRollout] | None:
    """The rollouts that it is compared with, itself among them; None while some still run."""
    group_id = rollout.metadata.group_id
    if group_id is None or not rollout.is_train:
        return None
    found = await store.find_groups(Search(group=group_id))
    members = []
    for item in found["items"][0]["rollouts"]:
        if item["state"] not in TERMINAL:
            return None
        rollout_id = item["rollout_id"]
        try:
            events = await store.events(rollout_id, event_type="reward")
            members.append(
                finished_rollout(await store.get_rollout(rollout_id), events, await store.calls(rollout_id))
            )
        except NotFound:  # removed meanwhile
            return None
    return members


@router.get("/api/dashboard/system")
async def system(gateway: GatewayDep) -> Response:
    store, now = gateway.store, time.time()
    counted = await store.counts()
    heard = [
        {"kind": kind, "name": name, "seconds_ago": time.monotonic() - at}
        for (kind, name), at in gateway.last_heard.items()
    ]
    size, endpoints = await store.size_bytes(), await store.endpoints()
    alive = await asyncio.gather(*(gateway.proxy.alive(endpoint.endpoint) for endpoint in endpoints))
    return answer(
        {
            "version": __version__,
            "time": now,
            "endpoints": [
                {**e.model_dump(), "answers": answers} for e, answers in zip(endpoints, alive, strict=True)
            ],
            "heard": heard,
            **counted,
            "gate": {**gateway.gate.state().model_dump(), "held": gateway.gate.held},
            "store": {"path": str(gateway.settings.store), "bytes": size, "backlog": store.backlog()},
            "metrics": _metrics(gateway.metrics.text(size).decode()),
        }
    )


def _metrics(text: str) -> list[Json]:
    """Of a histogram its count and sum."""
    return [
        {
            "name": family.name,
            "help": family.documentation,
            "samples": [
                {
                    "name": sample.name.removeprefix(family.name).lstrip("_"),
                    "labels": sample.labels,
                    "value": sample.value,
                }
                for sample in family.samples
                if not sample.name.endswith(("_created", "_bucket"))
            ],
        }
        for family in text_string_to_metric_families(text)
    ]
