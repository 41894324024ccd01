"""All dialects, and the paths at which they are spoken."""

from harnessrl.gateway.dialects import Dialect
from harnessrl.gateway.dialects.anthropic_messages import AnthropicMessages
from harnessrl.gateway.dialects.openai_chat import OpenAIChat
from harnessrl.gateway.dialects.openai_completions import OpenAICompletions
from harnessrl.gateway.dialects.openai_responses import OpenAIResponses

__all__ = ["BY_NAME", "FAMILIES", "ROUTES"]

ROUTES: dict[tuple[str, str], Dialect] = {
    ("openai", "chat/completions"): OpenAIChat(),
    ("openai", "completions"): OpenAICompletions(),
    ("openai", "responses"): OpenAIResponses(),
    ("anthropic", "messages"): AnthropicMessages(),
}
"""By family and the path after the base URL."""

FAMILIES: dict[str, Dialect] = {
    "openai": ROUTES["openai", "chat/completions"],
    "anthropic": ROUTES["anthropic", "messages"],
}
"""Whose shapes a family's other paths are answered in."""

BY_NAME: dict[str, Dialect] = {dialect.name: dialect for dialect in ROUTES.values()}
