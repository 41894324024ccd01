"""The calculator task with the torch backend alone: a harness in this process, no gateway, no controller.

So that a benchmark of the trainer's mathematics measures the mathematics.
"""

import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from harnessrl.config import Config
from harnessrl.engine.model import load_tokenizer
from harnessrl.engine.sampling import Sampling
from harnessrl.schemas import Call, Json
from harnessrl.trainer.backends.serving import Embedded
from harnessrl.trainer.backends.torch import TorchBackend
from harnessrl.trainer.rollout import FinishedRollout

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "assets" / "tiny"
sys.path.insert(0, str(ROOT / "examples" / "quickstart"))

from calculator import calculate  # noqa: E402
from reward import grade  # noqa: E402
from tasks import Task, make  # noqa: E402

__all__ = ["TINY", "Episode", "Policy", "Task", "grade", "prompt_of", "questions"]

SYSTEM = (
    "Solve the problem with the calculator. First reply only CALC(expression). "
    "After the result reply only ANSWER(number)."
)


class Policy:
    """A model behind the torch backend, sampled from straight from its engine."""

    def __init__(self, sections: Json, path: str = str(TINY)):
        model = {"path": path, "renderer": {"name": "chatml"}}
        engine = {"max_len": 256, "max_batch": 64}
        self.config = Config.model_validate({"model": model, "engine": engine} | sections)
        self.backend = TorchBackend(self.config)
        serving = self.backend.serving
        assert isinstance(serving, Embedded)
        self._engine = serving.engine
        self.tokenizer = load_tokenizer(path)

    def close(self) -> None:
        self.backend.close()

    def sample(self, prompts: Sequence[list[int]], max_tokens: int) -> list[tuple[list[int], list[float], str]]:
        """Ids, log-probabilities and finish reason of an answer to each prompt."""
        engine = self._engine
        answers = engine.generate(prompts, Sampling(max_tokens, stop_token_ids=engine.eos_token_ids))
        return [(answer.token_ids, answer.logprobs, answer.finish_reason) for answer in answers]

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def attempt(self, episodes: Sequence["Episode"]) -> list[float]:
        """Each episode's next attempt at its task, from a fresh context: both turns. Returns the grades."""
        prompts = [self.ids(prompt_of(episode.task)) for episode in episodes]
        turns: list[list[dict]] = [[] for _ in episodes]
        going = list(range(len(episodes)))
        for max_tokens in (16, 12):
            answers = self.sample([prompts[i] for i in going], max_tokens)
            still = []
            for i, (ids, logprobs, reason) in zip(going, answers, strict=True):
                episodes[i].record(prompts[i], ids, logprobs, reason, self.backend.version)
                text = self.text(ids)
                turns[i].append({"text": text, "finished": reason == "stop"})
                call = re.fullmatch(r"CALC\((.+)\)", text)
                if call and reason == "stop":
                    result = self.ids(f"\n<|im_start|>user\n{_result(call[1])}<|im_end|>\n<|im_start|>assistant\n")
                    prompts[i] = [*prompts[i], *ids, *result]
                    still.append(i)
            going = still
        return [grade(t, float(e.task["answer"])) for t, e in zip(turns, episodes, strict=True)]

    def accuracy(self, tasks: Sequence[Task], repeats: int = 4) -> float:
        """Share of attempts that solve their task, `repeats` of each."""
        grades = self.attempt([Episode("eval", task) for task in tasks for _ in range(repeats)])
        return float(np.mean([grade == 1 for grade in grades]))


def prompt_of(task: Task) -> str:
    turns = (("system", SYSTEM), ("user", task["question"]))
    said = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    return f"{said}<|im_start|>assistant\n"


def _result(expression: str) -> str:
    try:
        return f"RESULT({calculate(expression):g})"
    except ValueError:
        return "ERROR"


@dataclass
class Episode:
    """One rollout of the harness in this process."""

    rollout_id: str
    task: Task
    reward: float = 0.0
    calls: list[Call] = field(default_factory=list)
    prompts: dict[str, np.ndarray] = field(default_factory=dict)

    def record(self, prompt: list[int], ids: list[int], logprobs: list[float], reason: str, version: int) -> None:
        call_id = f"{self.rollout_id}-{len(self.calls)}"
        self.prompts[call_id] = np.array(prompt, dtype=np.int32)
        self.calls.append(
            Call(
                call_id=call_id,
                rollout_id=self.rollout_id,
                attempt_id="0",
                index=len(self.calls),
                mode="train",
                model="policy",
                dialect="none",
                new_prompt_ids=prompt,
                sampled_ids=ids,
                logprobs=logprobs,
                versions=[(version, len(ids))],
                temperature=1.0,
                finish_reason=reason,
                delivered=True,
                trainable=True,
                continuity="first",
                started_at=float(len(self.calls)),
                latency_ms=0.0,
            )
        )

    def finished(self, group_id: str) -> FinishedRollout:
        return FinishedRollout(
            self.rollout_id, group_id, "succeeded", None, None, self.reward, {}, self.calls, self.prompts
        )


def questions(number: int, held_out: int, seed: int) -> tuple[list[Task], list[Task]]:
    """Training tasks in an order of their own for each seed, and the same held-out ones for all."""
    train, evaluation = make(number, held_out, 0)
    random.Random(seed).shuffle(train)
    return train, evaluation
