"""Write docs/harnesses.md from the results of the conformance suite.

HARNESS_REPORT=report.jsonl make test
python tests/conformance/document.py report.jsonl .venv-harnesses .venv-openhands > docs/harnesses.md
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

CONNECT = "`OPENAI_BASE_URL`, `OPENAI_API_KEY`"
NEEDS = "needs Python 3.12; opens with 35,000 characters: needs a long context"
HARNESSES = {
    # script or name: (shown, package, how to connect, known limits)
    "openai_chat": ("openai, Chat Completions", "openai", CONNECT, ""),
    "openai_responses": ("openai, Responses", "openai", CONNECT, "`store: false` only: send the whole input"),
    "anthropic_messages": ("anthropic", "anthropic", "`ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY`", ""),
    "openai_agents": ("OpenAI Agents SDK", "openai-agents", CONNECT, "reasoning is dropped on Chat Completions"),
    "autogen": ("AutoGen", "autogen-agentchat", "`base_url=`", "reasoning is dropped"),
    "langgraph": ("LangGraph, langchain-openai", "langgraph", CONNECT, "reasoning is dropped"),
    "litellm": ("LiteLLM", "litellm", "`OPENAI_BASE_URL`, model `openai/any`", "use the `openai/` prefix"),
    "pydantic_ai": ("Pydantic AI", "pydantic-ai-slim", CONNECT, ""),
    "smolagents": (
        "smolagents",
        "smolagents",
        "`api_base=`",
        "rewrites its history as text: each turn is a fork; requires a tool call, whose beginning is context",
    ),
    "mini_swe_agent": ("mini-SWE-agent", "mini-swe-agent", "`OPENAI_API_BASE`, model `openai/any`", ""),
    "openhands": ("OpenHands, default agent of its SDK", "openhands-sdk", "`base_url=`, model `openai/any`", NEEDS),
    "Claude Code": (
        "Claude Code",
        "@anthropic-ai/claude-code",
        "`ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY`",
        "opens with 50,000 characters: needs a long context",
    ),
    "Codex": ("Codex", "@openai/codex", '`model_providers` in `config.toml`, `wire_api = "responses"`', "as above"),
    "OpenCode": ("OpenCode", "opencode-ai", "`provider` in `opencode.json`", "as above"),
}


def main(report: Path, *environments: Path) -> None:
    results: dict[str, list[dict]] = {}
    for line in report.read_text().splitlines():
        row = json.loads(line)
        results.setdefault(row["harness"], []).append(row)
    versions = {name: version for e in reversed(environments) for name, version in _versions(e).items()}
    print("# Harnesses\n")
    print("Real harnesses, unchanged, that the conformance suite has run against the gateway: `tests/conformance`.")
    print("This page is made from its results. In each run the harness ended well, and every sampled token was in")
    print("exactly one training row. *Continuity* says how the prompts came about: `exact` ones are the earlier")
    print("tokens, unchanged, and what is new; a `rendered(…)` one is a fork, trained on all the same. First the")
    print(
        "engine plays back awkward answers with tool calls. Then it is a real one, sampled at temperature 1 as in"
    )
    print(
        "training, with a tiny model that has been taught these answers: tool calls, their results, a final answer."
    )
    print("It is asked again where it slips. SmolLM2 runs beside it, as a model that says what it likes.\n")
    print("| harness | version | runs | how to connect | continuity of calls | with a real engine | known limits |")
    print("|---|---|---|---|---|---|---|")
    for name, (shown, package, connect, limits) in HARNESSES.items():
        rows = results.get(name)
        if rows is None:
            continue
        runs = " · ".join(sorted({_way(row["arguments"]) for row in rows}))
        continuity = _counted(row for row in rows if not row["engine"])
        engines = dict.fromkeys(row["engine"] for row in rows if row["engine"])
        said = " · ".join(f"{e}: {_counted(row for row in rows if row['engine'] == e)}" for e in engines)
        version = versions.get(package.lower(), "")
        print(f"| {shown} | {version} | {runs} | {connect} | {continuity} | {said} | {limits} |")
    print()
    print("`harnessrl probe -- COMMAND` checks a harness that is not here; the environment that it gets names the")
    print("gateway in `OPENAI_BASE_URL` and `ANTHROPIC_BASE_URL`, so that most need no set-up at all.")


def _counted(rows: Iterable[dict]) -> str:
    counts = Counter(c for row in rows for c in row["continuity"])
    return ", ".join(f"{count} {kind}" for kind, count in counts.most_common())


def _way(arguments: list[str]) -> str:
    return " ".join(
        ["streamed" if "--stream" in arguments else "whole", *(["responses"] * ("--responses" in arguments))]
    )


def _versions(environment: Path) -> dict[str, str]:
    listed = subprocess.run(
        [environment / "bin/python", "-m", "pip", "list", "--format", "json"], capture_output=True, check=True
    ).stdout
    versions = {package["name"].lower(): package["version"] for package in json.loads(listed)}
    for file in (environment / "npm/node_modules").glob("**/package.json"):
        if len(file.relative_to(environment / "npm/node_modules").parts) <= 3:
            package = json.loads(file.read_text())
            if "-linux-" not in package.get("version", ""):  # a binary of one that is here itself
                versions[package.get("name", "").lower()] = package.get("version", "")
    return versions


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
