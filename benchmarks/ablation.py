"""Does it matter that advantage and normalisation belong to the rollout? Three ways, eight seeds, one harness.

The harness tries a question up to four times and drops its history before each new try, as coding agents do that
test their work: a rollout that fails has four rows, one that succeeds at once has one. Its reward is 1, less 0.25
for each further try, and 0 for failure. Ways: everything per rollout (ours); the advantage per rollout, but the
loss a mean over rows; both per row, each row being a sample of its own in the baseline and in the mean.

Prints the held-out share solved in one attempt, writes ablation.json and ablation.png to `--out`.
"""

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.kit.calculator_policy import Episode, Policy, Task, questions
from harnessrl.trainer.batch import Group, Update, build_update

TRIES = 4
WAYS = {
    "rollout": ("rollout_mean", False),
    "rollout, mean over rows": ("row_mean", False),
    "row": ("row_mean", True),
}
"""Aggregation, and whether the advantage is taken over rows."""


def roll_out(policy: Policy, episodes: Sequence[Episode]) -> None:
    going = list(episodes)
    for attempt in range(TRIES):
        grades = policy.attempt(going)
        for episode, grade in zip(going, grades, strict=True):
            episode.reward = 1 - 0.25 * attempt if grade == 1 else 0.0
        going = [episode for episode, grade in zip(going, grades, strict=True) if grade < 1]
        if not going:
            return


def advantages_over_rows(update: Update, rewards: dict[str, float]) -> None:
    """What an implementation does that takes each row for a sample of its own."""
    for group_id in {row.group_id for row in update.rows}:
        rows = [row for row in update.rows if row.group_id == group_id]
        rewards_R = np.array([rewards[row.rollout_id] for row in rows])
        std = rewards_R.std(ddof=1) if len(rows) > 1 else 0.0
        for row, advantage in zip(rows, (rewards_R - rewards_R.mean()) / (std + 1e-6), strict=True):
            row.advantages_T[row.mask_T] = advantage


def run(way: str, seed: int, options: argparse.Namespace, train: list[Task], held_out: list[Task]) -> list[dict]:
    torch.set_num_threads(1)
    aggregation, over_rows = WAYS[way]
    policy = Policy(
        {
            "seed": seed,
            "algorithm": {"aggregation": aggregation},
            "optim": {"lr": options.lr},
            "train": {"micro_batch_tokens": 2048, "share_prefixes": True},
        }
    )
    curve = [{"update": 0, "solved": policy.accuracy(held_out)}]
    for number in range(options.updates):
        first = number * options.questions
        tasks = [train[i % len(train)] for i in range(first, first + options.questions)]
        groups, episodes = [], []
        for t, task in enumerate(tasks):
            group = [Episode(f"{number}-{t}-{s}", task) for s in range(options.samples)]
            groups.append(group)
            episodes += group
        roll_out(policy, episodes)
        update = build_update(
            [Group(f"g{t}", [e.finished(f"g{t}") for e in group]) for t, group in enumerate(groups)],
            policy.config.algorithm,
            seed=number,
        )
        if over_rows:
            advantages_over_rows(update, {episode.rollout_id: episode.reward for episode in episodes})
        metrics = policy.backend.update(update)
        point = {"update": number + 1, "reward": float(np.mean([e.reward for e in episodes]))}
        point |= {"entropy": metrics["policy/entropy"], "rows": len(update.rows)}
        if (number + 1) % options.eval_every == 0:
            point["solved"] = policy.accuracy(held_out)
        curve.append(point)
    policy.close()
    return curve


def draw(curves: dict[str, list[list[dict]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    for axis, name, label in zip(
        axes, ("solved", "entropy"), ("held-out, solved in one attempt", "entropy"), strict=True
    ):
        for way, runs in curves.items():
            points = [[(p["update"], p[name]) for p in curve if name in p] for curve in runs]
            x = [update for update, _ in points[0]]
            y_SU = np.array([[value for _, value in curve] for curve in points])
            axis.plot(x, y_SU.mean(0), label=way)
            axis.fill_between(x, y_SU.min(0), y_SU.max(0), alpha=0.15)
        axis.set_xlabel("update")
        axis.set_title(label)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/ablation"))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--updates", type=int, default=32)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--eval-every", type=int, default=4)
    parser.add_argument("--lr", type=float, default=5e-4)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console(width=100)
    curves: dict[str, list[list[dict]]] = {way: [] for way in WAYS}
    for seed in range(options.seeds):
        train, held_out = questions(512, 96, seed)
        for way in WAYS:
            began = time.monotonic()
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
                curves[way].append(fresh.submit(run, way, seed, options, train, held_out).result())
            solved = [p["solved"] for p in curves[way][-1] if "solved" in p]
            shown = " ".join(f"{s:.2f}" for s in solved)
            console.print(f"seed {seed}, {way}: {shown} ({time.monotonic() - began:.0f} s)")
    (options.out / "ablation.json").write_text(json.dumps(curves))
    draw(curves, options.out / "ablation.png")

    table = Table("baseline and normalisation", "before", "after", "mean over updates", "ours less this, after")
    solved = {
        way: np.array([[p["solved"] for p in curve if "solved" in p] for curve in runs])
        for way, runs in curves.items()
    }
    for way, solved_SU in solved.items():
        before, after, mean = solved_SU[:, 0], solved_SU[:, -1], solved_SU.mean(1)
        less = solved["rollout"][:, -1] - after
        error = less.std(ddof=1) / len(less) ** 0.5
        table.add_row(
            way, f"{before.mean():.2f}", _spread(after), _spread(mean), f"{less.mean():+.3f} ± {error:.3f}"
        )
    console.print(table)


def _spread(values_S: np.ndarray) -> str:
    return f"{values_S.mean():.2f} ± {values_S.std(ddof=1):.2f}"


if __name__ == "__main__":
    main()
