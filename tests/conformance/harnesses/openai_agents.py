"""The OpenAI Agents SDK, over Chat Completions or (--responses) Responses."""

import asyncio
import os
import sys

import agents

agents.set_tracing_disabled(True)
agents.set_default_openai_api("responses" if "--responses" in sys.argv else "chat_completions")


@agents.function_tool
def lookup(query: str) -> str:
    """Look something up."""
    return f"found {query} é"


async def main() -> None:
    agent = agents.Agent(name="helper", instructions="Be brief.", tools=[lookup], model="any")
    if "--stream" in sys.argv:
        result = agents.Runner.run_streamed(agent, os.environ["TASK"])
        async for _ in result.stream_events():
            pass
    else:
        result = await agents.Runner.run(agent, os.environ["TASK"])
    print(result.final_output)


asyncio.run(main())
