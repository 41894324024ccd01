"""What a gateway is started with; each field is an option of `harnessrl gateway`."""

from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

__all__ = ["Settings", "is_loopback"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    store: Path
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    key: str = ""
    """The admin key; empty means that everybody may do everything (loopback only)."""
    model: str | None = None
    """Name of the policy; None: that of the only registered model."""
    hold_seconds: float = 600
    """How long a request waits while the proxy is paused before it is answered 429; 0 as in v1.0: at once."""
    max_body_bytes: int = 16 << 20
    drain_seconds: float = 30
    """How long SIGTERM waits for calls in flight."""
    keep_days: float | None = None
    """Consumed rollouts that ended longer ago are removed."""
    keep_bytes: int | None = None
    """The oldest consumed rollouts are removed while the store is larger."""
    log_level: str = "info"
    """`debug` shows each call."""

    agent: tuple[str, ...] = ()
    """Rules NAME=REGEX: whose system text matches is the agent of that name."""
    train_temperature: float = 1.0
    """Temperature of training calls, whatever the harness asks for."""
    val_temperature: float | None = None
    """Temperature of evaluation calls; None: as the harness asks."""
    accept_rendered: bool = False
    """Train through renderers that can't continue a conversation token by token (`continuity: rendered`)."""
    connect_seconds: float = 5
    """How long a connection to an engine may take."""
    read_seconds: float = 1800
    """How long an engine may say nothing, as long as it answers its probes."""
    health_seconds: float = 2
    """Time between probes of an engine in use; two failed ones end its calls."""
    keepalive_seconds: float = 15
    """Silence after which a streamed answer gets a comment, so that nobody on the way hangs up."""
    max_calls: int = 10_000
    """Calls at once in all; more are answered 429."""
    max_calls_per_rollout: int = 256

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
