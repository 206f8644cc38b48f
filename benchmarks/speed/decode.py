"""Decoding of several answers together, one after the other, and by `model.generate`, interleaved in one run.

Prompts have different lengths. They are prefilled before the clock starts. Together, each answer has its own consumer
thread. `--gguf` decodes one answer of a file in llama.cpp, its steps in turn with bare calls of `llama_decode`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from benchmarks.settings import run_settings
from benchmarks.shapes import random_model
from benchmarks.speed.first_token import add_shape
from kvrag.backend.llama.model import LlamaModel
from kvrag.backend.transformers import Model
from kvrag.cli.common import add_number, at_least
from kvrag.config import Sampling
from kvrag.generate.decode import Row, decode
from kvrag.process import release_team
from kvrag.types import Delta

ROWS = 8
"""Default number of answers that are decoded together."""
_LONGER = 7  # tokens that each prompt has more than the one before
_RATIOS = (("alone", "generate"), ("together", "alone"))


def measure(
    net: Model,
    rows: int = ROWS,
    prompt_tokens: int = 96,
    answer_tokens: int = 24,
    repeats: int = 3,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Return tokens per second by name, medians over the rounds after one warm-up round, and `settings`.

    `X_to_Y` is the median of the ratios within a round.

    Args:
        net: The model. Its answers will not end early any more.
        rows: Answers that are decoded together.
        prompt_tokens: Length of the shortest prompt.
        answer_tokens: Length of an answer.
        repeats: Rounds.
    """
    net.__dict__["eos_ids"] = frozenset()  # every answer has its full length
    prompts = [torch.randint(1000, (prompt_tokens + _LONGER * row,)) for row in range(rows)]
    rates: dict[str, list[float]] = defaultdict(list)
    for repeat in range(repeats + 1):
        progress(f"round {repeat} of {repeats}" if repeat else "warm-up round")
        measured = {
            "generate": generate(net, prompts[0], answer_tokens),
            "alone": _rate(net, prompts[:1], answer_tokens),
            "together": _rate(net, prompts, answer_tokens),
        }
        for name, rate in measured.items() if repeat else ():
            rates[name].append(rate)
    result: dict[str, Any] = {name: statistics.median(values) for name, values in rates.items()}
    for name, other in _RATIOS:
        result[f"{name}_to_{other}"] = statistics.median(a / b for a, b in zip(rates[name], rates[other], strict=True))
    sizes = {"rows": rows, "prompt_tokens": prompt_tokens, "answer_tokens": answer_tokens, "repeats": repeats}
    return result | {"settings": run_settings(net) | sizes}


def _rate(net: Model, prompts: Sequence[Tensor], num_tokens: int) -> float:
    """Return the tokens per second of all answers, without their first tokens."""
    answers = [_begin(net, ids, num_tokens) for ids in prompts]
    release_team()  # as the engine does after a prefill
    with ThreadPoolExecutor(len(answers)) as pool:
        started = time.perf_counter()
        counts = list(pool.map(lambda answer: sum(1 for _ in answer), answers))
        return sum(counts) / (time.perf_counter() - started)


def _begin(net: Model, ids: Tensor, num_tokens: int) -> Iterator[Delta]:
    cache = net.new_cache(len(ids) + num_tokens)
    logits = net.forward(ids[None], cache)
    answer = decode(Row(net, ids, cache, logits, Sampling(num_tokens, temperature=0)))
    next(answer)
    return answer


@torch.inference_mode()
def generate(net: Model, ids: Tensor, num_tokens: int) -> float:
    """Return the tokens per second of `model.generate`, without the prefill and the first token."""

    def seconds(count: int) -> float:
        started = time.perf_counter()
        inputs = ids[None].to(net.device)
        exact_count = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        net.hf.generate(inputs, attention_mask=torch.ones_like(inputs), **exact_count)
        return time.perf_counter() - started

    first = seconds(1)
    return (num_tokens - 1) / (seconds(num_tokens) - first)


def beside_llama(net: LlamaModel, prompt_tokens: int, num_tokens: int) -> tuple[float, float, float]:
    """Return medians: seconds of a step, of the call of `llama_decode` alone for its neighbour, and of their ratios."""
    net.__dict__["eos_ids"] = frozenset()
    ids = torch.randint(1000, (prompt_tokens,))
    cache, answer, times = net.new_cache(prompt_tokens), _begin(net, ids, num_tokens + 1), list[tuple[float, float]]()
    token = int(net.forward(ids[None], cache).argmax())
    for _ in range(num_tokens):
        started = time.perf_counter()
        next(answer)
        own = time.perf_counter()
        logits = net.forward_each([token], [cache])
        times.append((own - started, time.perf_counter() - own))
        token = int(logits.argmax())
    steps, calls = zip(*times, strict=True)
    return statistics.median(steps), statistics.median(calls), statistics.median(one / other for one, other in times)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_shape(parser)
    parser.add_argument("--rows", type=at_least(1), default=ROWS, metavar="N", help="answers together (default: 8)")
    parser.add_argument("--gguf", metavar="FILE", help="decode one answer of this file, beside llama.cpp's own call")
    add_number(parser, "--prompt-tokens", 96, "tokens of the shortest prompt")
    parser.add_argument(
        "--answer-tokens", type=at_least(2), default=24, metavar="N", help="tokens of an answer (default: 24)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure and print the results."""
    if args.gguf:
        net = Model.from_pretrained(args.gguf)
        assert isinstance(net, LlamaModel)
        step, call, ratio = beside_llama(net, args.prompt_tokens, args.answer_tokens)
        if args.json:
            print(json.dumps({"step": step, "call": call, "step_to_call": ratio, "settings": run_settings(net)}))
            return 0
        print(", ".join(f"{name} {value}" for name, value in run_settings(net).items()))
        print(f"kvrag {1000 * step:.1f} ms a token, llama_decode and its logits {1000 * call:.1f} ms: {ratio:.3f}x")
        return 0
    sizes = (args.rows, args.prompt_tokens, args.answer_tokens, args.repeats)
    print(f"building a random model of {args.model}'s shape", file=sys.stderr, flush=True)
    net = random_model(args.model, args.layers)
    rates = measure(net, *sizes, lambda line: print(line, file=sys.stderr, flush=True))
    if args.json:
        print(json.dumps(rates))
        return 0
    print(", ".join(f"{name} {value}" for name, value in rates["settings"].items()))
    print(f"\nmodel.generate, one answer {rates['generate']:>10.1f} tokens/s")
    print(f"kvrag, one answer {rates['alone']:>19.1f} tokens/s   {rates['alone_to_generate']:.2f}x model.generate")
    together = f"kvrag, {args.rows} answers together"
    print(f"{together:<26} {rates['together']:>10.1f} tokens/s   {rates['together_to_alone']:.2f}x one answer")
    return 0
