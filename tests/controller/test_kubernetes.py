"""The Kubernetes runner against a real API server: the test cluster beside the checkout, or `KUBECONFIG`'s."""

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest
from processes import KEY, Gateway, Process, until

from harnessrl.client import create_rollouts, delete_rollout, get_events
from harnessrl.schemas import KubernetesRun, NewRollout, Rollout, RolloutConfig

pytest.importorskip("kubernetes_asyncio", reason="pip install harnessrl[k8s]")
import yaml  # noqa: E402
from kubernetes_asyncio import client, config, utils  # noqa: E402

pytestmark = pytest.mark.slow
T = TypeVar("T")
CLUSTER = Path(__file__).parents[3] / "shared" / "kube" / "cluster.py"
DEPLOY = Path(__file__).parents[2] / "deploy"
LOCAL = not os.environ.get("KUBECONFIG")
"""The test cluster runs pods as processes of this machine, so that its pods have this machine's Python."""
PYTHON = sys.executable if LOCAL else "python3"
IMAGE = "python:3.12-slim"
REWARD = """
import json, os, urllib.request as u
body = json.dumps({"event_type": "reward", "data": {"value": 1.0}}).encode()
head = {"content-type": "application/json", "authorization": "Bearer " + os.environ["AGL_KEY"]}
u.urlopen(u.Request(os.environ["AGL_EVENT_URL"], body, head)).read()
"""


@pytest.fixture(scope="module")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not LOCAL:
        yield os.environ["KUBECONFIG"]
        return
    if not CLUSTER.exists():
        pytest.skip(f"no test cluster ({CLUSTER} is not there) and no KUBECONFIG")
    folder = tmp_path_factory.mktemp("kube")
    environment = {**os.environ, "KUBE_NODE_FAIL_IMAGES": "missing:1"}
    command = [sys.executable, str(CLUSTER)]
    up = subprocess.run([*command, "up", str(folder)], capture_output=True, text=True, env=environment)
    assert up.returncode == 0, up.stdout + up.stderr
    yield up.stdout.splitlines()[-1].partition("=")[2]
    subprocess.run([*command, "down", str(folder)], check=True, capture_output=True)


class Cluster:
    """A namespace of its own, and controllers for it."""

    def __init__(self, kubeconfig: str, gateway: Gateway, folder: Path):
        self.kubeconfig, self.gateway, self.folder = kubeconfig, gateway, folder
        self.namespace = f"test-{uuid.uuid4().hex[:8]}"
        namespace = client.V1Namespace(metadata=client.V1ObjectMeta(name=self.namespace))
        self.call(lambda core, _: core.create_namespace(namespace))

    def call(self, do: Callable[[client.CoreV1Api, client.BatchV1Api], Awaitable[T]]) -> T:
        async def once() -> T:
            settings = client.Configuration()
            await config.load_kube_config(self.kubeconfig, client_configuration=settings)
            async with client.ApiClient(settings) as api:
                return await do(client.CoreV1Api(api), client.BatchV1Api(api))

        return asyncio.run(once())

    def as_deployed(self) -> str:
        """Apply `deploy/`'s objects, its Role in this namespace; a kubeconfig of the controller."""
        account = self.call(self._deploy)
        view = yaml.safe_load(Path(self.kubeconfig).read_text())
        view["users"] = [{"name": "controller", "user": {"token": account}}]
        for context in view["contexts"]:
            context["context"]["user"] = "controller"
        file = self.folder / "controller.kubeconfig"
        file.write_text(yaml.safe_dump(view))
        return str(file)

    async def _deploy(self, core: client.CoreV1Api, batch: client.BatchV1Api) -> str:
        for file in DEPLOY.glob("*.yaml"):
            for item in yaml.safe_load_all(file.read_text()):
                if item["kind"] == "Kustomization":
                    continue
                if item["kind"] in ("Role", "RoleBinding", "NetworkPolicy"):
                    item["metadata"]["namespace"] = self.namespace
                await utils.create_from_dict(batch.api_client, item)  # type: ignore[attr-defined]
        for _ in range(100):
            for found in (await core.list_namespaced_secret("harnessrl")).items:
                notes = found.metadata.annotations or {}
                if notes.get("kubernetes.io/service-account.name") == "controller" and found.data:
                    return base64.b64decode(found.data["token"]).decode()
            await asyncio.sleep(0.1)
        raise AssertionError("no token")

    def options(self) -> tuple[str, ...]:
        where = ("--runner", "kubernetes", "--kubeconfig", self.kubeconfig, "--namespace", self.namespace)
        pace = ("--name", "tester", "--pending-seconds", "4", "--grace-seconds", "1", "--lease-seconds", "15")
        return ("controller", "--gateway", self.gateway.url, "--key", KEY, "--concurrency", "30", *where, *pace)

    def start(self) -> Process:
        return Process(self.folder / f"{time.monotonic_ns()}.log", *self.options(), cwd=self.folder)

    def left(self) -> list[str]:
        """Names of what is there of the controller's."""

        async def read(core: client.CoreV1Api, batch: client.BatchV1Api) -> list[str]:
            mine: dict[str, Any] = {"label_selector": "harnessrl/controller=tester"}
            lists = [
                await batch.list_namespaced_job(self.namespace, **mine),
                await core.list_namespaced_pod(self.namespace, **mine),
                await core.list_namespaced_secret(self.namespace, **mine),
            ]
            return [item.metadata.name for listed in lists for item in listed.items]

        return self.call(read)

    def pods_running(self) -> int:
        async def read(core: client.CoreV1Api, _: client.BatchV1Api) -> int:
            mine = await core.list_namespaced_pod(self.namespace, label_selector="harnessrl/controller=tester")
            return sum(pod.status.phase == "Running" for pod in mine.items)

        return self.call(read)

    def post(self, run: KubernetesRun, task: Any = None, n: int = 1, **options: Any) -> list[Rollout]:
        options = {"timeout_seconds": 60, **options}
        new = NewRollout(input=task or {}, config=RolloutConfig(k8s=run, **options))
        return self.gateway.ask(create_rollouts([new] * n))

    def sleepers(self, seconds: float, n: int = 1) -> list[Rollout]:
        return self.post(python(f"import time; time.sleep({seconds})\n{REWARD}"), n=n)


def python(script: str) -> KubernetesRun:
    return KubernetesRun(image=IMAGE, command=[PYTHON, "-c", script])


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    gateway = Gateway(tmp_path_factory.mktemp("gateway"))
    yield gateway
    gateway.process.kill()


@pytest.fixture(scope="module")
def cluster(kubeconfig: str, gateway: Gateway, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(kubeconfig, gateway, tmp_path_factory.mktemp("controllers"))


@pytest.fixture
def controller(cluster: Cluster) -> Iterator[Process]:
    with ExitStack() as stack:
        process = cluster.start()
        stack.callback(lambda: process.popen.poll() is None and process.end())
        yield process


def test_a_command_runs_and_leaves_nothing(cluster: Cluster, controller: Process, gateway: Gateway) -> None:
    script = REWARD + "import sys; print(sys.argv[1])"
    run = KubernetesRun(image=IMAGE, command=[PYTHON, "-c", script, "{{ input.q }}"])
    (rollout,) = cluster.post(run, {"q": "$$x$$ $(HOME) 'x'"})
    status = gateway.ended(rollout).status
    assert status.state == "succeeded", status.error_message
    assert status.k8s_job_name == f"agl-rollout-{rollout.rollout_id}"
    assert gateway.ask(get_events(rollout.rollout_id, "log"))[0].data["text"] == "$$x$$ $(HOME) 'x'\n"
    until(lambda: not cluster.left())


def test_an_evaluation_rewards_what_the_agent_left(cluster: Cluster, controller: Process, gateway: Gateway) -> None:
    """Set-up, agent and evaluation, one after the other in one folder; the agent's own reward does not count."""
    folder = cluster.folder / uuid.uuid4().hex
    folder.mkdir()
    agent = """
import urllib.error
try:
    exec(open("reward").read())
except urllib.error.HTTPError as error:
    open("refused", "w").write(str(error))
"""
    run = KubernetesRun(
        image=IMAGE,
        cwd=str(folder) if LOCAL else None,
        setup=[PYTHON, "-c", f"open('reward', 'w').write({REWARD!r}); print('set up')"],
        command=[PYTHON, "-c", agent],
        evaluate=[PYTHON, "-c", f"print(open('refused').read())\n{REWARD}"],
    )
    (rollout,) = cluster.post(run)
    status = gateway.ended(rollout).status
    assert status.state == "succeeded", status.error_message
    (reward,) = gateway.ask(get_events(rollout.rollout_id, "reward"))
    assert reward.data == {"value": 1.0}
    assert gateway.ask(get_events(rollout.rollout_id, "log"))[0].data["text"].startswith("set up\nHTTP Error 403")
    (failing,) = cluster.post(run.model_copy(update={"command": [PYTHON, "-c", "raise SystemExit(3)"]}))
    assert "container agent exited with code 3" in (gateway.ended(failing).status.error_message or "")
    assert not gateway.ask(get_events(failing.rollout_id, "reward"))
    (slow,) = cluster.post(run.model_copy(update={"evaluate": ["sleep", "60"]}), timeout_seconds=2)
    status = gateway.ended(slow).status
    assert (status.failure_kind, status.error_message) == ("infra", "the Job timed out after 2 s (evaluate)")
    until(lambda: not cluster.left())


TEMPLATE = """
apiVersion: batch/v1
kind: Job
metadata: {name: "{{ job_name }}"}
spec:
  template:
    spec:
      restartPolicy: OnFailure
      containers:
      - name: agent
        image: IMAGE
        command: [PYTHON, -c, "{{ input.script | yaml_escape }}"]
"""


def test_a_job_template_of_v1(cluster: Cluster, controller: Process, gateway: Gateway) -> None:
    template = TEMPLATE.replace("IMAGE", IMAGE).replace("PYTHON", PYTHON)
    (rollout,) = cluster.post(KubernetesRun(job_template=template), {"script": REWARD})
    assert gateway.ended(rollout).status.state == "succeeded"
    evaluated = KubernetesRun(job_template=template, evaluate=[PYTHON, "-c", REWARD])
    (rollout,) = cluster.post(evaluated, {"script": "print('worked')"})
    assert gateway.ended(rollout).status.state == "succeeded"
    assert gateway.ask(get_events(rollout.rollout_id, "log"))[0].data["text"].startswith("worked")


def test_a_wrong_kubeconfig_is_told_in_a_sentence(gateway: Gateway, tmp_path: Path) -> None:
    arguments = ("controller", "--gateway", gateway.url, "--key", KEY, "--runner", "kubernetes")
    with pytest.raises(AssertionError, match="\nerror: no Kubernetes cluster is configured"):
        Process(tmp_path / "log", *arguments, "--kubeconfig", str(tmp_path / "none"), cwd=tmp_path)


ODD = "{kind: Job, metadata: {labels: [a]}, spec: {template: {spec: {containers: [{name: a}]}}}}"


def test_reasons_are_told_apart(cluster: Cluster, controller: Process, gateway: Gateway) -> None:
    cases = [
        (python("raise SystemExit(3)"), "exited with code 3", "infra"),
        (python("import os; os.abort()"), "killed by SIGABRT", "infra"),
        (KubernetesRun(image=IMAGE, command=["no-such-program"]), "could not start", "infra"),
        (KubernetesRun(image="missing:1", command=["true"]), "ErrImagePull", "infra"),
        (
            KubernetesRun(image=IMAGE, command=["true"], resources={"requests": {"cpu": "5000"}}),
            "Unschedulable",
            "infra",
        ),
        (KubernetesRun(image=IMAGE, command=["true"], resources={"requests": {"cpu": "x"}}), "refused", "infra"),
        (KubernetesRun(command=["true"]), "needs an `image`", "infra"),
        (KubernetesRun(job_template=ODD), "could not be started", "infra"),
    ]
    posted = [(cluster.post(run)[0], message, owner) for run, message, owner in cases]
    (slow,) = cluster.post(python("import time; time.sleep(60)"), timeout_seconds=2)
    posted.append((slow, "timed out after 2 s", "agent"))
    for rollout, message, owner in posted:
        status = gateway.ended(rollout, 40).status
        assert message in (status.error_message or "")
        assert (status.state, status.failure_kind) == ("failed", owner), status.error_message
    until(lambda: not cluster.left())


def test_cancelling_deletes_the_job(cluster: Cluster, controller: Process, gateway: Gateway) -> None:
    (rollout,) = cluster.sleepers(60)
    gateway.running(rollout)
    until(lambda: len(cluster.left()) == 3)
    gateway.ask(delete_rollout(rollout.rollout_id))
    until(lambda: not cluster.left(), seconds=4)  # the lease would be renewed after 5


@pytest.mark.parametrize("what", ["job", "pod"])
def test_what_others_delete_has_failed(cluster: Cluster, controller: Process, gateway: Gateway, what: str) -> None:
    (rollout,) = cluster.sleepers(60)
    until(lambda: len(cluster.left()) == 3)

    async def delete(core: client.CoreV1Api, batch: client.BatchV1Api) -> None:
        if what == "job":
            await batch.delete_collection_namespaced_job(cluster.namespace, propagation_policy="Background")
        else:
            await core.delete_collection_namespaced_pod(cluster.namespace, grace_period_seconds=0)

    cluster.call(delete)
    status = gateway.ended(rollout).status
    assert (status.failure_kind, f"{what} was deleted" in (status.error_message or "").lower()) == ("infra", True)
    until(lambda: not cluster.left())


def test_jobs_of_a_killed_controller_are_adopted(cluster: Cluster, gateway: Gateway) -> None:
    first = cluster.start()
    ending, going = cluster.sleepers(2, n=5), cluster.sleepers(6, n=5)
    for rollout in ending + going:
        gateway.running(rollout)
    until(lambda: len(cluster.left()) == 30)
    first.kill()
    time.sleep(3)
    second = cluster.start()
    for rollout in ending + going:
        status = gateway.ended(rollout).status
        assert (status.state, status.last_attempt_id) == ("succeeded", "0"), status.error_message
        assert len(gateway.ask(get_events(rollout.rollout_id, "reward"))) == 1
    second.end()
    until(lambda: not cluster.left())


def test_jobs_go_on_when_the_controller_is_replaced_and_a_sweep_removes_them(
    cluster: Cluster, gateway: Gateway
) -> None:
    controller = cluster.start()
    (rollout,) = cluster.sleepers(60)
    until(lambda: len(cluster.left()) == 3)
    assert controller.end() == 0
    assert gateway.rollout(rollout.rollout_id).status.state == "running"
    command = [sys.executable, "-m", "harnessrl", *cluster.options(), "--sweep"]
    swept = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ":".join(sys.path)}
    )
    assert "deleted 1 Jobs" in swept.stdout, swept.stderr
    until(lambda: not cluster.left())


@pytest.mark.skipif(not LOCAL, reason="stops the API server's process")
def test_an_api_server_that_is_away(cluster: Cluster, controller: Process, gateway: Gateway) -> None:
    (rollout,) = cluster.sleepers(2)
    until(lambda: cluster.pods_running() == 1)
    pids = json.loads((Path(cluster.kubeconfig).parent / "pids.json").read_text())
    server = pids["kube-apiserver"]["pid"]
    os.kill(server, signal.SIGSTOP)
    try:
        (later,) = cluster.sleepers(0)
        time.sleep(6)  # longer than --pending-seconds
    finally:
        os.kill(server, signal.SIGCONT)
    assert gateway.ended(rollout, 60).status.state == "succeeded"
    assert gateway.ended(later, 60).status.state == "succeeded"


@pytest.mark.skipif(not LOCAL, reason="makes the namespaces of deploy/")
def test_the_deployed_rights_suffice_and_are_the_least(cluster: Cluster, gateway: Gateway) -> None:
    own = Cluster(cluster.kubeconfig, gateway, cluster.folder)
    everything, own.kubeconfig = own.kubeconfig, own.as_deployed()
    controller = own.start()
    (good,) = own.post(python(REWARD + "print('a log')"))
    (bad,) = own.post(python("import time; time.sleep(60)"), timeout_seconds=1)
    assert gateway.ended(good).status.state == "succeeded"
    assert gateway.ask(get_events(good.rollout_id, "log"))
    assert "timed out" in (gateway.ended(bad).status.error_message or "")
    controller.end()
    with pytest.raises(client.ApiException, match="Forbidden"):
        own.call(lambda core, _: core.list_namespaced_secret(own.namespace))
    with pytest.raises(client.ApiException, match="Forbidden"):
        own.call(lambda _, batch: batch.list_namespaced_job(cluster.namespace))
    own.kubeconfig = everything
    until(lambda: not own.left())
