"""A smolagents agent with a tool."""

import os
import sys

sys.path.pop(0)  # or this file would be imported in place of the library

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def lookup(query: str) -> str:
    """Look something up.

    Args:
        query: What to look for.
    """
    return f"found {query} é"


model = OpenAIServerModel("any", api_base=os.environ["OPENAI_BASE_URL"], api_key="k")
print(ToolCallingAgent([lookup], model, max_steps=5).run(os.environ["TASK"]))
