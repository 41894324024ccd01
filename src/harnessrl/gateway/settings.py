"""What a gateway is started with; each field is an option of `harnessrl gateway`."""

from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

__all__ = ["Settings"]


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

    @property
    def loopback(self) -> bool:
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
