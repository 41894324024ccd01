"""Real harnesses, unchanged, against the gateway: each ends well, and every sampled token is in exactly one row.

They run in an environment of their own (`make harnesses`, or HARNESS_PYTHON); the engine plays back awkward
answers. With HARNESS_REPORT set to a file, the results are written there for `docs/harnesses.md`.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "gateway"))

from npm_harnesses import HARNESSES, Harness, reply_of  # noqa: E402
from proxy_kit import TINY, TOKENIZER, Proxied, ScriptedEngine, proxied  # noqa: E402

from harnessrl.trainer.rollout import finished_rollout  # noqa: E402
from harnessrl.trainer.rows import make_rows  # noqa: E402
from harnessrl.trainer.trajectory import build_trajectory  # noqa: E402

PYTHON = Path(os.environ.get("HARNESS_PYTHON", HERE.parents[1] / ".venv-harnesses/bin/python"))
NPM = Path(os.environ.get("HARNESS_NPM", HERE.parents[1] / ".venv-harnesses/npm")) / "node_modules/.bin"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Look something up.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
]


def call(name: str, **arguments: Any) -> str:
    """A call as models write them: odd spacing, escapes."""
    body = json.dumps(arguments).replace(": ", " :  ", 1)
    return f'<tool_call>\n{{ "name": "{name}",  "arguments": {body}}}\n</tool_call>'


LOOKUPS = [
    "  I look, 日本.\n\n" + call("lookup", query="é/\n1"),
    call("lookup", query="a") + call("lookup", query="b"),
]
REPLIES = [*LOOKUPS, "Done: 😀 42 "]
MALFORMED = [LOOKUPS[0], 'So <tool_call>{"name": "lookup", "arguments": {</tool_call>']


@dataclass(frozen=True)
class Case:
    script: str
    arguments: tuple[str, ...] = ()
    replies: list[str] = field(default_factory=lambda: REPLIES)
    exact: bool = True
    """All later calls continue exactly; otherwise the harness rewrites its history, which is a fork and counted."""
    says: str = "42"

    def __str__(self) -> str:
        return "-".join((self.script, *self.arguments, "malformed" if self.replies is MALFORMED else "")).strip("-")


STREAM = ("--stream",)
MINI = [call("bash", command="echo é"), call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 42")]
FORCED = '{}", "arguments": {}}}\n</tool_call>'
"""What a model says after the beginning of a call that the request forced on it."""
SMOL = [FORCED.format("lookup", '{"query": "é"}'), FORCED.format("final_answer", '{"answer": "42"}')]
CASES = [
    *(Case(s, a) for s in ("openai_chat", "openai_responses", "anthropic_messages") for a in ((), STREAM)),
    *(Case(s, (), MALFORMED, says="So") for s in ("openai_chat", "openai_responses", "anthropic_messages")),
    *(Case("openai_agents", a) for a in ((), STREAM, ("--responses",), ("--responses", *STREAM))),
    *(Case("autogen", a) for a in ((), STREAM)),
    *(Case("langgraph", a) for a in ((), STREAM)),
    *(Case("litellm", a) for a in ((), STREAM)),
    Case("pydantic_ai"),
    Case("smolagents", (), SMOL, exact=False),
    Case("mini_swe_agent", (), MINI),
]


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="needs `make harnesses`")
@pytest.mark.parametrize("case", CASES, ids=str)
async def test_harness(case: Case, tmp_path: Path) -> None:
    async with (
        ScriptedEngine(TOKENIZER, case.replies) as engine,
        proxied(tmp_path, engine.endpoint(TINY, max_model_len=65536)) as gateway,
    ):
        said = await run(gateway, case)
        calls = await gateway.calls()
        report(case.script, case.arguments, [c.continuity for c in calls])
        assert re.search(case.says, said), said
        assert len(calls) == len(engine.sampled) >= 2
        assert all(c.delivered and c.trainable for c in calls)
        assert [c.sampled_ids for c in calls] == engine.sampled
        assert calls[0].continuity == "first"
        if case.exact:
            assert {c.continuity for c in calls[1:]} == {"exact"}
        rollout = await gateway.gateway.store.get_rollout(gateway.rollout_id)
        rows, dropped = make_rows(build_trajectory(finished_rollout(rollout, [], calls)))
        assert sum(row.trained_tokens for row in rows) == sum(map(len, engine.sampled)) and not +dropped
        if case.exact:
            assert len(rows) == 1


@pytest.mark.slow
@pytest.mark.skipif(not NPM.exists(), reason="needs npm, then `make harnesses`")
@pytest.mark.parametrize("harness", HARNESSES, ids=lambda harness: harness.binary)
async def test_npm_harness(harness: Harness, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    async with (
        ScriptedEngine(TOKENIZER, reply_of(harness)) as engine,
        proxied(tmp_path, engine.endpoint(TINY, max_model_len=1 << 20)) as gateway,
    ):
        argv, more = harness.start(gateway, NPM / harness.binary, tmp_path)
        said = await ended_well(argv, {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **more}, tmp_path)
        calls = await gateway.calls()
        report(harness.name, ["--stream"], [c.continuity for c in calls])
        assert "hello 42" in said
        assert sorted(c.sampled_ids for c in calls) == sorted(engine.sampled)
        assert all(c.delivered for c in calls)
        continuity = [c.continuity for c in calls]
        assert continuity.count("exact") == 2 and set(continuity) == {"first", "exact"}


async def run(gateway: Proxied, case: Case) -> str:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        "TASK": "Find the number.",
        "TOOLS": json.dumps(TOOLS),
        "OPENAI_BASE_URL": gateway.base(),
        "OPENAI_API_KEY": "k",
        "ANTHROPIC_BASE_URL": gateway.base(family="anthropic"),
        "ANTHROPIC_API_KEY": "k",
    }
    argv = [str(PYTHON), str(HERE / "harnesses" / f"{case.script}.py"), *case.arguments]
    return await ended_well(argv, environment, HERE)


async def ended_well(argv: list[str], environment: dict[str, str], cwd: Path) -> str:
    """What the harness printed; asserts that it ended well."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        cwd=cwd,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), 400)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, said.decode(errors="replace")[-3000:]
    return said.decode(errors="replace")


def report(harness: str, arguments: Sequence[str], continuity: list[str]) -> None:
    if "HARNESS_REPORT" in os.environ:
        with open(os.environ["HARNESS_REPORT"], "a") as file:
            row = {"harness": harness, "arguments": list(arguments), "continuity": continuity}
            file.write(json.dumps(row) + "\n")
