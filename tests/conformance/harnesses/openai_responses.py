"""The official client, a loop of tool calls over Responses."""

import json
import os
import sys

import openai

client = openai.OpenAI()
tools = [{"type": "function", "strict": False, **tool["function"]} for tool in json.loads(os.environ["TOOLS"])]
items = [{"role": "user", "content": os.environ["TASK"]}]
while True:
    ask = {"model": "any", "instructions": "Be brief.", "input": items, "tools": tools, "store": False}
    if "--stream" in sys.argv:
        with client.responses.stream(**ask) as stream:
            for _ in stream:
                pass
            answer = stream.get_final_response()
    else:
        answer = client.responses.create(**ask)
    items += answer.output
    calls = [item for item in answer.output if item.type == "function_call"]
    if not calls:
        print(answer.output_text)
        break
    for call in calls:
        output = f"found {json.loads(call.arguments).get('query')} é"
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
