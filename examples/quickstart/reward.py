"""Grades one run of the calculator agent and reports the reward, from 0 to 1.

A well-formed call earns 0.1, one that can be calculated 0.1 more, the right value 0.3 more; then a
well-formed answer earns 0.1 and the right answer 0.4. A turn that did not end by itself is malformed.
"""

import json
import os
import re
import sys
import urllib.request

from calculator import calculate


def grade(turns: list[dict], answer: float) -> float:
    call = re.fullmatch(r"CALC\((.+)\)", turns[0]["text"])
    if not (call and turns[0]["finished"]):
        return 0.0
    try:
        value = calculate(call[1])
    except ValueError:
        return 0.1
    reward = 0.5 if value == answer else 0.2
    said = re.fullmatch(r"ANSWER\((-?[\d.]+)\)", turns[1]["text"]) if len(turns) > 1 else None
    if said and turns[1]["finished"]:
        reward += 0.5 if said[1] == f"{answer:g}" else 0.1
    return round(reward, 1)


def report(reward: float) -> None:
    request = urllib.request.Request(
        os.environ["AGL_EVENT_URL"],
        json.dumps({"event_type": "reward", "data": {"value": reward}}).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {os.environ['AGL_KEY']}"},
    )
    urllib.request.urlopen(request, timeout=60).read()


if __name__ == "__main__":
    with open("transcript.json") as file:
        report(grade(json.load(file), float(sys.argv[1])))
