"""Everything offline and on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from families import build
from places import Bucket, Server, run_s3, run_valkey
from transformers import AutoTokenizer

import kvrag
from kvrag import BlendConfig, BlendEngine, FileStore, Model
from kvrag.answer import overridden
from kvrag.request import Prefilled, Prompt
from kvrag.reuse.load import LayerLoader
from kvrag.reuse.stitch import Stitched, stitch
from kvrag.reuse.trace import Trace

torch.set_num_threads(1)  # the models are too small for more, and threads that wait for each other cost seconds

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
) -> Prefilled:
    """The engine's way from prompt ids to a complete cache."""
    config = overridden(engine.config, ratio, policy, None)
    return engine.prefill(ids, BlendConfig(**{**_fields(config), **changes}))


def _fields(config: BlendConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in BlendConfig.__dataclass_fields__}


@torch.inference_mode()
def plain_logits(hf: Any, ids: list[int]) -> torch.Tensor:
    """(T, V) by the model itself, nothing of ours involved."""
    return hf(torch.tensor([ids])).logits[0].float()


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference, relative to the largest logit."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.fixture(autouse=True)
def _not_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test sees must not depend on how busy the machine is: nothing is ever noticeably sooner."""
    monkeypatch.setattr("kvrag.control.controller.NOTICEABLE_S", float("inf"))
    monkeypatch.setattr("kvrag.control.controller.STEP", 1.0)


LayOut = Callable[..., Stitched]
"""Chunks, or `ids=`, to a prompt laid out of stored KV, nothing recomputed yet."""


@contextmanager
def laying_out(engine: BlendEngine) -> Iterator[LayOut]:
    """From this engine's store."""
    with ExitStack() as stack:

        def lay_out(*chunks: str, ids: list[int] | None = None) -> Stitched:
            ids = engine.model.tokenizer.render(messages(*chunks)) if ids is None else ids
            matched = stack.enter_context(closing(engine._pipeline._match(Prompt(ids, engine.config))))
            loader = LayerLoader(engine.model, matched, engine.codec, Trace(engine.model), len(ids) + 10)
            return stitch(engine.model, matched, loader, len(ids) + 10, engine.codec)

        yield lay_out


@pytest.fixture(scope="session")
def s3() -> Iterator[Bucket]:
    """An S3 server of this session's own."""
    with run_s3() as bucket:
        yield bucket


@pytest.fixture(scope="session")
def valkey() -> Iterator[Server]:
    """A Valkey server of this session's own."""
    with run_valkey() as server:
        yield server


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The bundled reader's."""
    return AutoTokenizer.from_pretrained(Path(kvrag.__file__).parent / "reader")


@pytest.fixture(scope="session")
def hf() -> Any:
    """A tiny random llama."""
    return build("llama", max_position_embeddings=2048)


@pytest.fixture(scope="session")
def model(hf: Any, tokenizer: Any) -> Model:
    """The tiny llama, ready to blend."""
    return Model(hf, tokenizer, "tiny")


@pytest.fixture
def endless(model: Model, monkeypatch: pytest.MonkeyPatch) -> Model:
    """The tiny llama without an end token, so that answers have the length asked for."""
    monkeypatch.setitem(model.__dict__, "eos_ids", frozenset())
    return model


@pytest.fixture
def engine(model: Model, tmp_path: Path) -> Iterator[BlendEngine]:
    """On a store of its own, nothing warmed."""
    with BlendEngine(model, FileStore(tmp_path / "kv", min_free_bytes=0)) as engine:
        yield engine


@pytest.fixture
def lay_out(engine: BlendEngine) -> Iterator[LayOut]:
    """Of CHUNKS, which are warmed."""
    engine.warm(CHUNKS)
    with laying_out(engine) as lay_out:
        yield lay_out


@pytest.fixture
def forbid(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Deny access to a file, or to all in a folder: tests may run as root, whom permissions do not stop."""
    forbidden: dict[str, bool] = {}  # with whether it is a folder

    def denying(call: Callable[..., Any], is_listing: bool) -> Callable[..., Any]:
        def checked(path: Any, *args: Any, **kwargs: Any) -> Any:
            itself = forbidden.get(str(path))
            if itself is False or (itself and is_listing) or any(str(path).startswith(f"{one}/") for one in forbidden):
                raise PermissionError(13, "Permission denied", str(path))
            return call(path, *args, **kwargs)

        return checked

    for name in ("scandir", "listdir", "stat", "lstat"):
        monkeypatch.setattr(os, name, denying(getattr(os, name), name in ("scandir", "listdir")))
    return lambda path: forbidden.update({str(path): path.is_dir()})
