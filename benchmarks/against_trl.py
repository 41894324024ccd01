"""TRL's GRPOTrainer and ours, side by side on the CPU: the same model, questions in the same order, group size,
answer length, loss, optimizer and number of updates; one after the other, each in a process of its own.

The task has one turn, as TRL's has: reply CALC(expression); 1 for the right value, 0.2 for any that can be
calculated. Ours samples from the embedded engine and updates through the torch backend; TRL generates with
transformers. Needs `pip install trl`. Times per update are medians without the first two; CPU seconds are those of
all threads, and suffer less from what else runs on the machine.
"""

import argparse
import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.kit.calculator_policy import TINY, Episode, Policy, Task, calculate, prompt_of, questions
from harnessrl.engine.model import load_model, load_tokenizer
from harnessrl.trainer.batch import Group, build_update

LENGTH = 16


def reward_of(text: str, answer: float) -> float:
    call = re.fullmatch(r"CALC\((.+)\)", text)
    try:
        return 0.0 if call is None else 1.0 if calculate(call[1]) == answer else 0.2
    except ValueError:
        return 0.0


def tasks_of(options: argparse.Namespace) -> list[Task]:
    number = options.updates * options.questions
    return questions(number, 1, options.seed)[0]


def ours(options: argparse.Namespace) -> dict:
    sections = {
        "seed": options.seed,
        "algorithm": {"importance": "none"},
        "optim": {"lr": options.lr},
        "train": {"micro_batch_tokens": options.micro_batch_tokens, "share_prefixes": True},
    }
    policy = Policy(sections, options.model)
    tasks, seconds, cpu, rewards = tasks_of(options), [], [], []
    for number in range(options.updates):
        began, cpu_began = time.monotonic(), time.process_time()
        chosen = tasks[number * options.questions : (number + 1) * options.questions]
        groups = [[Episode(f"{t}-{s}", task) for s in range(options.samples)] for t, task in enumerate(chosen)]
        episodes = [episode for group in groups for episode in group]
        prompts = [policy.ids(prompt_of(episode.task)) for episode in episodes]
        for episode, prompt, (ids, logprobs, reason) in zip(
            episodes, prompts, policy.sample(prompts, LENGTH), strict=True
        ):
            episode.record(prompt, ids, logprobs, reason, policy.backend.version)
            episode.reward = reward_of(policy.text(ids), float(episode.task["answer"]))
        finished = [Group(f"g{g}", [e.finished(f"g{g}") for e in group]) for g, group in enumerate(groups)]
        policy.backend.update(build_update(finished, policy.config.algorithm, seed=number))
        seconds.append(time.monotonic() - began)
        cpu.append(time.process_time() - cpu_began)
        rewards.append(float(np.mean([episode.reward for episode in episodes])))
    policy.close()
    return {"seconds": seconds, "cpu": cpu, "rewards": rewards}


def trls(options: argparse.Namespace) -> dict:
    from datasets import Dataset  # pyright: ignore[reportMissingImports]  (only here)
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    tokenizer = load_tokenizer(options.model)
    rewards: list[float] = []
    seconds: list[float] = []
    cpu: list[float] = []

    class Clock(TrainerCallback):
        began = cpu_began = 0.0

        def on_step_begin(self, *_, **__):
            self.began, self.cpu_began = time.monotonic(), time.process_time()

        def on_step_end(self, *_, **__):
            seconds.append(time.monotonic() - self.began)
            cpu.append(time.process_time() - self.cpu_began)

    def reward(completion_ids, answer, **_):
        texts = [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in completion_ids]
        given = [reward_of(text, float(a)) for text, a in zip(texts, answer, strict=True)]
        rewards.append(float(np.mean(given)))
        return given

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            fp16=False,
            gradient_checkpointing=False,
            seed=options.seed,
            max_steps=options.updates,
            per_device_train_batch_size=options.questions * options.samples,
            num_generations=options.samples,
            max_completion_length=LENGTH,
            temperature=1.0,
            loss_type="grpo",
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            shuffle_dataset=False,
            learning_rate=options.lr,
            lr_scheduler_type="constant",
            adam_beta1=0.9,
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=1.0,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        rows = [{"prompt": prompt_of(task), "answer": task["answer"]} for task in tasks_of(options)]
        trainer = GRPOTrainer(
            model=load_model(options.model),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    return {"seconds": seconds, "cpu": cpu, "rewards": rewards}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(TINY))
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--only", choices=list(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        torch.set_num_threads(options.threads)
        found = SIDES[options.only](options)
        found["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(found))
        return
    runs = {name: [alone(name, seed) for seed in track(range(options.seeds), name)] for name in SIDES}
    table = Table("", "s per update", "CPU s", "peak memory, MB", "reward, first 5 updates", "last 5")
    table.title = f"{Path(options.model).name}, {options.seeds} seeds"
    for name, found in runs.items():
        wall, cpu = (f"{per_update(found, clock):.2f}" for clock in ("seconds", "cpu"))
        rewards_SU = np.array([run["rewards"] for run in found])
        first, last = (
            f"{part.mean():.3f} ± {part.mean(1).std():.3f}" for part in (rewards_SU[:, :5], rewards_SU[:, -5:])
        )
        table.add_row(name, wall, cpu, f"{max(run['peak_mb'] for run in found):,.0f}", first, last)
    console = Console()
    console.print(table)
    wall, cpu = (per_update(runs["trl"], clock) / per_update(runs["ours"], clock) for clock in ("seconds", "cpu"))
    console.print(f"ours is {wall:.2f} times as fast by the clock, {cpu:.2f} times by CPU seconds")
    last_S = np.array([[np.mean(run["rewards"][-5:]) for run in runs[name]] for name in ("ours", "trl")])
    less_S = last_S[0] - last_S[1]
    error = less_S.std(ddof=1) / len(less_S) ** 0.5 if len(less_S) > 1 else float("nan")
    console.print(
        f"reward of the last 5 updates, ours less TRL's, same seed: {less_S.mean():+.3f} ± {error:.3f} (s.e.)"
    )


def alone(name: str, seed: int) -> dict:
    """One run in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.against_trl", *sys.argv[1:], "--only", name, "--seed", str(seed)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def per_update(runs: list[dict], clock: str) -> float:
    """Median over all updates but each run's first two."""
    return statistics.median(seconds for run in runs for seconds in run[clock][2:])


SIDES = {"trl": trls, "ours": ours}


if __name__ == "__main__":
    main()
