"""Who may do what: every route with every role."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from gateway_kit import KEY, client_of

from harnessrl.dashboard import router
from harnessrl.gateway.app import Gateway, create_app
from harnessrl.gateway.auth import OPEN, OPEN_ON_LOOPBACK, ROUTES, Auth, Caller, Refused, Role
from harnessrl.gateway.settings import Settings

SCOPED: tuple[Role, ...] = ("agent", "evaluator")
ROLES: tuple[Role, ...] = ("admin", "trainer", "controller", "viewer", *SCOPED)
UNDOCUMENTED = {("GET", path) for path in ("/docs", "/openapi.json", "/", "/static/{file}")}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    """With the dashboard's routes, as `harnessrl gateway` has it."""
    async with create_app(Settings(store=tmp_path / "store.db", key=KEY), [router]) as app:
        yield app


def test_the_table_is_the_routes(gateway: Gateway):
    documented = {(m.upper(), path) for path, item in gateway.api.openapi()["paths"].items() for m in item}
    assert documented | UNDOCUMENTED == set(ROUTES)


@pytest.mark.parametrize("role", ROLES)
async def test_every_route_for_every_role(gateway: Gateway, role: Role):
    async with client_of(gateway) as admin:
        for rollout_id in ("mine", "theirs"):
            await admin.post("/api/rollouts", json=[{"input": 1, "rollout_id": rollout_id}])
            await admin.post(f"/api/rollouts/{rollout_id}/claim", json={"controller": "c"})
    scope = ("mine", "0") if role in SCOPED else ()
    key = KEY if role == "admin" else gateway.auth.token(role, 60, *scope)
    async with client_of(gateway, key) as client:
        for (method, path), roles in ROUTES.items():
            if path.endswith("/stream"):
                continue  # never ends; has its own test
            for rollout_id, attempt_id in (("mine", "0"), ("mine", "1"), ("theirs", "0")):
                url = path.replace("{rollout_id}", rollout_id).replace("{attempt_id}", attempt_id)
                foreign = rollout_id != "mine" or ("{attempt_id}" in path and attempt_id != "0")
                allowed = (
                    roles is OPEN
                    or path in OPEN_ON_LOOPBACK
                    or (role in roles and not (role in SCOPED and foreign and "{" in path))
                )
                if allowed and method in ("PATCH", "DELETE"):
                    url = re.sub("mine|theirs", "unknown", url)
                status = (await client.request(method, url)).status_code
                assert (status != 403) == allowed and status < 500, (method, url, role, status)


async def test_a_key_ends_with_its_attempt(gateway: Gateway):
    async with client_of(gateway) as admin:
        await admin.post("/api/rollouts", json=[{"input": 1, "rollout_id": "r", "config": {"max_attempts": 2}}])
        first = (await admin.post("/api/rollouts/r/claim", json={"controller": "c"})).json()
        await admin.post("/api/rollouts/r/attempt/0/end", json={"ok": False, "failure_kind": "infra"})
        second = (await admin.post("/api/rollouts/r/claim", json={"controller": "c"})).json()
    for claim, status in ((first, 401), (second, 200)):
        async with client_of(gateway, claim["agent_key"]) as agent:
            url = f"/api/rollouts/r/attempt/{claim['attempt_id']}/events"
            assert (await agent.post(url, json={"event_type": "note"})).status_code == status


@pytest.mark.parametrize(
    ("config", "role", "event_type", "status"),
    [
        ({}, "agent", "reward", 200),
        ({}, "agent", "note", 200),
        ({}, "agent", "model_request", 403),
        ({}, "evaluator", "reward", 403),
        ({"reward_from": "evaluator"}, "agent", "reward", 403),
        ({"reward_from": "evaluator"}, "evaluator", "reward", 200),
        ({"local": {"command": ["a"], "evaluate": ["b"]}}, "agent", "reward", 403),
        ({"local": {"command": ["a"], "evaluate": ["b"]}}, "evaluator", "reward", 200),
        ({"reward_from": "evaluator"}, "admin", "reward", 200),
    ],
)
async def test_whose_events_count(gateway: Gateway, config: dict, role: Role, event_type: str, status: int):
    async with client_of(gateway) as admin:
        await admin.post("/api/rollouts", json=[{"input": 1, "rollout_id": "r", "config": config}])
        await admin.post("/api/rollouts/r/claim", json={"controller": "c"})
    key = KEY if role == "admin" else gateway.auth.token(role, 60, "r", "0")
    async with client_of(gateway, key) as client:
        body = {"event_type": event_type, "data": {"value": 1}}
        response = await client.post("/api/rollouts/r/attempt/0/events", json=body)
        assert response.status_code == status


def _refusal(auth: Auth, key: str) -> int | None:
    try:
        auth.authorize(frozenset({"admin", "trainer"}), "/", [(b"x-api-key", key.encode())])
    except Refused as refused:
        return refused.status
    return None


def test_forged_and_expired_tokens_are_refused():
    auth = Auth(KEY)
    good = auth.token("trainer", 60)
    prefix, claims, signature = good.split(".")
    assert _refusal(auth, good) is None
    assert _refusal(Auth("another key"), good) == 401
    assert _refusal(auth, auth.token("trainer", -1)) == 401
    assert _refusal(auth, auth.token("agent", 60, "r", "0")) == 403
    admin_claims = auth.token("admin", 60).split(".")[1]
    for forged in (f"{prefix}.{admin_claims}.{signature}", f"{prefix}.{claims}.", "hrl.x.y", "..", "", "é"):
        assert _refusal(auth, forged) == 401


def test_no_key_opens_everything_and_docs_close_off_loopback():
    assert Auth("").authorize(frozenset({"admin"}), "/", []) == Caller("admin")
    with pytest.raises(Refused):
        Auth(KEY, loopback=False).authorize(frozenset({"admin"}), "/docs", [])
