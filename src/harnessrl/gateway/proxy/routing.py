"""Which model a request means, and which agent within the harness sends it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harnessrl.schemas import Endpoint, Json

__all__ = ["Route", "Routing"]

_AGENT_HEADERS = (b"x-agent-name", b"x-claude-code-agent-id")


@dataclass(frozen=True, slots=True)
class Route:
    model: str
    endpoints: list[Endpoint]
    trainable: bool
    agent: str | None = None


class Routing:
    """`policy`, `policy/NAME` and any unknown name mean the policy; helpers are called by their own name."""

    def __init__(self, policy: str | None, agents: Sequence[str] = ()):
        """agents: rules `NAME=REGEX` on the system text, for harnesses that don't name their agents."""
        self._policy = policy
        self._rules = [_rule(rule) for rule in agents]
        self.endpoints: list[Endpoint] = []

    def route(self, name: Any, headers: Mapping[bytes, bytes]) -> Route:
        agent = next((headers[h].decode("latin-1") for h in _AGENT_HEADERS if h in headers), None)
        model = policy = self.policy
        if isinstance(name, str):
            if name.startswith("policy/"):
                agent = name.removeprefix("policy/") or agent
            elif any(endpoint.model == name for endpoint in self.endpoints):
                model = name
        serving = [endpoint for endpoint in self.endpoints if endpoint.model == model]
        trainable = model == policy and all(endpoint.trainable is not False for endpoint in serving)
        return Route(model or "", serving, trainable, agent)

    def agent(self, messages: Sequence[Json]) -> str | None:
        """The agent that the system text tells of, by the first rule that matches."""
        if not self._rules:
            return None
        system = "\n".join(m["content"] for m in messages if m["role"] == "system")
        return next((name for name, pattern in self._rules if pattern.search(system)), None)

    @property
    def policy(self) -> str | None:
        """The configured model, else the first that was registered and may be trained."""
        if self._policy is not None:
            return self._policy
        named = [e.model for e in self.endpoints if e.trainable is not False] or [e.model for e in self.endpoints]
        return named[0] if named else None

    def serving(self, model: str) -> list[Endpoint]:
        return [endpoint for endpoint in self.endpoints if endpoint.model == model]

    @property
    def models(self) -> list[str]:
        """All names that mean something here, the policy's alias first."""
        return list(dict.fromkeys(["policy", *(endpoint.model for endpoint in self.endpoints)]))


def _rule(text: str) -> tuple[str, re.Pattern[str]]:
    name, found, pattern = text.partition("=")
    try:
        if name and found:
            return name, re.compile(pattern)
        raise re.error("no NAME= before it")
    except re.error as error:
        raise ValueError(f"The agent rule {text!r} is not NAME=REGEX: {error}.") from error
