"""A token endpoint that plays back given texts: what the gateway's tests sample from.

It speaks the wire of `POST /inference/v1/generate`, streams a token at a time, and logs each request.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web

from harnessrl.gateway.chat.tokenizer import Tokenizer
from harnessrl.schemas import Endpoint

Reply = str | Sequence[int]


class ScriptedEngine:
    """`reply(body)` gives the text or ids of an answer; without an end-of-turn token in it one is sampled last.

    Entered again after its exit, it is back at the same address.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        reply: Callable[[dict[str, Any]], Reply] | Sequence[Reply],
        end: str | None = "<|im_end|>",
        delay: float = 0.0,
        max_model_len: int = 8192,
    ):
        self.tokenizer = tokenizer
        self.requests: list[dict[str, Any]] = []
        self.sampled: list[list[int]] = []
        """Of each request, the ids that went out."""
        self.aborted = 0
        self.delay = delay
        self.fail: Callable[[int], str | None] = lambda _: None
        """What goes wrong with the n-th request: 500, 429, die (in mid-answer), abort, short, nan, html."""
        self.scaled = False
        """Whether log-probabilities know of the temperature."""
        self.max_model_len = max_model_len
        replies = list(reply) if not callable(reply) else []
        self._reply = reply if callable(reply) else lambda _: replies.pop(0)
        self._end = [] if end is None else [tokenizer.convert_tokens_to_ids(end)]
        self._runner: web.AppRunner | None = None
        self.url = ""
        self._port = 0

    async def __aenter__(self) -> "ScriptedEngine":
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def endpoint(self, tokenizer: str, model: str = "policy-model", version: int = 0, **more: Any) -> Endpoint:
        more.setdefault("renderer", {"name": "chatml"})
        return Endpoint(model=model, endpoint=self.url, version=version, kind="token", tokenizer=tokenizer, **more)

    def ids(self, reply: Reply) -> list[int]:
        if not isinstance(reply, str):
            return list(reply)
        return [*self.tokenizer.encode(reply), *self._end]

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "policy-model", "max_model_len": self.max_model_len}]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        fault = self.fail(len(self.requests) - 1)
        if fault in ("500", "429"):
            return web.json_response({"error": "scripted"}, status=int(fault), headers={"retry-after": "0.05"})
        if fault == "html":
            return web.Response(text="<html>oops</html>", content_type="text/html")
        params = body["sampling_params"]
        ids = self.ids(self._reply(body))
        log: list[int] = []
        self.sampled.append(log)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            for position, token in enumerate(ids[: params["max_tokens"]]):
                if self.delay:
                    await asyncio.sleep(self.delay)
                if fault in ("die", "abort") and position == 2:
                    if fault == "abort":
                        await self._send(response, [], "abort", params)
                        return response
                    assert request.transport is not None
                    request.transport.close()
                    return response
                last = position == len(ids) - 1
                cut = position == params["max_tokens"] - 1
                log.append(token)
                await self._send(response, [token], "stop" if last else "length" if cut else None, params, fault)
        except (asyncio.CancelledError, ConnectionResetError):
            self.aborted += 1
            raise
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _send(
        self,
        response: web.StreamResponse,
        ids: list[int],
        finish_reason: str | None,
        params: dict[str, Any],
        fault: str | None = None,
    ) -> None:
        choice: dict[str, Any] = {"index": 0, "token_ids": ids, "finish_reason": finish_reason}
        if "logprobs" in params:
            scale = params["temperature"] if self.scaled else 1.0
            values = [float("nan") if fault == "nan" else (-0.25 - 0.001 * (i % 100)) / scale for i in ids]
            entries = [{"token": str(i), "logprob": v} for i, v in zip(ids, values, strict=True)]
            choice["logprobs"] = {"content": [] if fault == "short" else entries}
        chunk = json.dumps({"request_id": "r", "choices": [choice]})
        await response.write(f"data: {chunk}\n\n".encode())
