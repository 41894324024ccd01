"""Claude Code, Codex and OpenCode from npm: how they are started, and what the scripted engine says to them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy_kit import TOKENIZER, Proxied

__all__ = ["HARNESSES", "Harness", "reply_of"]

Body = dict[str, Any]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass(frozen=True)
class Harness:
    name: str
    binary: str
    shell: str
    argument: str
    """Name of the shell tool's command argument."""
    start: Callable[[Proxied, Path, Path, str], tuple[list[str], dict[str, str]]]
    """argv and environment, from the gateway, the binary, a fresh directory, and the task."""
    more: Body

    @property
    def task(self) -> str:
        return f"Run echo hello with {self.shell} and report"


def reply_of(harness: Harness) -> Callable[[Body], str]:
    def reply(body: Body) -> str:
        text = TOKENIZER.decode(body["token_ids"])
        if f'"name": "{harness.shell}"' not in text:
            return "A title"
        turn = text.rpartition(harness.task)[2].count("<tool_response>")
        if turn == 0:
            return "  I'll run it.\n\n" + run(harness, 'echo "hé" 1>&2; echo hello')
        if turn == 1:
            return run(harness, "echo one") + run(harness, "echo two")
        return "Done. The output was: hello 42"

    return reply


def run(harness: Harness, command: str) -> str:
    return call(harness.shell, **{harness.argument: command}, **harness.more)


def claude(gateway: Proxied, binary: Path, home: Path, task: str) -> tuple[list[str], dict[str, str]]:
    argv = [str(binary), "-p", task, "--dangerously-skip-permissions", "--output-format", "json", "--model", "any"]
    return argv, {
        "IS_SANDBOX": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "ANTHROPIC_BASE_URL": gateway.base(family="anthropic"),
        "ANTHROPIC_API_KEY": "k",
    }


def codex(gateway: Proxied, binary: Path, home: Path, task: str) -> tuple[list[str], dict[str, str]]:
    (home / "config.toml").write_text(
        f"""model = "any"
model_provider = "gw"
[model_providers.gw]
name = "gw"
base_url = "{gateway.base()}"
env_key = "GW_API_KEY"
wire_api = "responses"
[analytics]
enabled = false
"""
    )
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return [str(binary), "exec", *flags, task], {"CODEX_HOME": str(home), "GW_API_KEY": "k"}


def opencode(gateway: Proxied, binary: Path, home: Path, task: str) -> tuple[list[str], dict[str, str]]:
    options = {"baseURL": gateway.base(), "apiKey": "k"}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"any": {}}}
    config = {"provider": {"gw": provider}, "permission": "allow", "autoupdate": False, "share": "disabled"}
    (home / "opencode.json").write_text(json.dumps(config))
    return [str(binary), "run", "-m", "gw/any", "--title", "t", task], {}


HARNESSES = [
    Harness("Claude Code", "claude", "Bash", "command", claude, {"description": "Say hello", "timeout": 60000.0}),
    Harness("Codex", "codex", "exec_command", "cmd", codex, {}),
    Harness("OpenCode", "opencode", "bash", "command", opencode, {"description": "Say hello", "timeout": 50000.0}),
]
