"""A chat endpoint without a model: it answers as an OpenAI server with `return_token_ids`, at next to no cost.

What it answers is in the base URL that is registered for it: `http://HOST:PORT/PROMPTxSAMPLED/DELAY_MS/v1`.
`PROMPT` is the number of prompt ids it reports; 0 makes them from the messages, one id for four bytes, so that
histories extend each other token by token. With `"stream": true` it sends five tokens a second.
"""

import argparse
import asyncio
import contextlib
import functools
import random
import string
from typing import Any

import numpy as np
import orjson

__all__ = ["serve"]

_SEPARATOR = 7
_STREAM_INTERVAL_SECONDS = 0.2


def token_ids(text: str) -> list[int]:
    """One id for four bytes of text."""
    data = text.encode()
    data += b" " * (-len(data) % 4)
    return (np.frombuffer(data, "<u4") % 150_000 + 10).tolist()


@functools.cache
def _sampled(count: int) -> tuple[str, list[int], list[dict[str, Any]]]:
    rng = random.Random(count)
    words = ["".join(rng.choices(string.ascii_lowercase, k=4)) for _ in range(count)]
    logprobs = [
        {"token": w, "logprob": -round(rng.random() * 3, 9) - 1e-9, "bytes": list(w.encode()), "top_logprobs": []}
        for w in words
    ]
    text = "".join(words)
    return text, token_ids(text), logprobs


def _answer(prompt: list[Any], sampled: int) -> dict[str, Any]:
    text, ids, logprobs = _sampled(sampled)
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text, "refusal": None, "tool_calls": []},
        "logprobs": {"content": logprobs},
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": ids,
    }
    total = len(prompt) + sampled
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "m",
        "choices": [choice],
        "usage": {"prompt_tokens": len(prompt), "total_tokens": total, "completion_tokens": sampled},
        "prompt_token_ids": prompt,
    }


@functools.cache
def _canned(prompt: int, sampled: int) -> tuple[bytes, bytes]:
    """The answer before and after its first prompt id, which differs from call to call."""
    rng = random.Random(prompt)
    ids: list[Any] = ["FIRST", *(rng.randrange(1000, 150_000) for _ in range(prompt - 1))]
    head, tail = orjson.dumps(_answer(ids, sampled)).split(b'"FIRST"')
    return head, tail


def _from_messages(body: bytes, sampled: int) -> bytes:
    prompt: list[int] = []
    for message in orjson.loads(body)["messages"]:
        prompt += token_ids(message["content"])
        prompt += [_SEPARATOR] if message["role"] != "assistant" else []
    return orjson.dumps(_answer(prompt, sampled))


def _http(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


class _Connection(asyncio.Protocol):
    calls = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.received = bytearray()
        self.task: asyncio.Task[None] | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        self.received += data
        end = self.received.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self.received[:end])
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
        if len(self.received) >= end + 4 + length:
            body = bytes(self.received[end + 4 : end + 4 + length])
            del self.received[: end + 4 + length]
            method, path, _ = head.split(b" ", 2)
            if method == b"POST":
                self.answer(path.decode(), body)
            else:
                self.transport.write(_http(b"{}"))

    def answer(self, path: str, body: bytes) -> None:
        _, size, delay, *_ = path.split("/")
        prompt, sampled = (int(n) for n in size.split("x"))
        if b'"stream":true' in body or b'"stream": true' in body:
            self.task = asyncio.ensure_future(self.stream(prompt, sampled))
            return
        _Connection.calls += 1
        if prompt:
            head, tail = _canned(prompt, sampled)
            answer = _http(head + b"%d" % (200_000 + _Connection.calls) + tail)
        else:
            answer = _http(_from_messages(body, sampled))
        if int(delay):
            asyncio.get_running_loop().call_later(int(delay) / 1000, self.transport.write, answer)
        else:
            self.transport.write(answer)

    async def stream(self, prompt: int, sampled: int) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        self.transport.write(head)
        whole = _answer(list(range(prompt)), sampled)
        (choice,) = whole.pop("choices")
        ids = whole.pop("prompt_token_ids")
        whole["object"] = "chat.completion.chunk"
        for n, (token, logprob) in enumerate(zip(choice["token_ids"], choice["logprobs"]["content"], strict=True)):
            part = {
                "index": 0,
                "delta": {"role": "assistant", "content": logprob["token"]},
                "token_ids": [token],
                "logprobs": {"content": [logprob]},
                "finish_reason": "stop" if n == sampled - 1 else None,
            }
            self._chunk(orjson.dumps({**whole, "choices": [part], **({"prompt_token_ids": ids} if n == 0 else {})}))
            await asyncio.sleep(_STREAM_INTERVAL_SECONDS)
        self._chunk(b"[DONE]")
        self.transport.write(b"0\r\n\r\n")

    def _chunk(self, data: bytes) -> None:
        event = b"data: " + data + b"\n\n"
        self.transport.write(b"%x\r\n%s\r\n" % (len(event), event))


async def serve(port: int) -> None:
    """Prints its URL, then answers until it is cancelled."""
    server = await asyncio.get_running_loop().create_server(_Connection, "127.0.0.1", port, backlog=4096)
    print(f"engine ready at http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(parser.parse_args().port))
