"""The Kubernetes runner: each attempt is a Job.

Invariant: the cluster holds all that is known about an attempt (labels and annotations of its Job), so that a
successor of the same name adopts it; what the API server says is taken from a list and a watch that goes on
from there, and read anew when the server no longer has the changes in between (410).
"""

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes_asyncio import client, config

from harnessrl.controller.environment import StartError
from harnessrl.controller.jobs import (
    ATTEMPT_ANNOTATION,
    CLAIM_ANNOTATION,
    CONTROLLER_LABEL,
    ROLLOUT_ANNOTATION,
    TIMEOUT_ANNOTATION,
    JobOptions,
    Seen,
    begun,
    has_ended,
    manifest,
    secret,
    started_at,
    timed_out,
    verdict,
)
from harnessrl.controller.logs import shortened
from harnessrl.controller.reconcile import StopReason
from harnessrl.schemas import AttemptEnd, Claim, Json, Rollout

log = logging.getLogger(__name__)

_LOST = (aiohttp.ClientError, asyncio.TimeoutError, OSError)
_WATCH_SECONDS = 240
_LOG_LINES = 2000
_GONE_SECONDS = 120


@dataclass(frozen=True)
class KubernetesOptions:
    name: str
    """Of this controller: a label value, the same after a restart, different from other controllers'."""
    agent_url: str
    """The gateway as pods reach it."""
    namespace: str = "default"
    kubeconfig: str | None = None
    """Default: the service account within a cluster, else `~/.kube/config`."""
    requests_at_once: int = 16
    creations_per_second: float = 20
    keep_failed: bool = False
    """Leave failed Jobs to the cluster's own clean-up (`ttlSecondsAfterFinished`)."""
    jobs: JobOptions = JobOptions()


class KubernetesAttempt:
    def __init__(self, runner: "KubernetesRunner", name: str, seen: Seen):
        assert seen.job is not None
        notes = seen.job["metadata"]["annotations"]
        self.rollout_id: str = notes[ROLLOUT_ANNOTATION]
        self.attempt_id: str = notes[ATTEMPT_ANNOTATION]
        self.held_seconds = 0.0
        self.job, self.seen = name, seen
        self.changed = asyncio.Event()
        self._runner = runner
        self._timeout = float(notes[TIMEOUT_ANNOTATION])
        self._stopped: StopReason | None = None
        self._log: str | None = None
        self._away_before = runner.away_seconds()

    def deadline(self) -> float:
        since = started_at(self.seen)
        return (time.time() if since is None else since) + self._timeout + self.held_seconds

    def stop(self, reason: StopReason, at_once: bool = False) -> None:
        self._stopped = self._stopped or reason
        self.changed.set()

    async def wait(self) -> AttemptEnd:
        wake = min(self._runner.options.jobs.pending_seconds, 30)  # the pending time ends without an event
        while not (end := self._stop_verdict() or await self._verdict()):
            self.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wake):
                    await self.changed.wait()
        self._log = await self._runner.read_log(self.seen)
        if self._stopped or not (end.ok or has_ended(self.seen)):
            await self._runner.delete_job(self.job)
            await self._gone()
        return end

    async def _gone(self) -> None:
        """Until the Job is deleted, and with it its pod; a node that does not answer can keep both for ever."""
        try:
            async with asyncio.timeout(_GONE_SECONDS):
                while self.seen.job is not None:
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            log.warning("Job %s is still not gone: the cluster has to see to it", self.job)

    async def _verdict(self) -> AttemptEnd | None:
        """The time that the API server is away does not count as pending: ask it, before saying that it is over."""
        end = verdict(self.seen, self._pending_seconds())
        if end is None or end.ok or has_ended(self.seen) or started_at(self.seen):
            return end
        await self._runner.look_again(self)
        return verdict(self.seen, self._pending_seconds())

    def _pending_seconds(self) -> float:
        return self._runner.options.jobs.pending_seconds + self._runner.away_seconds() - self._away_before

    def _stop_verdict(self) -> AttemptEnd | None:
        if self._stopped is None:
            return None
        if self._stopped == "timeout":
            return timed_out(self.seen, self._timeout)
        return AttemptEnd(ok=False, error_message="the Job was stopped", failure_kind="infra")

    async def output(self, limit: int) -> Json | None:
        if not self._log:
            return None
        return {"text": shortened(BytesIO(self._log.encode()), limit), "job": self.job}


RIGHTS = {
    ("batch", "jobs", ""): ("create", "get", "list", "watch", "delete"),
    ("", "pods", ""): ("list", "watch"),
    ("", "pods", "log"): ("get",),
    ("", "secrets", ""): ("create",),
}
"""What a controller does in its namespace: API group, resource and subresource, with the verbs."""


@contextlib.contextmanager
def _configured() -> Iterator[None]:
    """ValueError where no cluster is configured."""
    try:
        yield
    except config.ConfigException as error:
        raise ValueError(f"no Kubernetes cluster is configured ({_brief(error)}): set KUBECONFIG") from None


async def _connect(kubeconfig: str | None) -> client.ApiClient:
    settings = client.Configuration()
    with _configured():
        if kubeconfig or not os.environ.get("KUBERNETES_SERVICE_HOST"):
            await config.load_kube_config(kubeconfig, client_configuration=settings)
        else:
            config.load_incluster_config(client_configuration=settings)
    return client.ApiClient(settings)


def current_namespace(kubeconfig: str | None = None) -> str:
    """The kubeconfig's, or `default`; ValueError if there is no kubeconfig."""
    if not kubeconfig and os.environ.get("KUBERNETES_SERVICE_HOST"):
        return Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace").read_text()
    with _configured():
        _, active = config.list_kube_config_contexts(kubeconfig)
    return (active or {}).get("context", {}).get("namespace") or "default"


async def missing_rights(namespace: str, kubeconfig: str | None = None) -> list[str]:
    """Which of `RIGHTS` the cluster denies us, such as `create secrets`; ValueError if it can't be asked."""
    missing = []
    try:
        async with await _connect(kubeconfig) as api:
            authorization = client.AuthorizationV1Api(api)
            for (group, resource, subresource), verbs in RIGHTS.items():
                for verb in verbs:
                    asked = {"namespace": namespace, "verb": verb, "group": group}
                    asked |= {"resource": resource, "subresource": subresource}
                    review: Any = {"spec": {"resourceAttributes": asked}}
                    answer = await authorization.create_self_subject_access_review(review, _request_timeout=10)
                    if not answer.status.allowed:
                        missing.append(f"{verb} {resource}{'/' if subresource else ''}{subresource}")
    except (*_LOST, client.ApiException) as error:
        raise ValueError(f"no Kubernetes cluster answers ({_brief(error)}): see `kubectl config view`") from None
    return missing


def _brief(error: BaseException) -> str:
    said = _message(error) if isinstance(error, client.ApiException) else str(error)
    return " ".join(said.split()) or type(error).__name__


class KubernetesRunner:
    """Use as an asynchronous context manager."""

    outlives_controller = True

    def __init__(self, options: KubernetesOptions):
        self.name, self.options = options.name, options
        self._attempts: dict[str, KubernetesAttempt] = {}
        """By Job name."""
        self._selector = f"{CONTROLLER_LABEL}={options.name}"
        self._requests = asyncio.Semaphore(options.requests_at_once)
        self._next_creation = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._away = 0.0
        self._away_since: float | None = None

    def away_seconds(self) -> float:
        """How long the API server has not answered, in all."""
        return self._away + (time.monotonic() - self._away_since if self._away_since else 0)

    def _answered(self, yes: bool, asked_at: float) -> None:
        if not yes:
            self._away_since = self._away_since or asked_at
        else:
            self._away, self._away_since = self.away_seconds(), None

    async def __aenter__(self) -> "KubernetesRunner":
        self._api = await _connect(self.options.kubeconfig)
        self._batch, self._core = client.BatchV1Api(self._api), client.CoreV1Api(self._api)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._api.close()

    def accepts(self, rollout: Rollout) -> bool:
        return rollout.config.k8s is not None

    def heartbeat(self) -> None:
        """A Job needs none: its own deadline ends it where no controller does."""

    async def start(self, claim: Claim) -> KubernetesAttempt:
        wanted = manifest(claim, self.name, self.options.agent_url, self.options.jobs)
        name = wanted["metadata"]["name"]
        await self._pace_creation()
        attempt = self._attempts[name] = KubernetesAttempt(self, name, Seen(wanted))  # its events may come first
        try:
            job = await self._create_job(wanted)
            if "uid" not in (attempt.seen.job or job)["metadata"]:
                attempt.seen.job = job
            await self._create(self._core.create_namespaced_secret, secret(claim, self.name, job))
        except client.ApiException as error:
            del self._attempts[name]
            await self.delete_job(name)
            raise StartError(f"the API server refused the Job: {_message(error)}") from error
        return attempt

    async def adopt(self) -> list[KubernetesAttempt]:
        """Also begins to follow the cluster."""
        jobs = await self._list(self._batch.list_namespaced_job)
        for job in jobs.values():
            if not job["metadata"].get("deletionTimestamp"):
                name = job["metadata"]["name"]
                self._attempts[name] = KubernetesAttempt(self, name, Seen(job))
        pods = await self._list(self._core.list_namespaced_pod)
        for pod in pods.values():
            self._see_pod("ADDED", pod)
        self._tasks = [
            asyncio.create_task(self._follow(self._batch.list_namespaced_job, self._see_job, jobs)),
            asyncio.create_task(self._follow(self._core.list_namespaced_pod, self._see_pod, pods)),
        ]
        return list(self._attempts.values())

    async def forget(self, attempt: KubernetesAttempt, ok: bool) -> None:
        self._attempts.pop(attempt.job, None)
        if ok or not self.options.keep_failed:
            await self.delete_job(attempt.job)

    async def sweep(self) -> int:
        """Delete all Jobs of this controller, whatever their state; how many there were."""
        jobs = await self._list(self._batch.list_namespaced_job)
        names = [job["metadata"]["name"] for job in jobs.values()]
        await asyncio.gather(*(self.delete_job(name) for name in names))
        return len(names)

    async def delete_job(self, name: str) -> None:
        """With its pod and Secret; gone already is fine."""
        body = client.V1DeleteOptions(propagation_policy="Foreground")
        try:
            await self._json(self._batch.delete_namespaced_job, name, self.options.namespace, body=body)
        except client.ApiException as error:
            if error.status != 404:
                raise

    async def look_again(self, attempt: KubernetesAttempt) -> None:
        """Read its pods anew, however long that takes."""
        which = f"job-name={attempt.job}"
        pods = await self._json(self._core.list_namespaced_pod, self.options.namespace, label_selector=which)
        for pod in pods["items"]:
            self._see_pod("MODIFIED", pod)

    async def read_log(self, seen: Seen) -> str | None:
        """The last lines of the containers that have run, if there are any."""
        texts = []
        for container in begun(seen.pod or {}):
            assert seen.pod is not None
            where = (seen.pod["metadata"]["name"], self.options.namespace)
            # The pod or its node may be gone, and its log with it; a node that is away may never answer.
            with contextlib.suppress(client.ApiException, TimeoutError):
                async with asyncio.timeout(_GONE_SECONDS):
                    text = await self._text(
                        self._core.read_namespaced_pod_log, *where, container=container, tail_lines=_LOG_LINES
                    )
                    texts.append(text.decode(errors="replace"))
        return "".join(texts) or None

    # ------------------------------------------------------------------------ following the cluster

    def _see_job(self, kind: str, job: Json) -> None:
        attempt = self._attempts.get(job["metadata"]["name"])
        if attempt is None or attempt.seen.job is None:
            return
        known, heard = attempt.seen.job["metadata"], job["metadata"]
        if heard["annotations"].get(CLAIM_ANNOTATION) == known["annotations"].get(CLAIM_ANNOTATION):
            attempt.seen.job = None if kind == "DELETED" else job
            attempt.changed.set()

    def _see_pod(self, kind: str, pod: Json) -> None:
        meta = pod["metadata"]
        attempt = self._attempts.get((meta.get("labels") or {}).get("job-name", ""))
        if attempt is None:
            return
        seen = attempt.seen
        if seen.pod is None or seen.pod["metadata"]["uid"] == meta["uid"]:
            seen.pod = pod  # a second pod is none of ours: the first one's end is the attempt's
        if kind == "DELETED":
            seen.gone_pods.add(meta["uid"])
        attempt.changed.set()

    async def _follow(
        self, read: Callable[..., Any], see: Callable[[str, Json], None], known: dict[str, Json]
    ) -> None:
        """List, then watch from there; list again when that is no longer possible. `known`: by uid."""
        while True:
            try:
                listed = await self._json(read, self.options.namespace, label_selector=self._selector)
                now = {item["metadata"]["uid"]: item for item in listed["items"]}
                for uid in known.keys() - now.keys():
                    see("DELETED", known[uid])
                for item in now.values():
                    see("MODIFIED", item)
                known = now
                version = listed["metadata"]["resourceVersion"]
                while version:
                    version = await self._watch(read, version, known, see)
                    await asyncio.sleep(0.05)
            except client.ApiException as error:
                log.warning("the API server refuses the watch: %s", _message(error))
            await asyncio.sleep(1)

    async def _list(self, read: Callable[..., Any]) -> dict[str, Json]:
        """What there is of this controller's, by uid."""
        listed = await self._json(read, self.options.namespace, label_selector=self._selector)
        return {item["metadata"]["uid"]: item for item in listed["items"]}

    async def _watch(
        self, read: Callable[..., Any], version: str, known: dict[str, Json], see: Callable[[str, Json], None]
    ) -> str | None:
        """Changes since `version`, as long as the server sends them; the version to go on from, or None."""
        try:
            async for event in self._events(read, version):
                item = event["object"]
                if event["type"] == "ERROR":
                    return None
                version = item["metadata"]["resourceVersion"]
                if event["type"] == "BOOKMARK":
                    continue
                known.pop(item["metadata"]["uid"], None)
                if event["type"] != "DELETED":
                    known[item["metadata"]["uid"]] = item
                see(event["type"], item)
        except _LOST as error:
            self._answered(False, time.monotonic())
            log.warning("watch of the API server broke off: %s", error or type(error).__name__)
            await asyncio.sleep(1)
        except client.ApiException as error:
            if error.status != 410:
                raise
            return None
        return version

    async def _events(self, read: Callable[..., Any], version: str) -> AsyncIterator[Json]:
        response = await read(
            self.options.namespace,
            label_selector=self._selector,
            watch=True,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=_WATCH_SECONDS,
            _preload_content=False,
            _request_timeout=_WATCH_SECONDS + 30,
        )
        async with response:
            if response.status != 200:
                raise client.ApiException(status=response.status, reason=response.reason)
            rest = b""
            async for data in response.content.iter_any():
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    yield json.loads(line)

    # ---------------------------------------------------------------------------------- requests

    async def _pace_creation(self) -> None:
        now = time.monotonic()
        self._next_creation = max(self._next_creation, now) + 1 / self.options.creations_per_second
        await asyncio.sleep(self._next_creation - 1 / self.options.creations_per_second - now)

    async def _create_job(self, wanted: Json) -> Json:
        """A Job of that name may be there: made by a try whose answer was lost, or left of a deleted rollout."""
        name = wanted["metadata"]["name"]
        while True:
            job = await self._create(self._batch.create_namespaced_job, wanted)
            if job is not None:
                return job
            try:
                there = await self._json(self._batch.read_namespaced_job, name, self.options.namespace)
            except client.ApiException as error:
                if error.status != 404:
                    raise
                continue
            notes = there["metadata"].get("annotations") or {}
            if notes.get(CLAIM_ANNOTATION) == wanted["metadata"]["annotations"][CLAIM_ANNOTATION]:
                return there
            await self.delete_job(name)
            await asyncio.sleep(0.2)

    async def _create(self, create: Callable[..., Any], body: Json) -> Json | None:
        """None if it is there already."""
        try:
            return await self._json(create, self.options.namespace, body)
        except client.ApiException as error:
            if error.status != 409:
                raise
            return None

    async def _json(self, call: Callable[..., Any], *arguments: Any, **more: Any) -> Json:
        return json.loads(await self._text(call, *arguments, **more))

    async def _text(self, call: Callable[..., Any], *arguments: Any, **more: Any) -> bytes:
        """A request's answer; when the server is away or asks for patience, it is sent again."""
        pause = 0.5
        while True:
            asked_at, wanted = time.monotonic(), 0.0
            try:
                async with self._requests:
                    response = await call(*arguments, **more, _preload_content=False, _request_timeout=60)
                    async with response:
                        body: bytes = await response.read()
                self._answered(response.status < 500, asked_at)
                if response.status < 400:
                    return body
                error = client.ApiException(status=response.status, reason=response.reason)
                error.body = body
                if response.status != 429 and response.status < 500:
                    raise error
                why, wanted = _message(error), float(response.headers.get("Retry-After") or 0)
            except _LOST as lost:
                self._answered(False, asked_at)
                why = str(lost) or type(lost).__name__
            log.warning("the API server: %s; trying again", why)
            await asyncio.sleep(max(pause, wanted))
            pause = min(pause * 2, 15)


def _message(error: client.ApiException) -> str:
    try:
        return json.loads(error.body or "")["message"]
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"
