"""The official client, a loop of tool calls over Messages."""

import json
import os
import sys

import anthropic

client = anthropic.Anthropic()
tools = [
    {"name": t["function"]["name"], "input_schema": t["function"]["parameters"]}
    for t in json.loads(os.environ["TOOLS"])
]
messages = [{"role": "user", "content": os.environ["TASK"]}]
while True:
    ask = {"model": "any", "max_tokens": 400, "system": "Be brief.", "messages": messages, "tools": tools}
    if "--stream" in sys.argv:
        with client.messages.stream(**ask) as stream:
            answer = stream.get_final_message()
    else:
        answer = client.messages.create(**ask)
    messages.append({"role": "assistant", "content": answer.content})
    calls = [block for block in answer.content if block.type == "tool_use"]
    if not calls:
        print("".join(block.text for block in answer.content if block.type == "text"))
        break
    results = [
        {"type": "tool_result", "tool_use_id": c.id, "content": f"found {c.input.get('query')} é"} for c in calls
    ]
    messages.append({"role": "user", "content": results})
