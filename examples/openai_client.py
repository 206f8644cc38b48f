"""An OpenAI client for `kvrag serve`: an answer with citations, and a streamed answer about your own chunks.

First, in another terminal:

    kvrag warm --store kv examples/corpus
    kvrag serve --store kv                     # add --model Qwen/Qwen2.5-1.5B-Instruct for another model

The same server with Open WebUI, which then shows the models `reader` and `reader-rag`:

    kvrag serve --store kv --host 0.0.0.0 --api-key secret
    docker run -p 3000:8080 --add-host host.docker.internal:host-gateway -e OPENAI_API_KEY=secret \
        -e OPENAI_API_BASE_URL=http://host.docker.internal:8000/v1 ghcr.io/open-webui/open-webui:main
"""

import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id
question = "Which company has its offices in Danvik?"
blend = {"controller": "off"}  # no automatic full prefill, which is faster for prompts this short

# the server retrieves from its own corpus
answer = client.chat.completions.create(
    model=f"{model}-rag",
    messages=[{"role": "user", "content": question}],
    max_tokens=32,
    temperature=0,
    extra_body=blend,
)
print(question, answer.choices[0].message.content.strip())
citations = answer.model_extra["citations"]
for citation in citations:
    print(f"  [{citation['index']}] {citation['document'].rpartition('/')[2]}: {citation['text'][:60]!r}...")
print(f"{answer.usage.prompt_tokens_details.cached_tokens} of {answer.usage.prompt_tokens} prompt tokens reused")

# the client retrieves; the server encodes and stores new chunks
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": question}],
    max_tokens=32,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={"documents": [citation["text"] for citation in citations[:2]], **blend},
)
print(question, end=" ")
for piece in stream:
    if piece.choices:
        print(piece.choices[0].delta.content or "", end="", flush=True)
    else:
        usage = piece.usage
print(f"\n{usage.prompt_tokens_details.cached_tokens} of {usage.prompt_tokens} prompt tokens reused")
