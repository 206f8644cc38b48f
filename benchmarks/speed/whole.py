"""Time of a whole answer: `python -m benchmarks.speed.whole --model FOLDER [--llama PYTHON --gguf FILE]`.

Answers of a fixed length about the documents of `kept`, for every question once with each arm, in turn. `transformers`
is `model.generate` with the same model; `int8` is kvrag with `quantization="int8"`; `llama.cpp` runs in another Python
with the package xllamacpp, on two threads too, and keeps the common prefix with its last prompt. If the model is a GGUF
file, kvrag runs it in llama.cpp, and ratios are to its own full prefill.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.quality.arms import INSTRUCTION
from benchmarks.quality.questions import CORPUS, QUESTIONS, chosen, read_corpus, read_questions, retrieve
from benchmarks.settings import run_settings
from kvrag import BlendEngine, Model

_THREADS = 2
_SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "default": {},
    "0.15": {"ratio": 0.15},
    "plain": {"ratio": 0.0},
}
_LLAMA = """
import json, sys, time
import xllamacpp
given = json.loads(sys.argv[1])
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel = given["gguf"], given["window"], 1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = given["threads"]
server = xllamacpp.Server(params)
for line in sys.stdin:
    asked = json.loads(line)
    options = {"temperature": 0, "ignore_eos": True, "cache_prompt": True}
    started = time.perf_counter()
    done = server.handle_completions({"prompt": asked["ids"], "n_predict": asked["tokens"], **options})
    total, timings = time.perf_counter() - started, done["timings"]
    first = (timings["prompt_ms"] + timings["predicted_ms"] / timings["predicted_n"]) / 1000
    print("kvrag", json.dumps([first, total, timings["predicted_n"]]), flush=True)
"""

Answer = Callable[[list[int]], tuple[float, float]]
"""From prompt ids to the seconds to the first token, nan = unknown, and to the last one."""


def main() -> None:
    """Measure, and print a line per arm."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.whole", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--k", type=int, nargs="+", default=(8, 30), help="chunks of 128 tokens (default: 8 30)")
    parser.add_argument("--n", type=int, default=4, help="questions per length (default: 4)")
    parser.add_argument("--tokens", type=int, default=100, help="of an answer (default: 100)")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="those that contain one of these words (default: all)")
    parser.add_argument("--store", type=Path, metavar="FOLDER", help="keep the chunks for the next run")
    parser.add_argument("--llama", help="Python that has xllamacpp")
    parser.add_argument("--gguf", type=Path, help="the model's weights for llama.cpp")
    args = parser.parse_args()
    torch.set_num_threads(_THREADS)
    models: dict[str, Model] = {}
    if is_gguf := args.model.endswith(".gguf"):
        model = models["GGUF"] = Model.from_pretrained(args.model)
    else:
        for name, quantization in (("int8", "int8"), ("bf16", None)):
            model = models[name] = Model.from_pretrained(args.model, dtype="bfloat16", quantization=quantization)
    corpus = read_corpus(CORPUS, lambda text: len(model.tokenizer.encode(text)), 128)
    rows = {k: retrieve(chosen(read_questions(QUESTIONS), 0, args.n + 1), corpus, k) for k in args.k}
    print(run_settings(model), flush=True)
    with ExitStack() as stack:
        arms: dict[str, Answer] = {} if is_gguf else {"transformers": partial(_transformers, model, args.tokens)}
        for name, one in models.items():
            folder = args.store / name if args.store else stack.enter_context(TemporaryDirectory())
            engine = stack.enter_context(BlendEngine(one, folder, conversation_bytes=0))
            for document in sorted({name for some in rows.values() for row in some for name in row.documents}):
                engine.warm(corpus[document], document=document)
            engine.reset_calibration()  # an earlier run's answers would choose the default's start
            for title, settings in _SETTINGS.items():
                arms[f"{name} {title}"] = partial(_kvrag, engine, args.tokens, settings)
        if args.llama:
            arms["llama.cpp"] = stack.enter_context(_llama(args.llama, args.gguf, model.context_window, args.tokens))
        arms = {name: arm for name, arm in arms.items() if any(word in name for word in args.arms or ("",))}
        for k in args.k:
            texts = ["\n\n".join([INSTRUCTION, *row.passages, f"Question: {row.question}"]) for row in rows[k]]
            prompts = [engine.tokenize(engine.as_prompt(text)) for text in texts]
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
            for number, ids in enumerate(prompts):
                for name in [*arms][number % len(arms) :] + [*arms][: number % len(arms)]:
                    times[name].append(arms[name](ids))
            measured = {name: some[1:] for name, some in times.items()}  # the first includes start-up costs
            print(f"{median(map(len, prompts[1:])):.0f} tokens, {args.n} questions, answers of {args.tokens} tokens")
            print("\n".join(_lines(measured)), flush=True)


def _lines(times: dict[str, list[tuple[float, float]]]) -> Iterator[str]:
    """Yield medians, and the median of the ratios to the first arm for the same prompt."""
    reference = next(iter(times.values()))
    for name, some in times.items():
        ratios = [theirs / total for (_, theirs), (_, total) in zip(reference, some, strict=True)]
        first, total = (median(column) for column in zip(*some, strict=True))
        numbers = f"first token {first:6.2f} s, whole answer {total:6.2f} s"
        yield f"{name:14}{numbers}, {median(ratios):.2f}x (worst {min(ratios):.2f}x)"


def _transformers(model: Model, tokens: int, ids: list[int]) -> tuple[float, float]:
    started = time.perf_counter()
    same: dict[str, Any] = {"min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": False}
    model.hf.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), **same)
    return float("nan"), time.perf_counter() - started


def _kvrag(engine: BlendEngine, tokens: int, settings: dict[str, Any], ids: list[int]) -> tuple[float, float]:
    endless = dict.fromkeys(engine.model.eos_ids, -100.0)
    started = time.perf_counter()
    answer = engine.generate(ids, temperature=0, max_new_tokens=tokens, logit_bias=endless, **settings)
    assert len(answer.token_ids) == tokens
    return answer.report.ttft_s, time.perf_counter() - started


@contextmanager
def _llama(python: str, gguf: Path, window: int, tokens: int) -> Iterator[Answer]:
    given = json.dumps({"gguf": str(gguf), "window": min(window, 8192), "threads": _THREADS})
    command: Sequence[str] = [python, "-c", _LLAMA, given]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        given_to, said_by = process.stdin, process.stdout
        assert given_to is not None
        assert said_by is not None

        def answer(ids: list[int]) -> tuple[float, float]:
            print(json.dumps({"ids": ids, "tokens": tokens}), file=given_to, flush=True)
            for line in said_by:
                if line.startswith("kvrag "):
                    first, total, number = json.loads(line.removeprefix("kvrag "))
                    assert number == tokens
                    return first, total
            raise SystemExit("llama.cpp ended")

        yield answer
        given_to.close()


if __name__ == "__main__":
    main()
