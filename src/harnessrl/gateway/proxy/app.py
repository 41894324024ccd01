"""The model proxy: a plain ASGI application for the paths under /proxy/rollout/.

Invariant: a call's record is durable before the end of its answer is sent. It says delivered only if the client is
still there then, and no longer when the client turns out to have left before the last byte; a later request that
contains the answer settles it.
"""

import re
import time
import uuid
from typing import Any, cast

from harnessrl.gateway.auth import PROXY, Auth, Refused
from harnessrl.gateway.body import read_json
from harnessrl.gateway.chat.canonical import RequestError
from harnessrl.gateway.dialects import Dialect
from harnessrl.gateway.dialects.registry import FAMILIES, ROUTES
from harnessrl.gateway.metrics import Metrics
from harnessrl.gateway.proxy.attempts import Attempt, Attempts
from harnessrl.gateway.proxy.chat_calls import ChatCall
from harnessrl.gateway.proxy.context import Context, Services
from harnessrl.gateway.proxy.engine import EngineFailed, Engines
from harnessrl.gateway.proxy.exchange import ClientGone, Exchange
from harnessrl.gateway.proxy.gate import Gate, Paused
from harnessrl.gateway.proxy.probe import Probe
from harnessrl.gateway.proxy.routing import Route, Routing
from harnessrl.gateway.proxy.token_calls import TokenCall, count_tokens
from harnessrl.gateway.settings import Settings
from harnessrl.gateway.store import Conflict, NotFound, Store, UnderWay
from harnessrl.schemas import Json, Mode, Pause

__all__ = ["ProxyApp"]

_PATH = re.compile(r"/proxy/rollout/([^/]+)/attempt/([^/]+)/mode/(train|val)/(openai|anthropic)(?:/v1)?/?(.*)")


class ProxyApp:
    def __init__(self, store: Store, settings: Settings, auth: Auth, gate: Gate, metrics: Metrics):
        self._store = store
        self._settings = settings
        self._auth = auth
        self._gate = gate
        self._engines = Engines(
            settings.connect_seconds, settings.read_seconds, settings.health_seconds, gate.look_again
        )
        self._routing = Routing(settings.model, settings.agent)
        self._probe = Probe(self._engines, gate)
        self._services = Services(store, settings, gate, self._engines, self._routing, metrics)
        self._attempts = Attempts(store)
        self._calls = 0

    async def start(self) -> None:
        """Called once, in the event loop, before the first request."""
        await self._engines.start()
        await self.endpoints_changed()
        self._attempts.start()

    async def close(self) -> None:
        self._probe.close()
        await self._attempts.close()
        await self._engines.close()

    def busy(self) -> list[str]:
        """The attempts with calls under way, as ROLLOUT/ATTEMPT."""
        return self._attempts.busy()

    async def alive(self, endpoint: str) -> bool:
        """Whether an engine answers its probe."""
        return await self._engines.alive(endpoint)

    async def endpoints_changed(self) -> None:
        """The registered engines are others now; returns when calls go by the new list."""
        self._routing.endpoints = await self._store.endpoints()
        self._engines.forget()
        self._probe.registered(self._routing.endpoints)
        self._gate.look_again()

    def probe(self) -> None:
        """Ask the policy's engines, beside all else, what their log-probabilities mean."""
        policy = self._routing.route(None, {})
        if policy.trainable:
            self._probe.ask(policy.endpoints)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send)
        dialect = FAMILIES["openai"]
        try:
            match = _PATH.fullmatch(scope["path"])
            if match is None:
                raise RequestError("No such path", 404)
            rollout_id, attempt_id, mode, family, tail = match.groups()
            dialect = FAMILIES[family]
            await self._admit(scope, rollout_id, attempt_id)
            found = ROUTES.get((family, tail))
            if found is None or scope["method"] != "POST":
                await self._other(exchange, dialect, tail, scope, rollout_id, attempt_id)
                return
            dialect = found
            attempt = self._attempts.get(rollout_id, attempt_id)
            context = Context(attempt, cast(Mode, mode), uuid.uuid4().hex, time.time(), time.perf_counter())
            await self._serve(exchange, context, dialect)
        except ClientGone:
            return
        except Paused as paused:
            await _say_paused(exchange, dialect, paused)
        except RequestError as error:
            await _refuse(exchange, dialect, error)
        finally:
            exchange.close()

    async def _admit(self, scope: Any, rollout_id: str, attempt_id: str) -> None:
        try:
            caller = self._auth.authorize(PROXY, scope["path"], scope["headers"])
            caller.check_scope(rollout_id, attempt_id)
            access = await self._store.access(rollout_id)
            caller.check_open(access)
        except Refused as refused:
            raise RequestError(refused.detail, refused.status, "invalid_api_key") from refused
        except NotFound as error:
            raise RequestError(f"No rollout {rollout_id}", 404) from error
        if not access.open(attempt_id):
            raise _ended(attempt_id)

    async def _other(
        self, exchange: Exchange, dialect: Dialect, tail: str, scope: Any, rollout_id: str, attempt_id: str
    ) -> None:
        """What is asked besides answers: models, the base URL, counts of tokens, WebSockets."""
        method, models = scope["method"], self._routing.models
        if exchange.headers.get(b"upgrade", b"").lower() == b"websocket":
            raise RequestError("WebSockets are not spoken here: use HTTP", 426)
        if method in ("GET", "HEAD") and tail in ("", "models"):
            await exchange.answer_json(200, dialect.models(models) if tail else {"status": "ok"})
        elif method in ("GET", "HEAD") and tail.removeprefix("models/") in models:
            (listed,) = dialect.models([tail.removeprefix("models/")])["data"]
            await exchange.answer_json(200, listed)
        elif method == "POST" and tail == "messages/count_tokens" and dialect.name == "anthropic_messages":
            body = await _object(await exchange.body(self._settings.max_body_bytes))
            route = self._routing.route(body.get("model"), exchange.headers)
            memory = self._attempts.get(rollout_id, attempt_id).memory
            count = await count_tokens(self._services, dialect, route, memory, body)
            await exchange.answer_json(200, {"input_tokens": count})
        else:
            raise RequestError(f"No such path: {method} {tail}", 404)

    async def _serve(self, exchange: Exchange, context: Context, dialect: Dialect) -> None:
        raw = await exchange.body(self._settings.max_body_bytes)
        attempt = context.attempt
        self._check_load(attempt)
        attempt.calls += 1
        self._calls += 1
        names = context.call_id, attempt.rollout_id, attempt.attempt_id
        call = UnderWay(*names, context.mode, dialect.name, context.started_at)
        try:
            with self._attempts.under_way(call):
                await self._call(exchange, context, dialect, raw)
        except Conflict as error:
            raise _ended(attempt.attempt_id) from error
        finally:
            self._calls -= 1
            attempt.calls -= 1

    def _check_load(self, attempt: Attempt) -> None:
        settings = self._settings
        if self._calls >= settings.max_calls or attempt.calls >= settings.max_calls_per_rollout:
            raise RequestError("Too many calls at once", 429, "too_many_calls", retry_after=1)

    async def _call(self, exchange: Exchange, context: Context, dialect: Dialect, raw: bytearray) -> None:
        body: Json | RequestError
        context.size = len(raw)
        try:
            body = await _object(raw)
        except RequestError as error:  # said after the pause, as in v1.0
            body = error
        if isinstance(body, dict) and body.get("stream") is True:
            exchange.keep_alive(self._settings.keepalive_seconds)
        if isinstance(body, RequestError):
            await exchange.run(context.pass_gate(self._services, lambda: True))
            raise body

        def route() -> Route:
            return self._routing.route(body.get("model"), exchange.headers)

        try:
            await exchange.run(
                context.pass_gate(self._services, lambda: self._services.reachable(route().endpoints))
            )
        except EngineFailed as error:
            raise RequestError("no model server", 503, "no_model_server", retry_after=5) from error
        found = route()
        if context.mode == "train" and found.trainable and self._settings.train_temperature != 1:
            await self._probe.check(found.endpoints)
        kind = TokenCall if found.endpoints[0].kind == "token" else ChatCall
        await kind(self._services, context, dialect, exchange, found, body).serve()


async def _object(raw: bytearray) -> Json:
    try:
        body = await read_json(raw)
    except ValueError as error:
        raise RequestError(f"Invalid JSON in request body: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("The request body must be a JSON object")
    return body


def _ended(attempt_id: str) -> RequestError:
    return RequestError(f"Attempt {attempt_id} of this rollout has ended", 409, "attempt_ended")


async def _say_paused(exchange: Exchange, dialect: Dialect, paused: Paused) -> None:
    """As v1.0 does, whatever the dialect."""
    pause = paused.pause or Pause()
    if exchange.started:
        await exchange.end(dialect.error_event(RequestError("gateway paused", 429, "paused")))
        return
    headers = [(b"retry-after", b"%g" % pause.retry_after_seconds), (b"x-agl-paused", b"true")]
    await exchange.answer_json(429, {"error": "gateway paused", "reason": pause.reason}, headers)


async def _refuse(exchange: Exchange, dialect: Dialect, error: RequestError) -> None:
    if exchange.started:
        await exchange.end(dialect.error_event(error))
        return
    headers = [] if error.retry_after is None else [(b"retry-after", b"%g" % error.retry_after)]
    await exchange.answer_json(error.status, dialect.error(error), headers)
