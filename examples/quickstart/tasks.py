"""Write the calculator task's questions: train.jsonl and eval.jsonl, the same for the same seed.

No question of eval.jsonl is in train.jsonl, and none comes twice. A line is
{"question", "expression", "answer", "data_id"}; the expression is one right way to compute the answer.

python examples/quickstart/tasks.py --out DIR --train 512 --eval 48 --seed 0
"""

import argparse
import json
import random
from pathlib import Path
from typing import TypedDict

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry")
THINGS = ("apples", "books", "coins", "marbles", "pencils", "shells", "stamps", "stickers")


class Task(TypedDict):
    question: str
    expression: str
    answer: int
    data_id: str


def draw(rng: random.Random) -> tuple[str, str, int]:
    """(question, expression, answer) of one of the three forms: gets more, loses, boxes with some in each."""
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    form = rng.randrange(3)
    a, b = rng.randint(11, 60), rng.randint(11, 60)
    if form == 0:
        question = f"{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?"
        return question, f"{a}+{b}", a + b
    if form == 1:
        a, b = max(a, b), min(a, b)
        question = f"{name} has {a} {things} and loses {b}. How many {things} does {name} have now?"
        return question, f"{a}-{b}", a - b
    boxes, each = rng.randint(3, 10), rng.randint(3, 10)
    question = (
        f"{name} has {a} {things} and buys {boxes} boxes with {each} {things} each. "
        f"How many {things} does {name} have now?"
    )
    return question, f"{a}+{boxes}*{each}", a + boxes * each


def make(train: int, held_out: int, seed: int) -> tuple[list[Task], list[Task]]:
    """Distinct tasks for training and for evaluation."""
    rng = random.Random(seed)
    seen: set[str] = set()
    tasks: dict[str, list[Task]] = {"eval": [], "train": []}
    for split, count in (("eval", held_out), ("train", train)):
        while len(tasks[split]) < count:
            question, expression, answer = draw(rng)
            if question not in seen:
                seen.add(question)
                data_id = f"{split}-{len(tasks[split]):04d}"
                tasks[split].append(Task(question=question, expression=expression, answer=answer, data_id=data_id))
    return tasks["train"], tasks["eval"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write train.jsonl and eval.jsonl of the calculator task.")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder to write to")
    parser.add_argument("--train", type=int, default=512, help="number of training questions")
    parser.add_argument("--eval", type=int, default=48, help="number of held-out questions")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    splits = zip(("train", "eval"), make(options.train, options.eval, options.seed), strict=True)
    for split, tasks in splits:
        path = options.out / f"{split}.jsonl"
        path.write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")
        print(f"{path}: {len(tasks)} questions")


if __name__ == "__main__":
    main()
