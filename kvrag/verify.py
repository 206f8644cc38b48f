"""The correctness gate, on the user's own model.

Blending everything must be full prefill, and storing must not change KV. Compared with transformers' own forward pass and `generate`, on the same token ids.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvrag.blend import blend
from kvrag.config import Sampling
from kvrag.decode import decode
from kvrag.encode import encode
from kvrag.match import MatchIndex, anchors
from kvrag.model import Model
from kvrag.stitch import Stitched, stitch
from kvrag.store import ChunkRecord, FileStore

_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}  # relative, many layers deep
_MIN_RUN = 16
_NEW_TOKENS = 20
_TOPICS = ("harbour", "mountain railway", "glass works", "orchard", "observatory")


@dataclass(frozen=True)
class Check:
    """One line of the gate. `value` is an error or a count, `limit` what it may be at most (or at least)."""

    name: str
    value: float
    limit: float
    passed: bool
    detail: str = ""


def verify(
    model: Model, chunk_tokens: int | None = None, progress: Callable[[str], None] = lambda name: None
) -> list[Check]:
    """Run the gate.

    Args:
        model: Any, also one loaded with `allow_unverified`.
        chunk_tokens: Length of each of the four chunks; None = long enough to exceed a sliding window of up to 4,096.
        progress: Called with the name of each check before it runs.
    """
    windows = [window for window in model.windows if window is not None and window <= 4096]
    chunks = _texts(model, chunk_tokens or max([128, *(window // 3 for window in windows)]))
    tolerance = _TOLERANCE.get(model.dtype, 1e-4)
    with tempfile.TemporaryDirectory(prefix="kvrag-verify-") as folder:
        index = _warm(model, chunks, Path(folder))
        ids = model.tokenizer.render("\n\n".join(reversed(chunks)) + "\n\nWhich of these places is the oldest?")
        ids = _behind_preamble(model, ids)
        progress("full prefill by transformers")
        reference, tokens = _reference(model, ids)

        progress("ratio 1.0")
        stitched = _stitch(model, ids, index, Path(folder))
        own = _layer0_keys(model, ids)
        keys = stitched.cache.layer(0)[0][:, :, : len(ids)]
        reused = stitched.reused
        checks = [
            _check(
                "layer-0 keys of stitched chunks = the model's own", keys[:, :, reused], own[:, :, reused], tolerance
            )
        ]
        before = blend(model, stitched, stitched.inexact)
        checks.append(_check("ratio 1.0 = full prefill (logits)", before, reference, tolerance))
        got = _greedy(model, ids, stitched, before)
        same = next(
            (i for i, (a, b) in enumerate(zip(got, tokens, strict=False)) if a != b), min(len(got), len(tokens))
        )
        wanted = len(tokens) if model.dtype == torch.float32 else 1  # in half precision near ties may fall either way
        checks.append(
            Check("ratio 1.0 = model.generate (greedy tokens)", same, wanted, same >= wanted, f"of {len(tokens)}")
        )

        progress("one chunk behind its preamble")
        encode_text = model.tokenizer.encode
        alone = [*model.tokenizer.preamble, *encode_text(chunks[0]), *encode_text(" So the")]
        stitched = _stitch(model, alone, index, Path(folder))
        logits = blend(model, stitched, stitched.inexact[:0])
        checks.append(
            _check("plain reuse behind the preamble = full prefill", logits, _reference(model, alone, 0)[0], tolerance)
        )

        progress("restart")
        first = _none(model, ids, index, Path(folder))
        second = _none(model, ids, index, Path(folder))
        checks.append(_check("plain reuse after a restart = before it", second, first, 0.0))
    return checks


def _texts(model: Model, num_tokens: int) -> list[str]:
    """Four chunks of about that many tokens, no two alike."""
    texts = []
    for topic in _TOPICS[:4]:
        text, year = "", 1700
        while len(model.tokenizer.encode(text)) < num_tokens:
            year += 1 + len(topic)
            text += (
                f"In {year} the {topic} was enlarged by {year % 9 + 2} rooms, and {year % 97} people came to see it. "
            )
        texts.append(text.strip())
    return texts


def _warm(model: Model, chunks: Sequence[str], folder: Path) -> MatchIndex:
    store = FileStore(folder, min_free_bytes=0)
    store.bind(model.fingerprint)
    ids = [model.tokenizer.encode(chunk) for chunk in chunks]
    records = [
        ChunkRecord(model.fingerprint.chunk_key(ids[i]), np.asarray(ids[i], np.uint32), anchors(ids[i]), layers)
        for i, layers in encode(model, ids)
    ]
    store.put(records)
    store.close()
    index = MatchIndex()
    index.add((record.key, record.ids, record.anchors) for record in records)
    return index


def _behind_preamble(model: Model, ids: list[int]) -> list[int]:
    """A raw prompt has only the tokenizer's BOS: put the preamble there, so that one chunk stands right behind it."""
    bos = model.tokenizer.hf.bos_token_id
    return [*model.tokenizer.preamble, *(ids[1:] if ids[0] == bos else ids)]


def _stitch(model: Model, ids: list[int], index: MatchIndex, folder: Path) -> Stitched:
    """From a store opened anew, everything read before it is closed."""
    store = FileStore(folder, min_free_bytes=0)
    store.bind(model.fingerprint)
    runs = index.match(ids, _MIN_RUN)
    readers = {key: reader for key in {run.key for run in runs} if (reader := store.open(key)) is not None}
    stitched = stitch(model, ids, runs, readers, len(ids) + _NEW_TOKENS)
    for number in range(model.num_layers):
        stitched.cache.layer(number)
    for reader in readers.values():
        reader.close()
    store.close()
    return stitched


def _none(model: Model, ids: list[int], index: MatchIndex, folder: Path) -> Tensor:
    stitched = _stitch(model, ids, index, folder)
    return blend(model, stitched, stitched.inexact[:0])


@torch.inference_mode()
def _reference(model: Model, ids: list[int], new_tokens: int = _NEW_TOKENS) -> tuple[Tensor, list[int]]:
    """(1, V) logits and greedy tokens by transformers alone."""
    tensor = torch.tensor([ids], device=model.device)
    with model.lock:
        logits = model.hf(tensor).logits[:, -1].float()
        if new_tokens == 0:
            return logits, []
        output = model.hf.generate(
            tensor, attention_mask=torch.ones_like(tensor), max_new_tokens=new_tokens, do_sample=False
        )
    return logits, [token for token in output[0, len(ids) :].tolist() if token not in model.eos_ids]


def _greedy(model: Model, ids: list[int], stitched: Stitched, logits: Tensor) -> list[int]:
    sampling = Sampling(max_new_tokens=_NEW_TOKENS, temperature=0)
    deltas = decode(model, torch.tensor(ids), stitched.cache, logits, sampling)
    return [token for delta in deltas for token in delta.token_ids]


def _layer0_keys(model: Model, ids: list[int]) -> Tensor:
    cache = model.new_cache(len(ids))
    model.forward_until(lambda number, *_: number == 1, torch.tensor([ids]), cache)
    return cache.layer(0)[0]


def _check(name: str, value: Tensor, reference: Tensor, limit: float) -> Check:
    error = float((value.float() - reference.float()).abs().max() / reference.float().abs().max())
    return Check(name, error, limit, error <= limit)
