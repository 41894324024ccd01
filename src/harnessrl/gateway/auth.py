"""Who may do what: one table of routes and roles, an admin key, and signed tokens that name a role.

A token for an agent or an evaluation names its rollout and attempt too, and is void when that attempt ends
(invariant 13). A viewer reads everything and changes nothing. Nothing secret is stored: tokens are signed with a
key derived from the admin key.
"""

import hmac
import secrets
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import orjson

from harnessrl.gateway.store import Access

__all__ = ["OPEN", "PROXY", "ROUTES", "VIEW_SECONDS", "Auth", "Caller", "Refused", "Role"]

Role = Literal["admin", "trainer", "controller", "evaluator", "agent", "viewer"]

Roles = frozenset[str]
_ALL: Roles = frozenset(get_args(Role))
_ADMIN: Roles = frozenset({"admin"})
_TRAINER = _ADMIN | {"trainer"}
_CONTROLLER = _ADMIN | {"controller"}
_BOTH = _TRAINER | _CONTROLLER
_VIEW = frozenset({"viewer"})

OPEN: Roles = frozenset({"anybody"})
PROXY: Roles = _ADMIN | {"agent"}
"""Who may call the model at `/proxy/rollout/…`."""

ROUTES: dict[tuple[str, str], Roles] = {
    ("GET", "/healthz"): OPEN,
    ("GET", "/docs"): _ADMIN,
    ("GET", "/openapi.json"): _ADMIN,
    ("GET", "/metrics"): _BOTH | _VIEW,
    ("POST", "/api/rollouts"): _TRAINER,
    ("GET", "/api/rollouts"): _BOTH | _VIEW,
    ("GET", "/api/rollouts/terminal"): _BOTH | _VIEW,
    ("GET", "/api/rollouts/stream"): _BOTH | _VIEW,
    ("POST", "/api/rollouts/consumed"): _TRAINER,
    ("GET", "/api/rollouts/{rollout_id}"): _BOTH | _VIEW | {"evaluator"},
    ("PATCH", "/api/rollouts/{rollout_id}"): _CONTROLLER,
    ("DELETE", "/api/rollouts/{rollout_id}"): _TRAINER,
    ("POST", "/api/rollouts/{rollout_id}/claim"): _CONTROLLER,
    ("POST", "/api/rollouts/{rollout_id}/attempt/{attempt_id}/end"): _CONTROLLER,
    ("POST", "/api/leases"): _CONTROLLER,
    ("POST", "/api/rollouts/{rollout_id}/attempt/{attempt_id}/events"): _CONTROLLER | {"evaluator", "agent"},
    ("GET", "/api/rollouts/{rollout_id}/events"): _TRAINER | _VIEW | {"evaluator"},
    ("GET", "/api/rollouts/{rollout_id}/calls"): _TRAINER | _VIEW | {"evaluator"},
    ("POST", "/api/models"): _TRAINER,
    ("GET", "/api/models"): _BOTH | _VIEW,
    ("DELETE", "/api/models"): _TRAINER,
    ("POST", "/proxy/pause"): _TRAINER,
    ("POST", "/proxy/resume"): _TRAINER,
    ("GET", "/proxy/state"): _BOTH | _VIEW,
    ("POST", "/api/runs/{run_id}/records"): _TRAINER,
    ("GET", "/api/runs"): _BOTH | _VIEW,
    ("GET", "/api/runs/{run_id}/records"): _BOTH | _VIEW,
    ("GET", "/api/runs/{run_id}/stream"): _BOTH | _VIEW,
    ("GET", "/"): OPEN,
    ("GET", "/static/{file}"): OPEN,
    ("GET", "/api/dashboard/rollouts"): _TRAINER | _VIEW,
    ("GET", "/api/dashboard/groups"): _TRAINER | _VIEW,
    ("GET", "/api/dashboard/facets"): _TRAINER | _VIEW,
    ("GET", "/api/dashboard/rollouts/{rollout_id}"): _TRAINER | _VIEW,
    ("GET", "/api/dashboard/system"): _TRAINER | _VIEW,
}

VIEW_SECONDS = 30 * 86_400
"""How long the key in a printed address of the dashboard is valid."""
OPEN_ON_LOOPBACK = frozenset({"/docs", "/openapi.json", "/metrics"})
RESERVED_EVENTS = frozenset({"model_request"})
"""What the gateway records itself: an agent can't forge it."""


class Refused(Exception):
    """The caller may not do this; `status` is 401 (no valid key), 403 or 409 (the attempt has ended)."""

    def __init__(self, status: int, detail: str):
        super().__init__(detail)
        self.status = status
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Caller:
    role: Role
    rollout_id: str | None = None
    """The only rollout and attempt that this caller may touch; None: any."""
    attempt_id: str | None = None

    def check_scope(self, rollout_id: str | None, attempt_id: str | None) -> None:
        """Raises `Refused` where the path names something that is not this caller's."""
        if self.rollout_id is None:
            return
        if rollout_id != self.rollout_id or attempt_id not in (None, self.attempt_id):
            raise Refused(403, "This key belongs to another rollout or attempt")

    def check_open(self, access: Access) -> None:
        """Raises `Refused` if this caller's attempt has ended, which voids its key."""
        if self.attempt_id is not None and not access.open(self.attempt_id):
            raise Refused(401, "This key is void: its attempt has ended")

    def check_event(self, event_type: str, access: Access) -> None:
        """Raises `Refused` for events that are not this caller's to post."""
        if self.role == "admin":
            return
        if event_type in RESERVED_EVENTS:
            raise Refused(403, f"{event_type} events are recorded by the gateway")
        if event_type == "reward" and self.role != access.reward_from:
            raise Refused(403, f"The reward of this rollout comes from its {access.reward_from}")


class Auth:
    def __init__(self, key: str, loopback: bool = True):
        self._key = key.encode()
        self._loopback = loopback
        self._signing = hmac.digest(self._key, b"harnessrl tokens", "sha256") if key else secrets.token_bytes(32)

    def token(
        self,
        role: Role,
        expires_in: float,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
    ) -> str:
        """A signed key for `role`, valid for `expires_in` seconds, perhaps for one attempt only."""
        claims = orjson.dumps([role, rollout_id, attempt_id, int(time.time() + expires_in)])
        return f"hrl.{_encode(claims)}.{_encode(self._sign(claims))}"

    def authorize(self, roles: Roles, path: str, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
        """The caller of a route that `roles` may use; raises `Refused`.

        headers: as in an ASGI scope, names in lower case.
        """
        if roles is OPEN or not self._key or (self._loopback and path in OPEN_ON_LOOPBACK):
            return Caller("admin")
        caller = self._identify(headers)
        if caller.role not in roles:
            raise Refused(403, f"The role {caller.role} may not do this")
        return caller

    def _identify(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
        for name, value in headers:
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                key = value[7:].strip()
            elif name == b"x-api-key":
                key = value.strip()
            else:
                continue
            if hmac.compare_digest(key, self._key):
                return Caller("admin")
            if (caller := self._verify(key)) is not None:
                return caller
        raise Refused(401, "Invalid or missing API key")

    def _verify(self, key: bytes) -> Caller | None:
        try:
            prefix, claims, signature = key.split(b".")
            payload = _decode(claims)
            if prefix != b"hrl" or not hmac.compare_digest(_decode(signature), self._sign(payload)):
                return None
        except ValueError:
            return None
        role, rollout_id, attempt_id, expires = orjson.loads(payload)
        if expires < time.time():
            raise Refused(401, "This key has expired")
        return Caller(role, rollout_id, attempt_id)

    def _sign(self, claims: bytes) -> bytes:
        return hmac.digest(self._signing, claims, "sha256")


def _encode(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: bytes) -> bytes:
    return urlsafe_b64decode(text + b"=" * (-len(text) % 4))
