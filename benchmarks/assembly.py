"""From captured calls to packed micro-batches: prompt tokens per second on one core, and peak memory.

Rollouts of 50 turns that grow to 32k tokens, in groups of 8 that share their task's prompt, as the gateway sends
them (each prompt as the difference to its parent). Timed: prompts put together, trajectory, rows, credit,
advantages, weights, and the layout of micro-batches; parsing of the JSON before that is shown by itself.
`--fragment` renders every third turn afresh, so that histories fork.
"""

import argparse
import json
import resource
import time

import numpy as np
from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table

from harnessrl.schemas import Call, Event, Metadata, Rollout, RolloutConfig, RolloutStatus
from harnessrl.trainer.algorithm import AlgorithmConfig
from harnessrl.trainer.batch import Group, build_update, plan_micro_batches
from harnessrl.trainer.pack import pack
from harnessrl.trainer.rollout import finished_rollout

TURNS, TOKENS, SAMPLED, PROMPT, GROUP = 50, 32_000, 200, 2_000, 8


def calls_of(rng: np.random.Generator, prompt: list[int], rollout_id: str, fragment: bool) -> list[Call]:
    new = (TOKENS - PROMPT - TURNS * SAMPLED) // (TURNS - 1)
    calls: list[Call] = []
    length = 0
    for i in range(TURNS):
        parent = f"{rollout_id}-{i - 1}" if i else None
        # A fork leaves the history just before the last answer's end, as a template that drops reasoning does.
        shared = length - (SAMPLED // 2 if fragment and i % 3 == 2 else 0)
        added = prompt if i == 0 else rng.integers(150_000, size=new + length - shared).tolist()
        length = shared + len(added) + SAMPLED
        calls.append(
            Call(
                call_id=f"{rollout_id}-{i}",
                rollout_id=rollout_id,
                attempt_id="0",
                index=i,
                mode="train",
                model="policy",
                dialect="openai.chat",
                parent=parent,
                shared=shared,
                new_prompt_ids=added,
                sampled_ids=rng.integers(150_000, size=SAMPLED).tolist(),
                logprobs=(-rng.random(SAMPLED)).tolist(),
                versions=[(3, SAMPLED)],
                temperature=1.0,
                finish_reason="stop",
                delivered=True,
                trainable=True,
                continuity="exact",
                started_at=float(i),
                latency_ms=1.0,
            )
        )
    return calls


def answered(rollout_id: str, group_id: str) -> tuple[Rollout, list[Event]]:
    status = RolloutStatus(state="succeeded", created_at=0, updated_at=0)
    metadata = Metadata(group_id=group_id)
    rollout = Rollout(
        rollout_id=rollout_id, input={}, is_train=True, config=RolloutConfig(), metadata=metadata, status=status
    )
    reward = {"value": float(rollout_id[-1] in "02468")}
    return rollout, [Event(event_type="reward", rollout_id=rollout_id, attempt_id="0", timestamp=0, data=reward)]


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--groups", type=int, default=4)
    arguments.add_argument("--fragment", action="store_true")
    arguments.add_argument("--quick", action="store_true", help="one group")
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    if options.quick:
        options.groups = 1
    rng = np.random.default_rng(0)
    wire = TypeAdapter(list[Call])
    captured = {}
    for g in range(options.groups):
        prompt = rng.integers(150_000, size=PROMPT).tolist()
        for r in range(GROUP):
            calls = calls_of(rng, prompt, f"g{g}r{r}", options.fragment)
            captured[f"g{g}r{r}"] = (f"g{g}", wire.dump_json(calls))

    times: dict[str, float] = {}
    clock = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal clock
        times[name] = time.perf_counter() - clock
        clock = time.perf_counter()

    received = {rollout_id: wire.validate_json(body) for rollout_id, (_, body) in captured.items()}
    lap("parse JSON")
    before = peak_mb()
    groups: dict[str, Group] = {}
    for rollout_id, (group_id, _) in captured.items():
        finished = finished_rollout(*answered(rollout_id, group_id), received[rollout_id])
        groups.setdefault(group_id, Group(group_id, [])).rollouts.append(finished)
    lap("whole prompts")
    prompt_tokens = sum(len(p) for group in groups.values() for r in group.rollouts for p in r.prompts.values())
    update = build_update(list(groups.values()), AlgorithmConfig(), seed=0)
    lap("trajectory … weights")
    packs = pack(update.rows, 4 * TOKENS)
    lap("tree packing")
    plan_micro_batches([len(row) for row in update.rows], 4 * TOKENS, ranks=8)
    lap("plan over 8 ranks")

    assembled = sum(seconds for name, seconds in times.items() if name != "parse JSON")
    if options.json:
        print(json.dumps({"prompt_tokens": prompt_tokens, "seconds": times, "peak_mb": peak_mb()}))
        return
    table = Table("stage", "seconds", "million prompt tokens/s")
    for name, seconds in [*times.items(), ("calls → packed batch", assembled)]:
        table.add_row(name, f"{seconds:.3f}", f"{prompt_tokens / seconds / 1e6:,.1f}")
    console = Console()
    console.print(table)
    plain, packed = sum(len(row) for row in update.rows), sum(len(p) for p in packs)
    console.print(f"{len(captured)} rollouts, {TURNS} turns each, {prompt_tokens:,} prompt tokens; one process")
    console.print(f"{len(update.rows)} rows of {plain:,} tokens, {update.metrics['tokens_trained']:,.0f} trained")
    console.print(f"packed as trees: {packed:,} tokens ({packed / plain:.0%})")
    console.print(f"peak memory: {peak_mb():,.0f} MB, of which {peak_mb() - before:,.0f} MB for assembly")


if __name__ == "__main__":
    main()
