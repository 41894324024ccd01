"""Jobs as data: what is sent, and what the cluster's answers mean."""

import re
import time
from datetime import UTC, datetime
from typing import Any

import pytest

from harnessrl.controller.environment import StartError
from harnessrl.controller.jobs import JobOptions, Seen, job_name, manifest, secret, started_at, verdict
from harnessrl.schemas import Claim, Json, KubernetesRun, Metadata, Rollout, RolloutConfig, RolloutStatus

OPTIONS = JobOptions(pending_seconds=60, slack_seconds=100)


def claim(run: KubernetesRun, task: Any = None, rollout_id: str = "r1", attempt_id: str = "0") -> Claim:
    rollout = Rollout(
        rollout_id=rollout_id,
        input=task,
        is_train=True,
        config=RolloutConfig(k8s=run, timeout_seconds=30),
        metadata=Metadata(),
        status=RolloutStatus(created_at=0, updated_at=0),
    )
    return Claim(rollout=rollout, attempt_id=attempt_id, agent_key="the-key")


def made(run: KubernetesRun, task: Any = None) -> Json:
    return manifest(claim(run, task), "c1", "http://gateway:8080", OPTIONS)


@pytest.mark.parametrize("rollout_id", ["0" * 32, "UPPER case/é", "a" * 200, "-", "x--y", "ends-"])
@pytest.mark.parametrize("attempt_id", ["0", "12"])
def test_names_are_valid_and_distinct(rollout_id: str, attempt_id: str) -> None:
    name = job_name(rollout_id, attempt_id)
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name) and len(name) <= 63
    assert name != job_name(rollout_id + "0", attempt_id) != job_name(rollout_id, attempt_id + "0")


def test_names_are_those_of_v1() -> None:
    assert job_name("0" * 32, "0") == "agl-rollout-" + "0" * 32


def test_the_key_is_in_the_secret_only() -> None:
    run = KubernetesRun(image="agent:1", command=["run", "{{ input.q }}"], env={"Q": "{{ input.q }}"})
    job = made(run, {"q": "$$x$$ $(HOME)"})
    assert "the-key" not in str(job)
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["run", "$$$$x$$$$ $$(HOME)"]  # Kubernetes makes it what it was
    env = {v["name"]: v for v in container["env"]}
    assert env["Q"]["value"] == container["command"][1]
    assert env["OPENAI_BASE_URL"]["value"].startswith("http://gateway:8080/proxy/rollout/r1/attempt/0/mode/train/")
    reference = env["OPENAI_API_KEY"]["valueFrom"]["secretKeyRef"]
    job["metadata"]["uid"] = "u"
    hidden = secret(claim(KubernetesRun(image="agent:1")), "c1", job)
    assert hidden["stringData"] == {reference["key"]: "the-key", "evaluator": ""}
    assert hidden["metadata"]["name"] == reference["name"]
    assert hidden["metadata"]["ownerReferences"][0]["uid"] == "u"


def test_every_job_is_bounded() -> None:
    spec = made(KubernetesRun(image="agent:1"))["spec"]
    assert (spec["backoffLimit"], spec["activeDeadlineSeconds"]) == (0, 30 + 60 + 100)
    pod = spec["template"]["spec"]
    assert (pod["restartPolicy"], pod["automountServiceAccountToken"]) == ("Never", False)


def test_the_evaluation_has_its_own_key_and_the_same_folder() -> None:
    run = KubernetesRun(image="agent:1", command=["run"], setup=["prepare"], evaluate=["grade"])
    given = claim(run).model_copy(update={"evaluator_key": "its-key"})
    job = manifest(given, "c1", "http://gateway:8080", OPTIONS)
    pod = job["spec"]["template"]["spec"]
    stages = [*pod["initContainers"], *pod["containers"]]
    assert [stage["name"] for stage in stages] == ["setup", "agent", "evaluate"]
    keys = [v["valueFrom"]["secretKeyRef"]["key"] for s in stages for v in s["env"] if v["name"] == "AGL_KEY"]
    assert keys == ["agent", "agent", "evaluator"]
    assert {(s["workingDir"], s["volumeMounts"][0]["mountPath"]) for s in stages} == {("/rollout", "/rollout")}
    hidden = secret(given, "c1", {"metadata": {"name": "j", "uid": "u"}})
    assert hidden["stringData"] == {"agent": "the-key", "evaluator": "its-key"}


@pytest.mark.parametrize("user", [None, 0, 1000])
def test_images_do_not_run_as_root_unless_told_to(user: int | None) -> None:
    job = made(KubernetesRun(image="agent:1", user=user))
    context = job["spec"]["template"]["spec"]["containers"][0]["securityContext"]
    assert (context["runAsNonRoot"], context.get("runAsUser")) == (user != 0, user)
    assert context["capabilities"] == {"drop": ["ALL"]} and not context["allowPrivilegeEscalation"]


TEMPLATE = """
apiVersion: batch/v1
kind: Job
metadata: {name: "{{ job_name }}", labels: {team: a}}
spec:
  backoffLimit: 4
  template:
    spec:
      containers:
      - name: agent
        image: agent:1
        env:
        - {name: QUESTION, value: "{{ input.q | yaml_escape }}"}
        - {name: OPENAI_API_KEY, value: own}
"""


def test_templates_of_v1() -> None:
    job = made(KubernetesRun(job_template=TEMPLATE), {"q": 'say "hi"\nand: {go}'})
    assert job["metadata"]["labels"]["team"] == "a" and job["spec"]["backoffLimit"] == 0
    env = {v["name"]: v.get("value") for v in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert "securityContext" not in str(job)
    assert env["QUESTION"] == 'say "hi"\nand: {go}'
    assert env["OPENAI_API_KEY"] == "own" and "AGL_EVENT_URL" in env


def test_fields_that_are_left_empty_are_as_if_not_there() -> None:
    text = "{kind: Job, metadata: , spec: {template: {spec: {initContainers: , containers: [{name: a, env: }]}}}}"
    assert made(KubernetesRun(job_template=text), {})["metadata"]["name"]


def test_a_template_is_evaluated_in_copies_of_its_container() -> None:
    run = KubernetesRun(job_template=TEMPLATE, setup=["prepare"], evaluate=["grade", "{{ input.q }}"])
    given = claim(run, {"q": "1"}).model_copy(update={"evaluator_key": "its-key"})
    pod = manifest(given, "c1", "http://gateway:8080", OPTIONS)["spec"]["template"]["spec"]
    stages = {stage["name"]: stage for stage in [*pod["initContainers"], *pod["containers"]]}
    assert list(stages) == ["setup", "agent", "evaluate"]
    assert {stage["image"] for stage in stages.values()} == {"agent:1"}
    assert (stages["setup"]["command"], stages["evaluate"]["command"]) == (["prepare"], ["grade", "1"])
    assert "command" not in stages["agent"]
    keys = {v["name"]: v["valueFrom"]["secretKeyRef"]["key"] for v in stages["evaluate"]["env"] if "valueFrom" in v}
    assert keys["AGL_KEY"] == "evaluator"
    two = TEMPLATE + "      - {name: sidecar, image: b}\n"
    with pytest.raises(StartError, match="one container"):
        made(KubernetesRun(job_template=two, evaluate=["grade"]), {"q": ""})


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ input.nothing }}", "nothing"),
        ("a: [", "no YAML"),
        ("kind: Pod", "not a Job"),
        ("{% if %}", "job_template"),
        ("{{ 1 / 0 }}", "job_template: division"),
        ("{kind: Job, spec: {template: {spec: {containers: [{image: a}]}}}}", "named"),
        ("{kind: Job, spec: {template: {spec: {containers: [a]}}}}", "named"),
    ],
)
def test_bad_templates_are_named(template: str, message: str) -> None:
    with pytest.raises(StartError, match=message):
        made(KubernetesRun(job_template=template), {})


MADE = time.time()
"""When the cases below were made."""


def ago(seconds: float) -> str:
    return datetime.fromtimestamp(time.time() - seconds, UTC).isoformat().replace("+00:00", "Z")


def job(created: float = 1, **status: Any) -> Json:
    return {
        "metadata": {"name": "j", "creationTimestamp": ago(created)},
        "spec": {"activeDeadlineSeconds": 100},
        "status": status,
    }


def pod(phase: str, state: Json | None = None, **status: Any) -> Json:
    containers = [{"name": "agent", "image": "agent:1", "state": state or {}}]
    return {"metadata": {"uid": "p"}, "status": {"phase": phase, "containerStatuses": containers, **status}}


def terminated(code: int, reason: str = "Error", message: str = "") -> Json:
    return {"terminated": {"exitCode": code, "reason": reason, "message": message, "startedAt": ago(5)}}


WAITING = {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}
AS_ROOT = {
    "waiting": {
        "reason": "CreateContainerConfigError",
        "message": "container has runAsNonRoot and image will run as root (pod: x, container: agent)",
    }
}
RUNNING = {"running": {"startedAt": ago(400)}}


def staged(agent: Json, evaluation: Json) -> Json:
    """The pod of a rollout that is evaluated."""
    phase = "Failed" if "terminated" in {**evaluation} or agent.get("terminated", {}).get("exitCode") else "Running"
    init = [{"name": "agent", "image": "agent:1", "state": agent}]
    found = pod(phase, evaluation, initContainerStatuses=init)
    found["status"]["containerStatuses"][0]["name"] = "evaluate"
    return found


UNSCHEDULABLE = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}]
FAILED = [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "m"}]
DEADLINE = [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "m"}]
GOING: dict[str, Seen] = {
    "no pod yet": Seen(job()),
    "pulling": Seen(job(), pod("Pending", WAITING)),
    "running": Seen(job(500), pod("Running", RUNNING)),
    "running, to be evaluated": Seen(job(500), staged(RUNNING, {"waiting": {"reason": "PodInitializing"}})),
}
ENDS: dict[str, tuple[Seen, str | None, str | None]] = {
    "success": (Seen(job(), pod("Succeeded", terminated(0, "Completed"))), None, None),
    "exit code": (Seen(job(), pod("Failed", terminated(3))), "exited with code 3", None),
    "signal": (Seen(job(), pod("Failed", terminated(139))), "killed by SIGSEGV", None),
    "out of memory": (Seen(job(), pod("Failed", terminated(137, "OOMKilled"))), "out of memory", None),
    "no such program": (Seen(job(), pod("Failed", terminated(128, "StartError", "no x"))), "no x", "infra"),
    "evicted": (Seen(job(), pod("Failed", reason="Evicted", message="disk")), "Evicted: disk", "infra"),
    "image": (Seen(job(61), pod("Pending", WAITING)), "ErrImagePull: no such image", "infra"),
    "as root": (Seen(job(), pod("Pending", AS_ROOT)), "set `user`", "infra"),
    "exit code, not evaluated": (Seen(job(), staged(terminated(3), {"waiting": {}})), "agent exited with", None),
    "evaluation": (Seen(job(), staged(terminated(0), terminated(3))), "evaluate exited with code 3", "infra"),
    "capacity": (Seen(job(61), pod("Pending", conditions=UNSCHEDULABLE)), "Unschedulable: 0/1 nodes", "infra"),
    "quota": (Seen(job(61)), "no pod was made", "infra"),
    "pod deleted": (
        Seen(job(), pod("Running", {"running": {"startedAt": ago(1)}}), {"p"}),
        "pod was deleted",
        "infra",
    ),
    "job deleted": (Seen(None, pod("Running")), "Job was deleted", "infra"),
    "deadline": (Seen(job(conditions=DEADLINE), pod("Running"), {"p"}), "deadline", "agent"),
    "deadline, said later": (Seen(job(startTime=ago(101)), pod("Running"), {"p"}), "deadline", "agent"),
    "job failed": (Seen(job(conditions=FAILED)), "BackoffLimitExceeded", "infra"),
}


@pytest.mark.parametrize("name", GOING)
def test_what_goes_on(name: str) -> None:
    assert verdict(GOING[name], pending_seconds=60) is None


@pytest.mark.parametrize("name", ENDS)
def test_ends_are_told_apart(name: str) -> None:
    seen, message, owner = ENDS[name]
    end = verdict(seen, pending_seconds=60)
    assert end is not None and end.ok == (message is None)
    assert (message or "") in (end.error_message or "") and end.failure_kind == owner


def test_the_time_begins_with_the_container() -> None:
    assert started_at(GOING["pulling"]) is None
    begun = started_at(GOING["running"])
    assert begun == pytest.approx(MADE - 400, abs=5)
