"""Wire APIs, one a file: each translates requests, answers, streams and errors to and from the canonical form."""

from collections.abc import Iterator
from typing import Protocol

from harnessrl.gateway.chat.canonical import Answer, ChatRequest, Delta, RequestError
from harnessrl.schemas import Json

__all__ = ["AnswerStream", "Dialect"]


class AnswerStream(Protocol):
    """The events of one streamed answer, as bytes to send."""

    def start(self) -> bytes: ...

    def delta(self, delta: Delta, index: int = 0) -> bytes:
        """`index` is that of the answer, where several were asked for."""
        ...

    def end(self, answers: list[Answer]) -> Iterator[bytes]: ...


class Dialect(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def chat_path(self) -> str | None:
        """Where chat endpoints speak this dialect themselves, after their base URL; None: nowhere."""
        ...

    def parse(self, body: Json) -> ChatRequest:
        """Raises `RequestError` for whatever the dialect does not allow."""
        ...

    def whole(self, request: ChatRequest, answers: list[Answer], call_id: str, model: str) -> Json: ...

    def stream(self, request: ChatRequest, call_id: str, model: str, prompt_tokens: int) -> AnswerStream: ...

    def models(self, names: list[str]) -> Json:
        """The list of models."""
        ...

    def error(self, error: RequestError) -> Json: ...

    def error_event(self, error: RequestError) -> bytes:
        """The same within a stream that has begun."""
        ...
