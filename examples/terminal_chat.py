"""Chat with a folder of .txt and .md files in the terminal, through LangChain.

    python examples/terminal_chat.py                                                # the bundled model and articles
    python examples/terminal_chat.py --model Qwen/Qwen2.5-1.5B-Instruct notes/

End with an empty line, Ctrl-C or Ctrl-D.
"""

import argparse
import sys
from pathlib import Path

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_kvrag import ChatBlend, KVWarmVectorStore, SentenceTransformerEmbeddings
from langchain_text_splitters import RecursiveCharacterTextSplitter

from kvrag import KvragError

INSTRUCTION = "Answer the question from these passages. If they do not say, say that you do not know."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent / "corpus")
    parser.add_argument("--model", default="reader", help="hub name or folder (default: the bundled model)")
    parser.add_argument("--store", default="kv", help="folder of the encoded chunks (default: kv)")
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=4)
    args = parser.parse_args()
    is_reader = args.model == "reader"  # full prefill is faster for such a small model: show blending anyway
    llm = ChatBlend(model=args.model, store=args.store, temperature=0, controller="off" if is_reader else None)
    try:
        chat(llm, warm(llm, args.folder, args.chunk_tokens), "" if is_reader else INSTRUCTION, args.top_k)
    except KvragError as error:
        sys.exit(f"terminal_chat: {error}")
    except KeyboardInterrupt:
        print()


def warm(llm: ChatBlend, folder: Path, chunk_tokens: int) -> KVWarmVectorStore:
    """Return a vector store of the folder's chunks, encoded."""
    splitter = RecursiveCharacterTextSplitter(
        chunk_size=chunk_tokens, chunk_overlap=0, length_function=lambda text: len(llm.get_token_ids(text))
    )
    documents = [
        Document(chunk, id=f"{path.relative_to(folder)}#{number}", metadata={"source": path.name})
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in (".txt", ".md") and path.is_file()
        for number, chunk in enumerate(splitter.split_text(path.read_text(encoding="utf-8", errors="replace")))
    ]
    if not documents:
        sys.exit(f"terminal_chat: {folder} contains no .txt or .md file")
    vectors = KVWarmVectorStore(InMemoryVectorStore(SentenceTransformerEmbeddings()), llm)
    for start in range(0, len(documents), 64):
        vectors.add_documents(documents[start : start + 64])
        print(f"\rwarmed {min(start + 64, len(documents))} of {len(documents)} chunks", end="", file=sys.stderr)
    print("\nask a question; an empty line ends the chat", file=sys.stderr)
    return vectors


def chat(llm: ChatBlend, vectors: KVWarmVectorStore, instruction: str, top_k: int) -> None:
    history: list[BaseMessage] = []  # questions and answers; passages are retrieved again for every question
    while question := ask():
        retrieved = vectors.similarity_search(question, k=top_k)
        passages = "\n\n".join(document.page_content for document in retrieved)
        message = HumanMessage(f"{instruction}\n\n{passages}\n\nQuestion: {question}".strip())
        answer = AIMessageChunk("")
        for piece in llm.stream([*history, message]):
            print(piece.text if answer.text else piece.text.lstrip(), end="", flush=True)
            answer += piece
        history = [*history, HumanMessage(f"Question: {question}"), AIMessage(answer.text.strip())][-8:]
        report = answer.response_metadata["kvrag"]
        print(
            f"\n  from {', '.join(sorted({document.metadata['source'] for document in retrieved}))}\n"
            f"  {report['reused_tokens']} of {report['prompt_tokens']} prompt tokens reused, "
            f"{report['recomputed_tokens']} recomputed, first token after {report['ttft_s'] * 1000:.0f} ms"
        )


def ask() -> str:
    """Return the next question; "" at the end of the input."""
    try:
        return input("> ").strip()
    except EOFError:
        return ""


if __name__ == "__main__":
    main()
