"""LangChain's own integration suites, on the real engine.

No capable model is available offline. So the answers come from a parrot: a random Mistral that attends to about twenty
tokens, with an output layer fitted to give the answers that the suite expects. Everything else, from the chat template
to the parsed call, is the same as with any model. KVRAG_TEST_MODEL=smollm2 runs the suite on a small model that answers
freely, in about half an hour: it fails the agent loop, because it calls no tool unless forced, and structured output
without a maximum length, because it repeats a phrase until max_tokens. With repetition_penalty=1.1 those nine tests
pass, and four others fail, because it no longer copies arguments from the question.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from blending import CHUNKS
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_kvrag import ChatBlend, KVWarmVectorStore, SentenceTransformerEmbeddings
from langchain_tests.integration_tests import (
    ChatModelIntegrationTests,
    EmbeddingsIntegrationTests,
    VectorStoreIntegrationTests,
)
from serving import NAME, serving
from transformers import AutoModelForCausalLM, MistralConfig

from kvrag import BlendEngine, Model
from kvrag.generate.prompt import prepare


def call(name: str, **arguments: Any) -> str:
    said = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{said}\n</tool_call>"


JOKE = '{"setup": "Why do cats purr?", "punchline": "It is fun."}'
GREETED = {"customer_name": "你好 こんにちは", "description": "a company"}  # the question is outside its window by then
WITHOUT_TOOLS = {
    "Hello": " Good day.",
    "hello": " Good day.",
    "Hey": " Good day.",
    "how are you": " Good day.",
    "hi": " Good day.",
    "Write me 2 haikus. Only include the haikus.": " Rain falls.",
    "Tell me a joke about cats.": JOKE,
    "Give me the setup to a joke about cats, no punchline.": JOKE,
    "Give me a joke about cats, include the punchline.": JOKE,
    "Tell me a joke about cats. Return the result as a JSON with 'setup' and 'punchline' keys. "
    "Return nothing other than JSON.": JOKE,
}
WITH_TOOLS = {
    "Hello!": call("magic_function", input=3),
    "What is the value of magic_function(3)? Use the tool.": call("magic_function", input=3),
    "Using the tool, generate a Pirate greeting.": call("greeting_generator", answer_style="pirate"),
    "What is the weather in San Francisco, CA?": call("get_weather", location="San Francisco"),
    "Create a customer named '你好啊集团' (Hello Group) - a Chinese technology company": call(
        "unicode_customer", **GREETED
    ),
    "Create a customer named 'こんにちは株式会社' (Hello Corporation) - a Japanese company": call(
        "unicode_customer", **GREETED
    ),
}
DOCUMENT = CHUNKS[3]
FREE = os.environ.get("KVRAG_TEST_MODEL")
MODELS = (FREE, "reader") if FREE else ("parrot", "other-parrot")
# the longest of these answers has 106 tokens; a parrot does not end any other
LENGTH = {} if FREE else {"max_tokens": 110}


@torch.inference_mode()
def parrot(model: Model) -> Any:
    """A model for this tokenizer that gives the answers above."""
    tokenizer = model.tokenizer
    config = MistralConfig(
        vocab_size=len(tokenizer.hf),
        hidden_size=512,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        sliding_window=12,
        max_position_embeddings=4096,
        initializer_range=0.1,
        bos_token_id=tokenizer.hf.bos_token_id,
        eos_token_id=tokenizer.hf.eos_token_id,
    )
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    seen, wanted = [], []
    for answers, tools in ((WITHOUT_TOOLS, None), (WITH_TOOLS, [{"type": "function", "function": {"name": "any"}}])):
        for question, answer in answers.items():
            prepared = prepare(tokenizer, [{"role": "user", "content": question}], tools)
            prompt = tokenizer.render(prepared.prompt)
            said = [*tokenizer.encode(answer), tokenizer.hf.eos_token_id]
            states = hf.model(torch.tensor([prompt + said])).last_hidden_state[0]  # (T, E)
            seen.append(states[len(prompt) - 1 : -1])
            wanted.append(torch.nn.functional.one_hot(torch.tensor(said), config.vocab_size))
    output = torch.linalg.lstsq(torch.cat(seen).double(), torch.cat(wanted).double(), driver="gelsd").solution  # (E, V)
    hf.lm_head.weight.copy_(output.T * 10)
    return hf


@pytest.fixture(scope="module", autouse=True)
def parrots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two folders with the parrot, each with its own store; or the model that answers freely, and another."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.chdir(home)
        if not FREE:
            model = Model.from_pretrained("reader", dtype="float32")
            hf = parrot(model)
            for name in MODELS:
                hf.save_pretrained(name)
                model.tokenizer.hf.save_pretrained(name)
        engines = [BlendEngine.shared(name) for name in MODELS]
        yield
        for engine in engines:
            engine.close()


class TestChatModel(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatBlend

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODELS[0], "timeout": 600, **LENGTH}

    @property
    def model_override_value(self) -> str:
        return MODELS[1]

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {way: ["cache_read_input", "cache_creation_input"] for way in ("invoke", "stream")}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        chat = ChatBlend(**self.chat_model_params | {"max_tokens": 4})
        chat.warm([DOCUMENT])
        message = whole(chat, stream=stream)
        assert message.usage_metadata is not None
        assert message.usage_metadata["input_token_details"]["cache_read"] > 16
        return message

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        chat = ChatBlend(**self.chat_model_params | {"max_tokens": 4})
        chat._open().warm(["Something else, long enough to be kept, I should say, or so I hope."], document="a")
        message = whole(chat, stream=stream, documents=[DOCUMENT])
        assert message.usage_metadata is not None
        details = message.usage_metadata["input_token_details"]
        assert details["cache_read"] + details["cache_creation"] > 16
        return message


@pytest.fixture(scope="module")
def server(parrots: None) -> Iterator[None]:
    """A server with the parrot."""
    with serving(BlendEngine.shared(MODELS[0])) as served:
        TestChatModelOnServer.url = served.url
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("server")
class TestChatModelOnServer(TestChatModel):
    """The same with `kvrag serve` in between."""

    url = "http://localhost"

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": NAME, "base_url": self.url, **LENGTH}

    @property
    def supports_model_override(self) -> bool:
        return False  # it has one model


def whole(chat: ChatBlend, *, stream: bool, **settings: Any) -> AIMessage:
    prompt = f"{DOCUMENT}\n\nHello"
    if not stream:
        return chat.invoke(prompt, **settings)
    first, *others = chat.stream(prompt, **settings)
    return sum(others, start=first)


class TestEmbeddings(EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self) -> type[Embeddings]:
        return SentenceTransformerEmbeddings


class TestVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, engine: BlendEngine) -> VectorStore:
        return KVWarmVectorStore(InMemoryVectorStore(self.get_embeddings()), engine)
