"""A two-turn calculator agent for any chat model: python agent.py "Tom has 12 apples and gets 7 more. How many?"

It finds its model through OPENAI_BASE_URL and OPENAI_API_KEY and leaves its turns in `transcript.json`.
"""

import json
import re
import sys

from calculator import calculate
from openai import OpenAI

SYSTEM = (
    "Solve the problem with the calculator. First reply only CALC(expression). "
    "After the result reply only ANSWER(number)."
)
EXAMPLE = [
    {"role": "user", "content": "Ann has 15 pens and buys 4 boxes with 6 pens each. How many pens now?"},
    {"role": "assistant", "content": "CALC(15+4*6)"},
    {"role": "user", "content": "RESULT(39)"},
    {"role": "assistant", "content": "ANSWER(39)"},
]


def main(question: str) -> None:
    client, turns = OpenAI(), []
    messages: list = [{"role": "system", "content": SYSTEM}, *EXAMPLE, {"role": "user", "content": question}]
    for max_tokens in (16, 12):
        answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=max_tokens).choices[0]
        text = answer.message.content or ""
        turns.append({"text": text, "finished": answer.finish_reason == "stop"})
        call = re.fullmatch(r"CALC\((.+)\)", text)
        if not call:
            break
        try:
            result = f"RESULT({calculate(call[1]):g})"
        except ValueError as error:
            result = f"ERROR({error})"
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": result}]
    with open("transcript.json", "w") as file:
        json.dump(turns, file)


if __name__ == "__main__":
    main(sys.argv[1])
