"""What an agent is told: its environment variables, and templates filled from its task.

The names of v1.0 stay (`AGL_*`); those of the official SDKs are set too, so that most harnesses need no
set-up at all. The key is the attempt's own, never the controller's.
"""

import json
import signal
from functools import lru_cache
from typing import Any
from urllib.parse import quote

import jinja2

from harnessrl.schemas import Claim


class StartError(Exception):
    """The attempt cannot be started; the message is for the rollout's owner. An infrastructure failure."""


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return f"signal {number}"


def model_environment(gateway_url: str, claim: Claim, key: str) -> dict[str, str]:
    """Where the agent finds its model and its events, and the key for both."""
    rollout = claim.rollout
    scope = f"rollout/{quote(rollout.rollout_id, safe='')}/attempt/{quote(claim.attempt_id, safe='')}"
    proxy = f"{gateway_url}/proxy/{scope}/mode/{'train' if rollout.is_train else 'val'}"
    return {
        "AGL_OPENAI_BASE_URL": f"{proxy}/openai/v1",
        "AGL_EVENT_URL": f"{gateway_url}/api/{scope.replace('rollout/', 'rollouts/', 1)}/events",
        "AGL_KEY": key,
        "OPENAI_BASE_URL": f"{proxy}/openai/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": f"{proxy}/anthropic",
        "ANTHROPIC_API_KEY": key,
    }


def mapped(env_map: dict[str, str], task: Any) -> dict[str, str]:
    """v1.0's `env_map`: `input` or `input.a.b` looked up in the task (non-strings as JSON), else literal."""
    return {name: _look_up(where, task) for name, where in env_map.items()}


def _look_up(where: str, task: Any) -> str:
    first, *path = where.split(".")
    if first != "input":
        return where
    for name in path:
        if not isinstance(task, dict) or name not in task:
            raise StartError(f"env_map names {where!r}, but the task has no {name!r}")
        task = task[name]
    return task if isinstance(task, str) else json.dumps(task, ensure_ascii=False)


_jinja = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)


@lru_cache(maxsize=1024)
def _template(text: str) -> jinja2.Template:
    return _jinja.from_string(text)


def rendered(text: str, claim: Claim) -> str:
    """`text` as a Jinja template over the rollout's `input`, `rollout_id` and `metadata`."""
    if "{" not in text:
        return text
    rollout = claim.rollout
    try:
        return _template(text).render(
            input=rollout.input, rollout_id=rollout.rollout_id, metadata=rollout.metadata.model_dump()
        )
    except Exception as error:  # an expression may raise anything
        raise StartError(f"template {text!r}: {error}") from error
