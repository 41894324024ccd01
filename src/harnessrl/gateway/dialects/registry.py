"""All dialects, and the paths at which they are spoken."""

from harnessrl.gateway.dialects import Dialect
from harnessrl.gateway.dialects.openai_chat import OpenAIChat

__all__ = ["BY_NAME", "FAMILIES", "ROUTES"]

_OPENAI = OpenAIChat()

ROUTES: dict[tuple[str, str], Dialect] = {
    ("openai", "chat/completions"): _OPENAI,
}
"""By family and the path after the base URL."""

FAMILIES: dict[str, Dialect] = {"openai": _OPENAI}
"""Whose error shape a family's unknown paths are answered in."""

BY_NAME: dict[str, Dialect] = {dialect.name: dialect for dialect in ROUTES.values()}
