"""A LangChain agent with a search tool: the chunks that the tool returns are already encoded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, wrap_model_call
from langchain.tools import ToolRuntime, tool
from langchain_core.messages import ToolMessage
from langchain_kvrag import ChatBlend, FaissVectorStore, KVWarmVectorStore, SentenceTransformerEmbeddings

MODEL = "reader"  # the bundled model; or for example "Qwen/Qwen2.5-1.5B-Instruct"
PATHS = sorted((Path(__file__).parent / "corpus").glob("*.txt"))

# "off": no automatic full prefill, which is faster for prompts this short
llm = ChatBlend(model=MODEL, store="kv", max_tokens=64, temperature=0, controller="off")
vectors = KVWarmVectorStore(FaissVectorStore(SentenceTransformerEmbeddings()), llm)
vectors.add_texts([path.read_text() for path in PATHS], ids=[path.name for path in PATHS])  # also encodes them


@tool
def search(runtime: ToolRuntime) -> str:
    """Find articles that help to answer the user's question."""
    # a larger model can choose the search query: search(query: str)
    question = runtime.state["messages"][0].text
    return "\n\n".join(document.page_content for document in vectors.similarity_search(question, k=3))


@wrap_model_call
def search_first(request: ModelRequest, handler: Callable[[ModelRequest], Any]) -> Any:
    """Force a call of the tool as the first step, enforced by a grammar."""
    has_searched = any(isinstance(message, ToolMessage) for message in request.messages)
    return handler(request if has_searched else request.override(tool_choice="any"))


agent = create_agent(llm, [search], middleware=[search_first])
state = agent.invoke({"messages": [("human", "What does Ingla play?")]})
for message in state["messages"]:
    message.pretty_print()

usage = state["messages"][-1].usage_metadata
print(f"\n{usage['input_token_details']['cache_read']} of {usage['input_tokens']} prompt tokens of the answer reused")
