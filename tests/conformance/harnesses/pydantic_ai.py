"""A Pydantic AI agent with a tool."""

import os
import sys

sys.path.pop(0)  # or this file would be imported in place of the library

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

agent = Agent(OpenAIChatModel("any"), instructions="Be brief.")


@agent.tool_plain
def lookup(query: str) -> str:
    """Look something up."""
    return f"found {query} é"


print(agent.run_sync(os.environ["TASK"]).output)
