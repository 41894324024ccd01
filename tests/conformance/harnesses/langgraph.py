"""A LangGraph application: model and tools as nodes."""

import os
import sys

sys.path.pop(0)  # or this file would be imported in place of the library

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def lookup(query: str) -> str:
    """Look something up."""
    return f"found {query} é"


model = ChatOpenAI(model="any", streaming="--stream" in sys.argv).bind_tools([lookup])
graph = StateGraph(MessagesState)
graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
graph.add_node("tools", ToolNode([lookup]))
graph.add_edge(START, "model")
graph.add_conditional_edges("model", tools_condition)
graph.add_edge("tools", "model")
start = [("system", "Be brief."), ("user", os.environ["TASK"])]
print(graph.compile().invoke({"messages": start})["messages"][-1].content)
