"""OpenHands' default agent, in a fresh directory."""

import os
import sys
import tempfile

sys.path.pop(0)  # or this file would be imported in place of the library

from openhands.sdk import LLM, Conversation
from openhands.sdk.conversation.response_utils import get_agent_final_response
from openhands.tools.preset.default import get_default_agent

streamed = "--stream" in sys.argv
llm = LLM(model="openai/any", base_url=os.environ["OPENAI_BASE_URL"], api_key="k", stream=streamed)
with tempfile.TemporaryDirectory() as workspace:
    callbacks = [lambda chunk: None] if streamed else None
    conversation = Conversation(
        get_default_agent(llm, cli_mode=True), workspace=workspace, token_callbacks=callbacks
    )
    conversation.send_message(os.environ["TASK"])
    conversation.run()
    print(get_agent_final_response(conversation.state.events))
    conversation.close()
