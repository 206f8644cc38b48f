"""A web page to chat with documents: upload, warm, ask, and inspect the reuse of each prompt.

python examples/web_chat.py [--model Qwen/Qwen2.5-1.5B-Instruct]
"""

import argparse
from collections.abc import Iterator
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
from langchain_kvrag import FaissVectorStore, SentenceTransformerEmbeddings

from kvrag import BlendEngine, BlendReport, Explanation
from kvrag.retrieval import documents

TOP_K, CHUNK_TOKENS = 4, 256
SAMPLES = sorted((Path(__file__).parent / "corpus").glob("*.txt"))
QUESTIONS = ["Which company has its offices in Danvik?", "What does Holra play?", "What does Ingla play?"]
INSTRUCTION = "Answer the question from these passages. If they do not say, say that you do not know."


class Chat:
    """One engine and one vector store, shared by all visitors of the page."""

    def __init__(self, model: str, store: str, max_tokens: int) -> None:
        self.engine = BlendEngine.from_pretrained(model, store=store)
        self.vectors = FaissVectorStore(SentenceTransformerEmbeddings())
        self.ids: dict[str, list[str]] = {}  # chunk ids of each document
        # full prefill is always faster for the small reader: "off" shows blending anyway
        controller, self.instruction = ("off", "") if model == "reader" else ("auto", INSTRUCTION)
        self.engine.generate("Hello.", max_new_tokens=1)  # the first answer of a process is slower
        self.settings: dict[str, Any] = {"max_new_tokens": max_tokens, "temperature": 0, "controller": controller}

    def add(self, paths: list[str | Path], progress: gr.Progress = gr.Progress()) -> str:  # noqa: B008
        """Warm and index files. A file replaces an earlier one with the same name."""
        encode, reports, problems = self.engine.model.tokenizer.encode, [], []
        split = documents.splitter(lambda text: len(encode(text)), CHUNK_TOKENS, 0)
        for number, path in enumerate(map(Path, paths)):
            progress((number, len(paths)), desc=f"warming {path.name}", unit="documents")
            content = documents.parse(path.name, path.suffix, path.read_bytes())
            problems += [f"\n- {escape(str(problem))}" for problem in content.problems]
            if not content.texts:
                continue
            chunks = split(content.texts)
            reports.append(self.engine.warm(chunks, document=path.name))
            self.vectors.delete(self.ids.pop(path.name, []))
            self.ids[path.name] = self.vectors.add_texts(chunks)
        encoded, seconds = sum(report.new for report in reports), sum(report.seconds for report in reports)
        found = f"**{len(self.ids)} documents, {len(self.vectors.ids)} chunks**, {encoded} encoded now, {seconds:.1f} s"
        return found + "\n" + "".join(problems)

    def ask(self, question: str, shown: list[Any], turns: list[Any]) -> Iterator[tuple[Any, ...]]:
        """Stream the answer, then show its timing and reuse."""
        found = self.vectors.similarity_search(question, k=TOP_K)
        if not question.strip() or not found:
            raise gr.Error("Add documents first, then ask a question.")
        passages = "\n\n".join(document.page_content for document in found)
        asked = {"role": "user", "content": f"{self.instruction}\n\n{passages}\n\nQuestion: {question}".strip()}
        prompt, answer, report = [*turns, asked], "", None
        shown = [*shown, {"role": "user", "content": question}, {"role": "assistant", "content": ""}]
        for delta in self.engine.stream(prompt, **self.settings):
            answer, report = answer + delta.text, delta.report
            shown[-1]["content"] = answer.strip()
            yield "", shown, turns, gr.skip(), None
        explained = self.engine.explain(report)  # by report, because another visitor may have asked since
        # earlier turns without their passages, which are retrieved again for every question
        said = [{"role": "user", "content": f"Question: {question}"}, {"role": "assistant", "content": answer.strip()}]
        yield "", shown, [*turns, *said][-8:], panel(report, None, explained), (prompt, report, explained)

    def measure(self, last: Any, compare: bool) -> Any:
        prompt, report, explained = last
        full = self.engine.generate(prompt, policy="full", max_new_tokens=1).report if compare else None
        return panel(report, full, explained)


def panel(report: BlendReport, full: BlendReport | None, explained: Explanation) -> str:
    """Return times, and the prompt with its reused and recomputed parts."""
    note = "Both for this prompt; full prefill was measured after the answer." if full else ""
    times = {"blending": report.ttft_s} | ({"full prefill": full.ttft_s} if full else {})
    bars = "".join(
        f'<div class="bar {name}"><span>{name}</span><div style="width:{seconds / max(times.values()):.0%}"></div>'
        f"<b>{seconds * 1000:.0f} ms</b></div>"
        for name, seconds in times.items()
    )
    text = ""
    for part in explained.stretches:
        inside = "".join(f"<mark>{escape(piece)}</mark>" if again else escape(piece) for piece, again in part.pieces)
        if part.kind == "fresh":
            text += f'<span class="fresh">{inside}</span>'
        else:
            source = escape(", ".join(part.documents)) or "this conversation"
            size = f"{part.stop - part.start} tokens reused, {part.recomputed} of them recomputed"
            text += f'<div class="passage"><b>{source}<i>{size}</i></b>{inside.strip()}</div>'
    return f"""<h3>Time to first token</h3>{bars}
        <p class="note">{note} {escape(report.decision)}</p>
        <h3>The prompt</h3><p class="key"><span class="reused">{report.reused_tokens} tokens reused</span>
        <span class="recomputed">{report.recomputed_tokens} of them recomputed</span>
        <span>{report.fresh_tokens} computed</span></p><div id="prompt">{text}</div>"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="reader", help="hub name or folder (default: the bundled model)")
    parser.add_argument("--store", default="kv", help="folder of the encoded chunks (default: kv)")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--port", type=int, default=7860)
    args = parser.parse_args()
    chat = Chat(args.model, args.store, args.max_tokens)
    with gr.Blocks(title="kvrag", analytics_enabled=False) as page:
        turns, last = gr.State([]), gr.State()
        gr.Markdown(
            f"# Chat with your documents\nkvrag on **{args.model}**: chunks encoded once, blended", elem_id="title"
        )
        with gr.Row():
            with gr.Column(scale=3):
                shown = gr.Chatbot(elem_id="chat", height=520, show_label=False, placeholder="Add documents, then ask.")
                question = gr.Textbox(placeholder="Ask about the documents", show_label=False, submit_btn=True)
                gr.Examples(QUESTIONS, question, label="For the sample articles")
            with gr.Column(scale=2):
                files = gr.File(label="Documents: " + " ".join(documents.SUFFIXES), file_count="multiple", height=120)
                samples = gr.Button("Use the sample articles", size="sm")
                status = gr.Markdown(min_height=40)
                compare = gr.Checkbox(True, label="After each answer, also measure full prefill of its prompt")
                report = gr.HTML("", elem_id="report")
        files.upload(chat.add, files, status)
        samples.click(partial(chat.add, SAMPLES), None, status)
        asked = question.submit(chat.ask, [question, shown, turns], [question, shown, turns, report, last])
        asked.success(chat.measure, [last, compare], report)
        shown.clear(lambda: ([], ""), None, [turns, report])
    theme = gr.themes.Default(primary_hue="green", font=gr.themes.LocalFont("Source Sans Pro", weights=(400, 700)))
    css = Path(__file__).with_suffix(".css")
    page.launch(server_name="127.0.0.1", server_port=args.port, theme=theme, css_paths=css, show_error=True)


if __name__ == "__main__":
    main()
