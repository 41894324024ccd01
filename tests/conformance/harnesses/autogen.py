"""An AutoGen assistant with a tool."""

import asyncio
import os
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

streamed = "--stream" in sys.argv
info = ModelInfo(vision=False, function_calling=True, json_output=False, family="unknown", structured_output=False)
model = OpenAIChatCompletionClient(model="any", base_url=os.environ["OPENAI_BASE_URL"], model_info=info)


async def lookup(query: str) -> str:
    """Look something up."""
    return f"found {query} é"


async def main() -> None:
    agent = AssistantAgent(
        "helper",
        model,
        tools=[lookup],
        system_message="Be brief.",
        max_tool_iterations=6,
        model_client_stream=streamed,
    )
    result = await agent.run(task=os.environ["TASK"])
    print(result.messages[-1].content)
    await model.close()


asyncio.run(main())
