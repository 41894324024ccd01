"""The prompt of a turn that goes on from a long history: continued, against rendered afresh.

A conversation of tool calls grows to the given number of tokens; timed is the CPU time from the parsed request to
the ids of its last prompt, of which some 200 tokens are new. Target: under 3 ms at 32k.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from harnessrl.gateway.chat.canonical import Answer, Usage
from harnessrl.gateway.chat.continuation import Memory
from harnessrl.gateway.chat.renderer import load_chat
from harnessrl.gateway.dialects.openai_chat import OpenAIChat

TINY = Path(__file__).parents[1] / "tests" / "assets" / "tiny"
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>'


def measure(tokens: int, turns: int = 50, repeats: int = 7) -> dict[str, float]:
    chat, memory, dialect = load_chat(str(TINY), {"name": "chatml"}), Memory(), OpenAIChat()
    sampled = np.asarray(chat.tokenizer.encode(CALL), dtype=np.int32)
    words = "word " * (tokens // turns // len(chat.tokenizer.encode("word ")))
    messages: list[Any] = [{"role": "user", "content": "Go"}]
    for turn in range(turns):
        request = dialect.parse({"messages": messages, "tools": TOOLS})
        prompt = memory.prompt(chat, request)
        whole = chat.parse(sampled.tolist(), prompt.ids, TOOLS, f"c{turn}")
        answer = Answer(whole.content, whole.reasoning, whole.tool_calls, "stop", Usage(0, 0))
        memory.add(f"c{turn}", request, prompt.ids, prompt.parent, sampled, answer)
        call_id = answer.tool_calls[0].id
        content = words if turn < turns - 1 else words[:500]
        messages = [*messages, answer.message(), {"role": "tool", "tool_call_id": call_id, "content": content}]
    request = dialect.parse({"messages": messages, "tools": TOOLS})
    continued = min(_milliseconds(lambda: memory.prompt(chat, request)) for _ in range(repeats))
    afresh = min(_milliseconds(lambda: chat.render(request.messages, TOOLS)) for _ in range(repeats))
    assert memory.prompt(chat, request).continuity == "exact"
    length = len(memory.prompt(chat, request).ids)
    return {"tokens": length, "continued_ms": round(continued, 2), "afresh_ms": round(afresh, 2)}


def _milliseconds(work: Any) -> float:
    begun = time.process_time()
    work()
    return (time.process_time() - begun) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="32k only")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [measure(tokens) for tokens in ((32_000,) if arguments.quick else (8_000, 32_000, 128_000))]
    if arguments.json:
        print(json.dumps(rows))
        return
    print(f"{'tokens':>8} {'continued ms':>13} {'afresh ms':>10}")
    for row in rows:
        print(f"{row['tokens']:>8} {row['continued_ms']:>13.2f} {row['afresh_ms']:>10.2f}")


if __name__ == "__main__":
    main()
