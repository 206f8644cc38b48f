"""Speed-up of blending on a random model of a real shape, for `kvrag demo`."""

from __future__ import annotations

import platform
import random
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from kvrag.backend.transformers.untrained import one_token_words, untrained_model
from kvrag.config import DEFAULT_POLICY, DEFAULT_RATIO, BlendConfig
from kvrag.engine import BlendEngine
from kvrag.store.base import Progress, no_progress

QWEN = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
"""Configuration of Qwen2.5-0.5B."""

_CHUNKS, _CHUNK_TOKENS, _QUESTION_TOKENS = 6, 512, 64
_ROUNDS = 2  # after one that warms up


@dataclass(frozen=True)
class SpeedUp:
    """Median seconds to the first token of the same prompts, in full and blended.

    `bound` is the speed-up if computing the tokens were the only cost.
    """

    model: str
    full_s: float
    blending_s: float
    bound: float
    prompt_tokens: int
    threads: int
    processor: str


def measure(progress: Progress = no_progress) -> SpeedUp:
    """Measure answers of one token by a model of Qwen2.5-0.5B's shape.

    The chunks come from the disk, every time in an order that was not there before.

    Args:
        progress: Gets the number of tokens that were computed, and of all that will be.
    """
    stored = _CHUNKS * _CHUNK_TOKENS
    steps = {"full": stored + _QUESTION_TOKENS, DEFAULT_POLICY: round(DEFAULT_RATIO * stored) + _QUESTION_TOKENS}
    done, total = 0, stored + (1 + _ROUNDS) * sum(steps.values())
    progress(done, total)
    model, rng = untrained_model("qwen2.5-0.5b", QWEN), random.Random(0)
    words = one_token_words(model)
    chunks = ["".join(rng.choices(words, k=_CHUNK_TOKENS)) for _ in range(_CHUNKS)]
    seconds: dict[str, list[float]] = {"full": [], DEFAULT_POLICY: []}
    with (
        TemporaryDirectory() as folder,
        BlendEngine(model, folder, BlendConfig(ratio=DEFAULT_RATIO), ram_bytes=0, conversation_bytes=0) as engine,
    ):
        engine.warm(chunks, progress=lambda encoded, _: progress(encoded, total))
        done = stored
        for _ in range(1 + _ROUNDS):
            rng.shuffle(chunks)
            question = "".join(rng.choices(words, k=_QUESTION_TOKENS))
            for policy, measured in seconds.items():
                started = time.perf_counter()
                prompt = engine.as_prompt("\n\n".join([*chunks, question]))
                report = engine.generate(prompt, policy=policy, max_new_tokens=1, temperature=0).report
                measured.append(time.perf_counter() - started)
                progress(done := done + steps[policy], total)
    full_s, blending_s = (median(measured[1:]) for measured in seconds.values())
    bound = report.prompt_tokens / (report.fresh_tokens + report.recomputed_tokens)
    return SpeedUp(model.name, full_s, blending_s, bound, report.prompt_tokens, torch.get_num_threads(), processor())


def processor() -> str:
    """Return the name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
