"""Time to first token from a cold disk, with and without `BlendEngine.prefetch` as soon as the chunks are retrieved.

python -m benchmarks.speed.prefetch --model qwen2.5-0.5b

Between retrieval and the prompt, a chain reranks and renders: `--pause` seconds, which are not part of the time. Before
every answer the chunks are dropped from the RAM tier, and their files from the page cache of the operating system.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.settings import run_settings
from benchmarks.shapes import random_model
from kvrag.backend.transformers.untrained import one_token_words
from kvrag.config import BlendConfig
from kvrag.engine import BlendEngine


def main(arguments: list[str] | None = None) -> None:
    """Measure and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-0.5b", help="shape of the random model")
    parser.add_argument("--layers", type=int, help="only so many of its layers")
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--policies", nargs="+", default=["none", "query"])
    parser.add_argument("--pause", type=float, default=0.3, help="seconds from retrieval to the prompt")
    parser.add_argument(
        "--folder", help="folder for the store; default: where temporary files go, which must be a disk"
    )
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args(arguments)
    net = random_model(args.model, args.layers)
    words, rng = one_token_words(net), random.Random(0)
    corpus = ["".join(rng.choices(words, k=args.chunk_tokens)) for _ in range(args.chunks)]
    times: dict[tuple[str, bool], list[float]] = {}
    bytes_read = 0
    config = BlendConfig(ratio=0.15, controller="off")
    with (
        tempfile.TemporaryDirectory(dir=args.folder) as folder,
        BlendEngine(net, folder, config, conversation_bytes=0) as engine,
    ):
        engine.warm(corpus)
        for repeat in range(args.repeats + 1):
            for policy in args.policies:
                for ahead in (False, True):
                    rng.shuffle(corpus)
                    prompt = "\n\n".join([*corpus, "".join(rng.choices(words, k=64))])
                    evict(engine, Path(folder))
                    if ahead:
                        engine.prefetch(corpus)
                    time.sleep(args.pause)
                    messages = [{"role": "user", "content": prompt}]
                    answer = engine.generate(messages, policy=policy, max_new_tokens=1, temperature=0)
                    bytes_read = max(bytes_read, answer.report.bytes_loaded)
                    if repeat:  # the first round warms up
                        times.setdefault((policy, ahead), []).append(answer.report.ttft_s)
                    print(repeat, policy, ahead, answer.report.tier, f"{answer.report.ttft_s:.3f}", file=sys.stderr)
    print(", ".join(f"{name} {value}" for name, value in run_settings(net).items()))
    print(f"{bytes_read / 2**20:.0f} MiB of KV, pause {args.pause:g} s, medians of {args.repeats} rounds")
    for policy in args.policies:
        cold, early = (statistics.median(times[policy, ahead]) for ahead in (False, True))
        print(f"{policy:8} {1000 * cold:6.0f} ms, read ahead {1000 * early:6.0f} ms: {cold / early:.2f}x")


def evict(engine: BlendEngine, folder: Path) -> None:
    """Drop all chunks from the RAM tier, and the store's files from the page cache."""
    engine._pipeline.memory.drop(engine._pipeline.memory.keys())
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)  # pages that are not written yet cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


if __name__ == "__main__":
    main()
