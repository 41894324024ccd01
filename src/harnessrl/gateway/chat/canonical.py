"""The one form that every dialect is translated to and from.

Messages are OpenAI-shaped dictionaries of which only these keys occur: `role` (system, user, assistant, tool),
`content` (always text), and where they apply `reasoning_content`, `tool_calls`, `tool_call_id`, `name`.
"""

from dataclasses import dataclass, field
from typing import Any

from harnessrl.schemas import Json

__all__ = ["Answer", "ChatRequest", "ContextOverflow", "Delta", "RequestError", "Sampling", "ToolCall", "Usage"]


class RequestError(Exception):
    """A request that gets an error answer, in the dialect's own shape.

    `code` is the machine-readable reason; `retry_after` is in seconds.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after = retry_after


class ContextOverflow(RequestError):
    """The prompt leaves no room for an answer; each dialect has words for it that make harnesses compact."""

    def __init__(self, prompt_tokens: int, limit: int):
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, your messages resulted in "
            f"{prompt_tokens} tokens. Please reduce the length of the messages.",
            code="context_length_exceeded",
            param="messages",
        )
        self.prompt_tokens = prompt_tokens
        self.limit = limit


@dataclass(slots=True)
class Sampling:
    """What the harness asked for; None where it said nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)
    """Names of fields that would change the distribution in a way that is never passed on."""


@dataclass(slots=True)
class ChatRequest:
    model: str
    messages: list[Json]
    tools: list[Json]
    """`{"type": "function", "function": {name, description, parameters}}`."""
    sampling: Sampling
    tool_choice: str = "auto"
    """`auto`, `none`, `required`, or the name of the tool that must be called."""
    stream: bool = False
    n: int = 1
    logprobs: bool = False
    grammar: Json | None = None
    """`{"type": "json_object"}` or `{"type": "json_schema", "schema": …}`: what the answer is constrained to."""
    prompt: str | list[int] | None = None
    """Set instead of messages where the harness writes its own prompt (Completions)."""
    prefill: bool = False
    """The last message is the beginning of the answer, not an answer given."""
    template: Json = field(default_factory=dict)
    """Options of the chat template."""
    options: Json = field(default_factory=dict)
    """What only the dialect itself has to know when it answers."""
    notes: list[str] = field(default_factory=list)
    """What of the request was ignored or overridden."""


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """JSON text of an object."""


@dataclass(slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(slots=True)
class Delta:
    """A further piece of an answer: text, reasoning, or whole tool calls."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


@dataclass(slots=True)
class Answer:
    """What the model said, whole."""

    content: str
    reasoning: str
    tool_calls: list[ToolCall]
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    usage: Usage
    stop_sequence: str | None = None
    token_texts: list[str] = field(default_factory=list)
    """Text and log-probability of each sampled token, where the harness asked for them."""
    token_logprobs: list[float] = field(default_factory=list)

    def message(self) -> Json:
        """As a canonical assistant message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.tool_calls
            ]
        return message
