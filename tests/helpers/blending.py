"""Prompts of a few chunks, and their caches in an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import torch

from kvrag import BlendConfig, BlendEngine, Model
from kvrag.index.catalog import Catalog
from kvrag.memory.conversation import Conversations
from kvrag.prefill import Recovery
from kvrag.request import Request
from kvrag.reuse.blend import blend, stitch
from kvrag.reuse.load import LayerLoader, Trace

CHUNKS = [
    "Mira Brel was born in Florton. She lives in Grelville. She drives a red car and plays the harp every day.",
    "Tran Works was founded by Mira Brel. The company sells chairs. Its logo is blue. It employs Kan Dror.",
    "Kan Dror was born in Stelburg. He plays the banjo. He owns a goat and a cat. He studied geology.",
    "Zel Vinford lives in Stinmouth. She studied music. She likes to eat curry and apples. She owns a snake.",
]
QUESTION = "Question: Who likes curry?"


def messages(*chunks: str, question: str = QUESTION) -> list[dict[str, str]]:
    """A chat prompt of these chunks and a question."""
    return [{"role": "user", "content": "\n\n".join(chunks)}, {"role": "user", "content": question}]


def prepare(
    engine: BlendEngine, ids: list[int], ratio: float | None = None, policy: str | None = None, **changes: Any
) -> Request:
    """The engine's way from prompt ids to a complete cache."""
    config = engine.config.overridden({"ratio": ratio, "policy": policy})
    return engine.prefill(ids, BlendConfig(**{**_fields(config), **changes}))


def prefilled(
    engine: BlendEngine, ids: list[int], config: BlendConfig | None = None, namespace: str = "", goes_on: bool = False
) -> Request:
    """As by `BlendEngine.prefill`; with `goes_on`, also from a conversation."""
    request = Request(ids, config or engine.config, namespace)
    if goes_on:
        request.conversations = engine._answering._conversations
        request.conversations.begin(request)
    engine._answering.prefill(request)
    return request


def endings(conversations: Conversations) -> int:
    """The number of different endings that are kept."""
    with conversations._changing():  # after what is still pending
        return sum(not stretch.children for stretch in conversations._kept)


def num_texts(catalog: Catalog) -> int:
    """The number of texts in the current snapshot."""
    return sum(segment.alive.sum() for segment in catalog._snapshot.segments)


def _fields(config: BlendConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in BlendConfig.__dataclass_fields__}


def blend_selected(model: Model, request: Request, selected: torch.Tensor) -> torch.Tensor:
    """(1, V) logits after recomputing these positions of a request that is laid out."""
    request.selected = selected
    return blend(model, request)


def full_prefill(model: Model, ids: torch.Tensor, capacity: int) -> tuple[torch.Tensor, Request]:
    """(1, V) logits after the last of (T,) ids, and the prompt with a complete cache and nothing reused."""
    nothing = torch.zeros(len(ids), dtype=torch.bool)
    request = Request(ids.numpy())
    request.match(())
    request.reused = request.exact = nothing
    request.cache = model.new_cache(capacity)
    return blend_selected(model, request, request.inexact), request


@torch.inference_mode()
def plain_logits(hf: Any, ids: list[int]) -> torch.Tensor:
    """(T, V) by the model itself, without kvrag."""
    return hf(torch.tensor([ids])).logits[0].float()


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference, relative to the largest logit."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


LayOut = Callable[..., Request]
"""Chunks, or `ids=`, to a prompt laid out of stored KV, nothing recomputed yet."""


@contextmanager
def laying_out(engine: BlendEngine) -> Iterator[LayOut]:
    """From this engine's store."""
    with ExitStack() as stack:

        def lay_out(*chunks: str, ids: list[int] | None = None) -> Request:
            ids = engine.model.tokenizer.render(messages(*chunks)) if ids is None else ids
            engine._lookup.update()
            model, matches = engine.model, engine._lookup.find(ids, engine.config.min_run)
            recovery = Recovery(model, engine.store, engine._pipeline.memory)
            request = stack.enter_context(closing(Request(ids)))
            recovery.open(request, matches)
            loader = LayerLoader(model, request, engine.codec, Trace(model), len(ids) + 10)
            stitch(model, request, stack.enter_context(closing(loader)))
            return request

        yield lay_out
