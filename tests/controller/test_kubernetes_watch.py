"""Following the API server when it no longer has what changed, breaks off, or asks for patience."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

pytest.importorskip("kubernetes_asyncio", reason="pip install harnessrl[k8s]")

from harnessrl.controller.kubernetes import KubernetesOptions, KubernetesRunner
from harnessrl.schemas import AttemptEnd

JOBS = "/apis/batch/v1/namespaces/default/jobs"
NOTES = {"harnessrl/rollout-id": "r", "harnessrl/attempt-id": "0", "harnessrl/timeout-seconds": "60"}


def job(version: str, **status: Any) -> dict[str, Any]:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    meta = {"name": "j", "uid": "u", "annotations": NOTES, "creationTimestamp": now, "resourceVersion": version}
    return {"metadata": meta, "spec": {"activeDeadlineSeconds": 100}, "status": status}


COMPLETE = {"conditions": [{"type": "Complete", "status": "True"}]}
GONE = {"type": "ERROR", "object": {"kind": "Status", "code": 410}}


class Server:
    """Answers lists of Jobs with `lists` and watches with `watches`, in turn; the last one stays."""

    def __init__(self, lists: list[Any], watches: list[Any]):
        self.lists, self.watches = lists, watches
        self.versions: list[str] = []
        """From which versions it was watched."""

    async def jobs(self, request: web.Request) -> web.StreamResponse:
        watching = "watch" in request.query
        turns = self.watches if watching else self.lists
        answer = turns.pop(0) if len(turns) > 1 else turns[0]
        if watching:
            self.versions.append(request.query["resourceVersion"])
        if isinstance(answer, int):
            return web.json_response({"message": "no"}, status=answer, headers={"Retry-After": "0"})
        if not watching:
            return web.json_response({"metadata": {"resourceVersion": "7"}, "items": answer})
        response = web.StreamResponse()
        await response.prepare(request)
        for event in answer:
            await response.write(json.dumps(event).encode() + b"\n")
        await asyncio.sleep(60 if answer is turns[0] and not answer else 0)
        return response

    async def pods(self, request: web.Request) -> web.Response:
        if "watch" in request.query:
            await asyncio.sleep(60)
        return web.json_response({"metadata": {"resourceVersion": "7"}, "items": []})


@pytest.fixture
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Server, str]]:
    server = Server(*request.param)
    app = web.Application()
    app.router.add_get(JOBS, server.jobs)
    app.router.add_get("/api/v1/namespaces/default/pods", server.pods)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"}}
    context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
    users = [{"name": "u", "user": {}}]
    file = tmp_path / "kubeconfig"
    file.write_text(
        json.dumps({"clusters": [cluster], "contexts": [context], "users": users, "current-context": "x"})
    )
    yield server, str(file)
    await runner.cleanup()


async def adopted(kubeconfig: str) -> AttemptEnd:
    async with KubernetesRunner(KubernetesOptions("c1", "http://gateway", kubeconfig=kubeconfig)) as runner:
        (attempt,) = await runner.adopt()
        async with asyncio.timeout(15):
            return await attempt.wait()


DONE = job("9", **COMPLETE)
CHANGE = [{"type": "MODIFIED", "object": DONE}]
BOOKMARK = [{"type": "BOOKMARK", "object": job("8")}]
GOING = [job("5")]
CASES: dict[str, tuple[list[Any], list[Any], list[str]]] = {
    "the change comes": ([GOING], [CHANGE], ["7"]),
    "it breaks off": ([GOING], [BOOKMARK, [], CHANGE], ["7", "8", "8"]),
    "410 in the stream": ([GOING, GOING, [DONE]], [[GONE], []], ["7"]),
    "410 as an answer": ([GOING, GOING, [DONE]], [410, []], ["7"]),
    "429 and 503 to a list": ([429, 503, GOING], [CHANGE], ["7"]),
    "503 to a watch": ([GOING, GOING, [DONE]], [503, []], ["7"]),
}
"""Lists (the first when adopting), watches, and from which versions it must have been watched."""


@pytest.mark.parametrize(
    ("server", "versions"), [(c[:2], c[2]) for c in CASES.values()], indirect=["server"], ids=CASES.keys()
)
async def test_the_end_is_learnt(server: tuple[Server, str], versions: list[str]) -> None:
    api, kubeconfig = server
    assert (await adopted(kubeconfig)).ok
    assert api.versions[: len(versions)] == versions


@pytest.mark.parametrize("server", [([GOING, GOING, []], [410, []])], indirect=True)
async def test_a_job_that_vanished_unseen_was_deleted(server: tuple[Server, str]) -> None:
    assert (await adopted(server[1])).error_message == "its Job was deleted"
