"""Where two rollouts first part: in what was asked, in an answer, in tokens only, or in how many calls."""

import json
from pathlib import Path

import pytest
from stored import ASKED, CALLING, RESULT, make_store, says

from harnessrl.cli.diff import diff

START = (ASKED, CALLING)
END = ([*ASKED, CALLING, RESULT], says("2"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "rollouts.db"
    other_result = [*ASKED, CALLING, {**RESULT, "content": "3"}]
    spaced = {**CALLING, "content": " "}
    make_store(
        path,
        {"id": "a", "turns": [START, END], "reward": 1.0},
        {"id": "same", "turns": [(ASKED, spaced), END], "reward": 1.0},
        {"id": "other-answer", "turns": [(ASKED, says("3"))], "reward": 0.0},
        {"id": "other-result", "turns": [START, (other_result, says("3"))], "reward": 0.0},
        {"id": "shorter", "turns": [START], "reward": 0.0},
        {"id": "other-tokens", "turns": [START, END], "reward": 1.0, "extra_ids": [5]},
    )
    return path


@pytest.mark.parametrize(
    ("other", "where", "a", "b"),
    [
        ("other-answer", "call 0, answer", 'assistant: add({"x": 1})', "assistant: 3"),
        ("other-result", "call 1, message 3", "tool: 2", "tool: 3"),
        ("shorter", "call 1", "2", "(no such call)"),
        ("other-tokens", "call 0, token 2 of 4 and 5", "id 100", "id 5"),
    ],
)
def test_the_first_difference(
    store: Path, other: str, where: str, a: str, b: str, capsys: pytest.CaptureFixture[str]
) -> None:
    diff("a", other, store=store, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["first_difference"] == {"where": where, "a": a, "b": b}
    assert said["facts"]["calls"][0] == 2


def test_equal_rollouts_are_said_to_be_equal(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    diff("a", "same", store=store)
    assert "the same, token by token" in capsys.readouterr().out
