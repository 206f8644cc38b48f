"""Try every family of the installed transformers on a tiny random model: is it gated, and if not, why?

    python tests/helpers/scan_models.py             # all families, in about ten minutes; add names to try only these
    python tests/helpers/scan_models.py --gated     # the sentence of docs/when-it-wins.md, from the table of families
    python tests/helpers/scan_models.py --figures   # the table of benchmarks/notes/models.md, in about two minutes

A family is gated if it is in `loading.FAMILIES`, which means that tests/integration/test_families.py tests it.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
from collections.abc import Iterator
from functools import partial
from itertools import permutations
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from blending import CHUNKS, messages, plain_logits, prepare, relative
from families import FAMILIES, HYBRIDS, build
from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto import modeling_auto
from transformers.utils import logging

from kvrag import BlendEngine, Model
from kvrag.backend.transformers import loading
from kvrag.errors import KvragError, reason_of
from kvrag.inspect.gate import verify

_SECONDS, _BYTES = 60, 9 << 30  # per family: some cannot be made small


def gated() -> str:
    """Return the names of the gated families, as in the documentation."""
    ropes = "default, llama3, yarn, linear, dynamic, longrope"
    more = {"llama": f" ({ropes})", "mistral": " (with window)", "qwen2": " (with window)"}
    more["phi3"] = " (with window, longrope)"
    return ", ".join(name + more.get(name, "") for name in sorted(loading.FAMILIES)) + "."


def figures() -> Iterator[str]:
    """Yield a table of all tested models, random in float32: the gate, coverage, bytes per token, KL of blending."""
    yield "| model | gate: error at ratio 1.0 | reused | bytes per token | KL of plain reuse | of `query` at 15 % |"
    yield "|---|---|---|---|---|---|"
    tokenizer = AutoTokenizer.from_pretrained(loading.reader_path())
    for name, (model_type, changes) in (FAMILIES | HYBRIDS).items():
        hf = build(model_type, **changes)
        with TemporaryDirectory() as folder, BlendEngine(Model(hf, tokenizer, name), folder) as engine:
            engine.warm(CHUNKS)
            errors, reused, plain, blended = zip(*(_compare(engine, hf, order) for order in _ORDERS), strict=True)
        kl = f"{mean(plain):.1e} | {100 * mean(blended) / mean(plain):.0f} % of it"
        yield f"| {name} | {max(errors):.0e} | {100 * mean(reused):.0f} % | {engine.model.bytes_per_token} | {kl} |"


_ORDERS = list(permutations(CHUNKS))[1::4]


def _compare(engine: BlendEngine, hf: Any, chunks: tuple[str, ...]) -> tuple[float, float, float, float]:
    """Return the largest relative error at ratio 1.0, the reused share, the KL of plain reuse and of 15 %."""
    ids = engine.model.tokenizer.render(messages(*chunks))
    full = plain_logits(hf, ids)[-1]
    done = [prepare(engine, ids, ratio, policy) for ratio, policy in ((1.0, "query"), (0.0, "none"), (0.15, "query"))]
    kl = [
        float(
            torch.nn.functional.kl_div(
                each.logits[0].float().log_softmax(0), full.log_softmax(0), log_target=True, reduction="sum"
            )
        )
        for each in done
    ]
    return relative(done[0].logits[0], full), done[1].report.stored_tokens / len(ids), kl[1], kl[2]


def attempt(model_type: str) -> str:
    """Return what happens to a family: gated, passes, fails, or the reason why it is refused."""
    try:
        if AutoConfig.for_model(model_type).get_text_config().model_type in loading.FAMILIES:
            return "gated"
        hf = build(model_type)
    except Exception as error:  # architectures fail in different ways
        return f"not tried: no tiny model can be built ({reason_of(error)})"
    try:
        tokenizer = AutoTokenizer.from_pretrained(loading.reader_path())
        model = Model(hf, tokenizer, model_type, allow_unverified=True)
        failed = [check.name for check in verify(partial(BlendEngine, model)) if not check.passed]
    except KvragError as error:
        return f"refused: {str(error).partition(' cannot be blended: ')[2]}"
    except Exception as error:
        return f"fails: {reason_of(error)}"
    return f"fails: {', '.join(failed)}" if failed else "passes, but is not in the table of families"


def _answer(model_type: str, results: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    torch.set_num_threads(1)
    results.put(attempt(model_type))


def main(names: list[str]) -> None:
    """Print one line per family."""
    logging.set_verbosity(logging.CRITICAL)
    processes = multiprocessing.get_context("fork")
    known = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    for model_type in names or sorted({*known[0], *known[1]}):
        results = processes.SimpleQueue()
        process = processes.Process(target=_answer, args=(model_type, results))
        process.start()
        process.join(_SECONDS)
        process.kill()
        too_big = "not tried: its tiny model is too large or too slow"
        print(f"| {model_type} | {too_big if results.empty() else results.get()} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--gated"]:
        print(gated())
    elif sys.argv[1:] == ["--figures"]:
        logging.set_verbosity(logging.CRITICAL)
        for line in figures():
            print(line, flush=True)
    else:
        main(sys.argv[1:])
