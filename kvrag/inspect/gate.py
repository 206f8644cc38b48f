"""Correctness gate for the user's own model.

Blending everything must equal full prefill, and storing must not change KV. Both are compared with transformers' own
forward pass and `generate`, or llama.cpp's, on the same token ids.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvrag.backend.transformers import Model
from kvrag.config import BlendConfig, Sampling
from kvrag.generate.decode import Row, decode
from kvrag.store import FileStore
from kvrag.store.base import no_progress

_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}  # relative, over many layers
# added by a codec: for keys, half a step of at most twice the largest, rotated by RoPE; for logits, a tolerance
_KEYS = {"native": 0.0, "int8": 1.5 / 255, "int4": 1.5 / 15}
_LOGITS = {"native": 0.0, "int8": 0.1, "int4": 0.1}
_PLAIN = BlendConfig(policy="none", controller="off")
_NEW_TOKENS = 20
_NOISE_TOKENS = 1024  # eager attention needs memory for their square
_TOPICS = ("harbour", "mountain railway", "glass works", "orchard")


@dataclass(frozen=True)
class Check:
    """One check of the gate. `value` is an error or a count, `limit` its maximum (or minimum)."""

    name: str
    value: float
    limit: float
    passed: bool
    detail: str = ""


def verify(open_engine: Callable[..., Any], chunk_tokens: int | None = None) -> Iterator[Check]:
    """Run the gate; yield each check when it is done.

    Args:
        open_engine: Opens a BlendEngine on a store, with the model and the codec to test, whose error is allowed for,
            or with `codec="native"`.
        chunk_tokens: Length of each of the four chunks; None = enough to exceed a sliding window of up to 4,096.
    """
    with tempfile.TemporaryDirectory(prefix="kvrag-verify-") as folder:
        with open_engine(FileStore(Path(folder), min_free_bytes=0)) as engine:
            model, prefill = engine.model, engine.prefill
            windows = [window for window in model.windows if window is not None and window <= 4096]
            chunks = _texts(model, chunk_tokens or max([128, *(window // 3 for window in windows)]))
            tolerance = _TOLERANCE.get(model.dtype, 1e-4)
            of_codec = tolerance + _LOGITS[engine.codec]
            engine.warm(chunks, progress=no_progress)
            ids = _after_preamble(model, "\n\n".join(reversed(chunks)) + "\n\nWhich of these places is the oldest?")
            reference, tokens = model.own_logits(ids), model.own_tokens(ids, _NEW_TOKENS)

            plain = prefill(ids, _PLAIN)
            if engine.codec != "native":  # stitched: keys are rotated to other positions after they were packed
                with open_engine(FileStore(Path(folder) / "native", min_free_bytes=0), codec="native") as native:
                    native.warm(chunks, progress=no_progress)
                    unpacked = native.prefill(ids, _PLAIN).logits
                name = f"plain reuse of {engine.codec} chunks = of native ones"
                yield _check_logits(model, ids, name, plain.logits, unpacked, of_codec)
            # else only recomputed tokens equal full prefill's: a model's states may not be stored
            is_exact = model.keeps_states == model.stores_states
            if is_exact and not model.keeps_states:  # else the first layer with KV may be a later one
                reused, own = plain.reused.nonzero().squeeze(1), model.new_cache(len(ids))
                model.forward_until(1, torch.tensor([ids]), own)
                keys, expected = (cache.layer(0)[0][:, :, reused] for cache in (plain.cache, own))
                limit = tolerance + _KEYS[engine.codec]
                yield _check("layer-0 keys of stitched chunks = the model's own", keys, expected, limit)
            blended = prefill(ids, BlendConfig(ratio=1.0, controller="off"))
            name = "ratio 1.0 = full prefill (logits)"
            yield _check_logits(model, ids, name, blended.logits, reference, tolerance)
            sampling = Sampling(max_new_tokens=_NEW_TOKENS, temperature=0)
            deltas = decode(Row(model, torch.tensor(ids), blended.cache, blended.logits, sampling))
            answer = [token for delta in deltas for token in delta.token_ids]
            gap = float(reference.max() - reference[0, blended.logits.argmax()]) / float(reference.abs().max())
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(answer, tokens, strict=False)))
            # in half precision, near ties may resolve either way
            required = len(tokens) if model.dtype == torch.float32 else min(int(gap > tolerance), len(tokens))
            name = "ratio 1.0 = model.generate (greedy tokens)"
            yield Check(name, same, required, same >= required, f"of {len(tokens)}")

            if is_exact:
                alone = _after_preamble(model, chunks[0] + " So the")
                name, logits = "plain reuse after the preamble = full prefill", prefill(alone, _PLAIN).logits
                yield _check_logits(model, alone, name, logits, model.own_logits(alone), of_codec)

            if model.keeps_states:
                cache = model.new_cache(len(ids))
                for part in torch.tensor([ids]).tensor_split([len(ids) // 3], dim=1):
                    logits = model.forward(part, cache)
                name = "a pass that goes on from states = full prefill (logits)"
                yield _check_logits(model, ids, name, logits, reference, tolerance)

            name = "a decode step of two answers = full prefill (logits)"
            yield _check_logits(model, ids, name, *_step_of_two(model, ids), tolerance)

        with open_engine(FileStore(Path(folder), min_free_bytes=0)) as engine:
            after = engine.prefill(ids, _PLAIN).logits
        yield _check("plain reuse after a restart = before it", after, plain.logits, 0.0)


def _texts(model: Model, num_tokens: int) -> list[str]:
    """Return four different chunks of about that many tokens."""
    texts = []
    for topic in _TOPICS:
        text, year = "", 1700
        while len(model.tokenizer.encode(text)) < num_tokens:
            year += 1 + len(topic)
            text += (
                f"In {year} the {topic} was enlarged by {year % 9 + 2} rooms, and {year % 97} people came to see it. "
            )
        texts.append(text.strip())
    return texts


def _after_preamble(model: Model, text: str) -> list[int]:
    return [*model.tokenizer.preamble, *model.tokenizer.encode(text)]


def _step_of_two(model: Model, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Return (2, V) logits after two prefixes of the prompt, by one decode step and by the library."""
    longest = min(len(ids), model.stable_length) - 1
    lengths = (longest, longest // 3)
    caches = [model.new_cache(length + 1) for length in lengths]
    for length, cache in zip(lengths, caches, strict=True):
        model.forward(torch.tensor([ids[:length]]), cache)
    logits = model.forward_each([ids[length] for length in lengths], caches)
    return logits, torch.cat([model.own_logits(ids[: length + 1]) for length in lengths])


def _check_logits(model: Model, ids: list[int], name: str, logits: Tensor, reference: Tensor, limit: float) -> Check:
    """Check logits, with a higher limit where the model's own results for a prompt differ as much.

    In half precision, they depend on how attention is implemented, or a pass divided: near ties of experts' scores are
    resolved otherwise, and quantised products are rounded otherwise.
    """
    check = _check(name, logits, reference, limit)
    if check.passed or model.dtype == torch.float32:
        return check
    own = [model.own_logits(ids[:_NOISE_TOKENS], is_other) for is_other in (False, True)]
    return _check(name, logits, reference, max(limit, 2 * _error(*own)))


def _check(name: str, value: Tensor, reference: Tensor, limit: float) -> Check:
    error = _error(value, reference)
    return Check(name, error, limit, error <= limit)


def _error(value: Tensor, reference: Tensor) -> float:
    return float((value.float() - reference.float()).abs().max() / reference.float().abs().max())
