"""A loop of tool calls through LiteLLM."""

import json
import os
import sys

sys.path.pop(0)  # or this file would be imported in place of the library

import litellm

messages = [{"role": "user", "content": os.environ["TASK"]}]
while True:
    ask = {"model": "openai/any", "messages": messages, "tools": json.loads(os.environ["TOOLS"])}
    if "--stream" in sys.argv:
        answer = litellm.stream_chunk_builder(list(litellm.completion(**ask, stream=True)))
    else:
        answer = litellm.completion(**ask)
    message = answer.choices[0].message
    messages.append(message)
    if not message.tool_calls:
        print(message.content)
        break
    for call in message.tool_calls:
        query = json.loads(call.function.arguments).get("query")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"found {query} é"})
