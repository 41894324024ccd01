"""The official client, a loop of tool calls over Chat Completions."""

import json
import os
import sys

import openai

client = openai.OpenAI()
tools = json.loads(os.environ["TOOLS"])
messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": os.environ["TASK"]}]
while True:
    ask = {"model": "any", "messages": messages, "tools": tools, "temperature": 0.3}
    if "--stream" in sys.argv:
        with client.chat.completions.stream(**ask) as stream:
            for _ in stream:
                pass
            message = stream.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**ask).choices[0].message
    messages.append(message)
    if not message.tool_calls:
        print(message.content)
        break
    for call in message.tool_calls:
        query = json.loads(call.function.arguments).get("query")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"found {query} é"})
