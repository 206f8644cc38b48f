"""`python -m benchmarks.quality.starts`: starts and margins of adaptive recompute, simulated on questions to tune on.

Fixed ratios are measured on every prompt, and `kvrag.control.trial` tells from them what adaptive recompute does.
Margin 0 is the fixed ratio itself, so that `--margins 0` compares policies.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from statistics import mean, median
from tempfile import TemporaryDirectory

import torch

from benchmarks.quality.arms import INSTRUCTION
from benchmarks.quality.questions import TUNING, TUNING_CORPUS, read_corpus, read_questions, retrieve
from benchmarks.settings import run_settings
from kvrag import BlendConfig, BlendEngine, Model
from kvrag.config import Sampling
from kvrag.control.agreement import compare
from kvrag.control.calibrate import MARGINS
from kvrag.control.trial import Trial
from kvrag.reuse.select import selecting

STARTS = (0.0, 0.05, 0.1, 0.15)


def main() -> None:
    """Measure, and print a line per start and margin."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.starts", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--n", type=int, default=40, help="number of questions (default: 40)")
    parser.add_argument("--context", type=int, default=256, help="tokens that chunks are encoded with; 0 = alone")
    parser.add_argument("--starts", type=float, nargs="+", default=STARTS, help="ratios (default: 0 0.05 0.1 0.15)")
    parser.add_argument("--policies", nargs="+", default=("query",), help="with settings, as in query:first_tokens=4")
    parser.add_argument("--margins", type=float, nargs="+", default=(0.0, *MARGINS), help="in nats; 0 = a fixed ratio")
    parser.add_argument("--shuffled", action="store_true", help="chunks in random order instead of the best first")
    args = parser.parse_args()
    torch.set_num_threads(2)
    model = Model.from_pretrained(args.model, dtype=args.dtype)
    corpus = read_corpus(TUNING_CORPUS, lambda text: len(model.tokenizer.encode(text)), 128)
    config = BlendConfig(deterministic=True, controller="off", context_tokens=args.context)
    configs = [replace(config, ratio=ratio, policy=policy) for policy in args.policies for ratio in args.starts]
    trials, order = list[Trial](), random.Random(0)
    with TemporaryDirectory() as folder, BlendEngine(model, folder, config) as engine:
        for name, chunks in corpus.items():
            engine.warm(chunks, document=name)
        for row in retrieve(read_questions(TUNING)[: args.n], corpus, 8):
            passages = order.sample(row.passages, len(row.passages)) if args.shuffled else row.passages
            ids = engine.tokenize(engine.as_prompt("\n\n".join([INSTRUCTION, *passages, f"Question: {row.question}"])))
            sampling = Sampling(max_new_tokens=32, temperature=0, repetition_penalty=1.0)
            full, *records = compare(model, engine.prefill, ids, configs, sampling)
            trials.append(Trial.of(full, records))
    print(run_settings(model))
    for at, one in enumerate(configs):
        passes, divergence = selecting(one, model.num_layers), mean(trial.cells[at].kl for trial in trials)
        for margin in args.margins:
            done = [trial.adaptive(at, margin, passes) for trial in trials]
            kept, same = sum(outcome.kept for outcome in done), sum(outcome.identical for outcome in done)
            rows = [outcome.rows for outcome in done]
            numbers = f"median {median(rows):.2f}, mean {mean(rows):.2f}, most {max(rows):.2f}"
            counts = f"kept {kept} of {len(done)}, identical {same}; KL {divergence:.3f}; rows at first: {numbers}"
            print(f"{one.policy} start {one.ratio:<4g} margin {margin:<3g}: {counts}")


if __name__ == "__main__":
    main()
