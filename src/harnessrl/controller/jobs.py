"""Kubernetes Jobs as data: what is sent for an attempt, and what the state of a Job and its pod means.

Pure functions over the API's JSON; `harnessrl.controller.kubernetes` talks to the API server.
"""

import hashlib
import json
import re
import signal
import time
import uuid
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jinja2
import yaml

from harnessrl.controller.environment import StartError, model_environment, rendered, signal_name
from harnessrl.schemas import AttemptEnd, Claim, FailureKind, Json, KubernetesRun

CONTROLLER_LABEL = "harnessrl/controller"
ROLLOUT_ANNOTATION = "harnessrl/rollout-id"
ATTEMPT_ANNOTATION = "harnessrl/attempt-id"
TIMEOUT_ANNOTATION = "harnessrl/timeout-seconds"
CLAIM_ANNOTATION = "harnessrl/claim"
"""Different for each claim, also of a rollout that was deleted and made again under its old id."""

_SECRET_NAMES = ("AGL_KEY", "OPENAI_API_KEY", "ANTHROPIC_API_KEY")
_RUNS_AS_ROOT = "CreateContainerConfigError: container has runAsNonRoot"
_NEVER_STARTS = ("InvalidImageName", "ErrImageNeverPull", _RUNS_AS_ROOT)
_NOT_THE_AGENT = ("setup", "evaluate")
_STUCK = (
    "ErrImagePull",
    "ImagePullBackOff",
    "CreateContainerConfigError",
    "CreateContainerError",
    "CrashLoopBackOff",
)
_NODES_FAULT = (
    "Evicted",
    "NodeLost",
    "NodeShutdown",
    "Shutdown",
    "Terminated",
    "Preempting",
    "UnexpectedAdmissionError",
)


@dataclass(frozen=True)
class JobOptions:
    pending_seconds: float = 600
    """A pod that does not run after this time has failed, with the reason why it waited."""
    slack_seconds: int = 3600
    """By which `activeDeadlineSeconds` exceeds the timeout: the controller keeps the timeout itself and leaves
    out the time that calls were held; the Job's own deadline is for when there is no controller."""
    ttl_seconds: int = 600
    """The cluster removes finished Jobs after this time, if the controller has not."""
    grace_seconds: int = 5


def job_name(rollout_id: str, attempt_id: str) -> str:
    """v1.0's `agl-rollout-ID`, with the attempt where it is a further one; always a valid name."""
    again = "" if attempt_id == "0" else f"-{attempt_id}"
    if re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?", rollout_id):
        return f"agl-rollout-{rollout_id}{again}"
    readable = re.sub(r"[^a-z0-9]+", "-", rollout_id.lower())[:20].strip("-")
    return f"agl-rollout-{readable}-{_digest(rollout_id)}{again}".replace("--", "-")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _label(text: str) -> str:
    valid = len(text) <= 63 and re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?", text)
    return text if valid else _digest(text)


def manifest(claim: Claim, controller: str, agent_url: str, options: JobOptions) -> Json:
    """The `batch/v1` Job of an attempt: the user's template or image, with what every Job gets."""
    rollout = claim.rollout
    run = rollout.config.k8s
    assert run is not None
    name = job_name(rollout.rollout_id, claim.attempt_id)
    job = _from_template(run.job_template, claim, name) if run.job_template else _from_image(claim, name, options)
    labels = {
        "app.kubernetes.io/managed-by": "agentlightning",
        "agentlightning/rollout-id": _label(rollout.rollout_id),
        "agentlightning/attempt-id": claim.attempt_id,
        CONTROLLER_LABEL: controller,
    }
    meta = job.setdefault("metadata", {})
    meta["name"] = name
    meta.setdefault("labels", {}).update(labels)
    meta.setdefault("annotations", {}).update(
        {
            ROLLOUT_ANNOTATION: rollout.rollout_id,
            ATTEMPT_ANNOTATION: claim.attempt_id,
            TIMEOUT_ANNOTATION: str(rollout.config.timeout_seconds),
            CLAIM_ANNOTATION: uuid.uuid4().hex,
        }
    )
    spec = job["spec"]
    deadline = rollout.config.timeout_seconds + int(options.pending_seconds) + options.slack_seconds
    spec.update(backoffLimit=0, activeDeadlineSeconds=deadline, ttlSecondsAfterFinished=options.ttl_seconds)
    template = spec["template"]
    template.setdefault("metadata", {}).setdefault("labels", {}).update(labels)
    pod = template["spec"]
    pod["restartPolicy"] = "Never"
    pod.setdefault("automountServiceAccountToken", False)
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        evaluates = claim.evaluator_key and container["name"] == "evaluate"
        own = _environment(claim, agent_url, name, "evaluator" if evaluates else "agent")
        named = {variable["name"] for variable in container.get("env") or []}
        container["env"] = [v for v in own if v["name"] not in named] + (container.get("env") or [])
    return job


def secret(claim: Claim, controller: str, job: Json) -> Json:
    """The attempt's keys; the Job, as created, owns them, so that they go together."""
    meta = job["metadata"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"]}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": meta["name"], "labels": {CONTROLLER_LABEL: controller}, "ownerReferences": [owner]},
        "stringData": {"agent": claim.agent_key, "evaluator": claim.evaluator_key or ""},
    }


def _environment(claim: Claim, agent_url: str, secret_name: str, whose: str) -> list[Json]:
    reference = {"valueFrom": {"secretKeyRef": {"name": secret_name, "key": whose}}}
    known = model_environment(agent_url, claim, key="")
    return [{"name": n, **(reference if n in _SECRET_NAMES else {"value": value})} for n, value in known.items()]


def _from_template(text: str, claim: Claim, name: str) -> Json:
    jinja = jinja2.Environment(undefined=jinja2.StrictUndefined)
    jinja.filters["yaml_escape"] = _yaml_escape
    rollout = claim.rollout
    try:
        filled = jinja.from_string(text).render(
            job_name=name,
            input=rollout.input,
            rollout_id=rollout.rollout_id,
            metadata=rollout.metadata.model_dump(),
        )
    except Exception as error:  # an expression may raise anything
        raise StartError(f"job_template: {error}") from error
    try:
        job = _without_nulls(yaml.safe_load(filled))
        pod = job["spec"]["template"]["spec"]
        containers = pod["containers"]
        _ = [container["name"] for container in [*pod.get("initContainers", []), *containers]]
    except yaml.YAMLError as error:
        raise StartError(f"job_template is no YAML once it is filled in: {error}") from error
    except (AttributeError, KeyError, TypeError) as error:
        raise StartError("job_template is not a Job with named spec.template.spec.containers") from error
    if job.get("kind") != "Job" or not containers:
        raise StartError("job_template is not a Job with at least one container")
    run = rollout.config.k8s
    assert run is not None
    if run.setup or run.evaluate:
        if len(containers) > 1:
            raise StartError("`setup` and `evaluate` need a job_template with one container")
        agent = {**containers[0], "name": "agent"}
        common = {name: value for name, value in agent.items() if name not in ("name", "command", "args")}
        _add_stages(pod, run, common, agent, claim)
    return job


def _without_nulls(value: Any) -> Any:
    """To Kubernetes a null field is one that is not there."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _yaml_escape(value: Any) -> str:
    """Text as it stands between YAML's double quotes."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return json.dumps(text)[1:-1]


def _from_image(claim: Claim, name: str, options: JobOptions) -> Json:
    run = claim.rollout.config.k8s
    assert run is not None
    if not run.image:
        raise StartError("`k8s` needs an `image` (and usually a `command`), or a `job_template`")
    common: Json = {
        "image": run.image,
        "env": [{"name": n, "value": _literal(rendered(v, claim))} for n, v in (run.env or {}).items()],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": run.user != 0,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if run.user is not None:
        common["securityContext"]["runAsUser"] = run.user
    if run.resources:
        common["resources"] = run.resources
    if run.cwd:
        common["workingDir"] = run.cwd
    pod: Json = {"terminationGracePeriodSeconds": options.grace_seconds}
    if run.setup or run.evaluate:
        shared = run.cwd or "/rollout"
        common.update(workingDir=shared, volumeMounts=[{"name": "rollout", "mountPath": shared}])
        pod["volumes"] = [{"name": "rollout", "emptyDir": {}}]
    _add_stages(pod, run, common, _container("agent", run.command, common, claim), claim)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"template": {"spec": pod}},
    }


def _add_stages(pod: Json, run: KubernetesRun, common: Json, agent: Json, claim: Claim) -> None:
    """Set-up, agent and evaluation: init containers run one by one, each after the one before ended well."""
    setup = [_container("setup", run.setup, common, claim)] if run.setup else []
    evaluate = [_container("evaluate", run.evaluate, common, claim)] if run.evaluate else []
    *before, last = [*setup, agent, *evaluate]
    pod.update(initContainers=[*pod.get("initContainers", []), *before], containers=[last])


def _container(stage: str, command: list[str] | None, common: Json, claim: Claim) -> Json:
    container = {"name": stage, **common}
    if command:
        container["command"] = [_literal(rendered(item, claim)) for item in command]
    return container


def _literal(text: str) -> str:
    """Kubernetes expands $(NAME) and $$ in commands and variables; a task's text must arrive as it is."""
    return text.replace("$", "$$")


# --------------------------------------------------------------------------------- what happened


@dataclass
class Seen:
    """The last that was heard of a Job and its pod."""

    job: Json | None
    pod: Json | None = None
    gone_pods: set[str] = field(default_factory=set)
    """Uids of pods that were deleted."""


def started_at(seen: Seen) -> float | None:
    """Epoch seconds at which set-up, agent or evaluation, whichever came last, began to run."""
    for status in reversed(_stages(seen.pod)):
        state = status.get("state", {})
        begun = (state.get("running") or state.get("terminated") or {}).get("startedAt")
        if begun:
            return _epoch(begun)
    return None


def _stages(pod: Json | None) -> list[Json]:
    """Statuses of the containers that count as the attempt: other init containers belong to its preparation."""
    init = [status for status in _statuses(pod, "initContainerStatuses") if status["name"] in ("setup", "agent")]
    return init + _statuses(pod, "containerStatuses")


def begun(pod: Json) -> list[str]:
    """Names of the containers that have run, in their order."""
    statuses = _statuses(pod, "initContainerStatuses") + _statuses(pod, "containerStatuses")
    return [status["name"] for status in statuses if status.get("state", {}).keys() & {"running", "terminated"}]


def timed_out(seen: Seen, seconds: float) -> AttemptEnd:
    """Whose fault it is depends on which stage took too long."""
    stage = next(reversed(begun(seen.pod or {})), "agent")
    message = f"the Job timed out after {seconds:g} s ({stage})"
    return AttemptEnd(ok=False, error_message=message, failure_kind="infra" if stage in _NOT_THE_AGENT else "agent")


def verdict(seen: Seen, pending_seconds: float) -> AttemptEnd | None:
    """How the attempt ended; None while it has not."""
    if seen.job is None:
        return _infra("its Job was deleted")
    if _past_deadline(seen.job):
        return AttemptEnd(ok=False, error_message="the Job's deadline is over", failure_kind="agent")
    if seen.pod is not None:
        end = _of_pod(seen.pod, seen.gone_pods)
        if end is not None:
            return end
    for condition in seen.job.get("status", {}).get("conditions") or []:
        if condition["status"] == "True" and condition["type"] == "Complete":
            return AttemptEnd(ok=True)
        if condition["status"] == "True" and condition["type"] == "Failed":
            return _infra(f"the Job failed: {condition.get('reason')}: {condition.get('message')}")
    if started_at(seen) is None:
        waited = time.time() - _epoch(seen.job["metadata"]["creationTimestamp"])
        reason = why_pending(seen)
        if waited >= pending_seconds or reason.startswith(_NEVER_STARTS):
            return _infra(f"did not start within {waited:.0f} s: {reason}")
    return None


def has_ended(seen: Seen) -> bool:
    """Nothing of it runs any more."""
    return seen.job is None or (seen.pod or {}).get("status", {}).get("phase") in ("Succeeded", "Failed")


def _past_deadline(job: Json) -> bool:
    """The job controller deletes the pod at the deadline, and may say why only later."""
    status = job.get("status", {})
    if any(c.get("reason") == "DeadlineExceeded" for c in status.get("conditions") or []):
        return True
    begun = status.get("startTime")
    return bool(begun) and time.time() >= _epoch(begun) + job["spec"]["activeDeadlineSeconds"]


def why_pending(seen: Seen) -> str:
    if seen.pod is None:
        return "no pod was made for the Job (quota or admission?)"
    for kind in ("initContainerStatuses", "containerStatuses"):
        for status in _statuses(seen.pod, kind):
            waiting = status.get("state", {}).get("waiting") or {}
            if waiting.get("reason") in (*_STUCK, *_NEVER_STARTS):
                reason = f"{waiting['reason']}: {waiting.get('message') or status['image']}"
                as_root = reason.startswith(_RUNS_AS_ROOT)
                return f"{reason}; set `user` in the rollout's `k8s`, 0 for root" if as_root else reason
    for condition in seen.pod.get("status", {}).get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"{condition.get('reason')}: {condition.get('message')}"
    return "the pod is pending"


def _of_pod(pod: Json, gone: set[str]) -> AttemptEnd | None:
    status, meta = pod.get("status", {}), pod["metadata"]
    reason = status.get("reason")
    if reason in _NODES_FAULT:
        return _infra(f"{reason}: {status.get('message') or 'the node gave it up'}")
    if status.get("phase") == "Succeeded":
        return AttemptEnd(ok=True)
    if meta.get("deletionTimestamp") or meta["uid"] in gone:
        return _infra("its pod was deleted")
    if status.get("phase") == "Failed":
        return _of_containers(pod)
    return None


def _of_containers(pod: Json) -> AttemptEnd:
    agents = _stages(pod)
    for status in _statuses(pod, "initContainerStatuses") + _statuses(pod, "containerStatuses"):
        ended = status.get("state", {}).get("terminated")
        if ended and ended["exitCode"]:
            owner = None if status in agents and status["name"] not in _NOT_THE_AGENT else "infra"
            return _of_container(status["name"], ended, owner)
    return _infra(f"its pod failed: {pod['status'].get('reason')}: {pod['status'].get('message')}")


def _of_container(name: str, ended: Json, owner: FailureKind | None) -> AttemptEnd:
    code, reason = ended["exitCode"], ended.get("reason")
    if reason == "OOMKilled":
        return AttemptEnd(ok=False, error_message=f"container {name} was killed: out of memory", failure_kind=owner)
    if reason in ("StartError", "ContainerCannotRun"):
        return _infra(f"container {name} could not start: {ended.get('message')}")
    if code > 128 and code - 128 in signal.valid_signals():
        message = f"container {name} was killed by {signal_name(code - 128)}"
        return AttemptEnd(ok=False, error_message=message, failure_kind=owner)
    return AttemptEnd(ok=False, error_message=f"container {name} exited with code {code}", failure_kind=owner)


def _statuses(pod: Json | None, kind: str) -> list[Json]:
    return ((pod or {}).get("status", {}).get(kind)) or []


def _infra(message: str) -> AttemptEnd:
    return AttemptEnd(ok=False, error_message=message, failure_kind="infra")


def _epoch(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()
