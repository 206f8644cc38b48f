"""Warm a folder of texts and answer from two of its chunks, using the engine only.

A second run encodes nothing.
"""

from pathlib import Path

from langchain_text_splitters import RecursiveCharacterTextSplitter

from kvrag import BlendEngine

FOLDER = Path(__file__).parent / "corpus"
MODEL = "reader"  # the bundled model; or for example "Qwen/Qwen2.5-1.5B-Instruct"
CHUNK_TOKENS = 40  # these articles are tiny; 256 is a good value for real ones

engine = BlendEngine.from_pretrained(MODEL, store="kv")
splitter = RecursiveCharacterTextSplitter(
    chunk_size=CHUNK_TOKENS, chunk_overlap=0, length_function=lambda text: len(engine.model.tokenizer.encode(text))
)
chunks, names = [], []
for path in sorted(FOLDER.rglob("*.txt")):
    for chunk in splitter.split_text(path.read_text()):
        chunks.append(chunk)
        names.append(path.name)  # when a file changes, its old chunks are dropped

report = engine.warm(chunks, document=names)
print(f"{report.chunks} chunks of {len(set(names))} files: {report.new} encoded now, {report.bytes} bytes")

question = "Which town is known for its round harbour?"
retrieved = [chunk for chunk, name in zip(chunks, names, strict=True) if name in ("harfield.txt", "jomouth.txt")]
answer = engine.generate(
    [{"role": "user", "content": "\n\n".join([*retrieved, f"Question: {question}"])}],
    max_new_tokens=32,
    temperature=0,
    controller="off",  # no automatic full prefill, which is faster for short prompts
)
print(question, answer.text.strip())
print(
    f"{answer.report.reused_tokens} of {answer.report.prompt_tokens} prompt tokens reused, "
    f"{answer.report.recomputed_tokens} recomputed"
)
engine.close()
