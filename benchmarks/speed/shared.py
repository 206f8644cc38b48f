"""Time to first token from a shared store, before and after its chunks are copied, relative to a local folder.

python -m benchmarks.speed.shared s3://BUCKET/PREFIX valkey://HOST:6379/0/PREFIX --model qwen2.5-0.5b

The RAM tier is off. The prefixes must be empty, or warmed by this benchmark. Local copies are removed before every
answer that is read from the shared store; files are in the page cache of the operating system.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.settings import run_settings
from benchmarks.shapes import one_token_words, random_model
from kvrag.backend.transformers import Model
from kvrag.config import BlendConfig, without_password
from kvrag.engine import BlendEngine
from kvrag.store import SharedStore


def main(arguments: list[str] | None = None) -> None:
    """Measure and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("urls", nargs="+", metavar="URL")
    parser.add_argument("--model", default="qwen2.5-0.5b", help="shape of the random model, or a model's folder")
    parser.add_argument("--layers", type=int, help="only so many of the random model's layers")
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--policy", default="query")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args(arguments)
    is_folder = Path(args.model).is_dir()
    net = Model.from_pretrained(args.model) if is_folder else random_model(args.model, args.layers)
    words, rng = one_token_words(net), random.Random(0)
    corpus = ["".join(rng.choices(words, k=args.chunk_tokens)) for _ in range(args.chunks)]
    config = BlendConfig(ratio=0.15, controller="off")
    times: dict[str, list[float]] = {}
    bytes_read = 0
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrag-bench-"))

        def opened(store: SharedStore | str) -> BlendEngine:
            engine = BlendEngine(net, store, config, ram_bytes=0, conversation_bytes=0)
            stack.enter_context(engine).warm(corpus)
            return engine

        local = opened(f"{folder}/local")
        places = {without_password(url): SharedStore(url, f"{folder}/cache") for url in args.urls}
        engines = {name: opened(store) for name, store in places.items()}
        for repeat in range(args.repeats + 1):
            rng.shuffle(corpus)
            messages = [{"role": "user", "content": "\n\n".join([*corpus, "".join(rng.choices(words, k=64))])}]
            ways: list[tuple[str, BlendEngine, SharedStore | None]] = [("a local folder", local, None)]
            for name, store in places.items():
                ways += [(name, engines[name], store), (f"{name}, copied", engines[name], None)]
            rng.shuffle(ways)  # the first answer of a round fills the processor's caches for the others
            for way, engine, cold in ways:
                if cold is not None:
                    cold.drop_copies()
                report = engine.generate(messages, policy=args.policy, max_new_tokens=1, temperature=0).report
                bytes_read = max(bytes_read, report.bytes_loaded)
                if cold is not None:
                    cold._promoter.submit(lambda: None).result()  # chunks that were used have been copied
                if repeat:  # the first round warms up
                    times.setdefault(way, []).append(report.ttft_s)
                print(repeat, way, report.tier, f"{report.ttft_s:.3f}", file=sys.stderr)
    print(", ".join(f"{name} {value}" for name, value in run_settings(net).items()))
    print(f"{bytes_read / 2**20:.0f} MiB of KV, policy {args.policy}, medians of {args.repeats} rounds")
    reference = statistics.median(times["a local folder"])
    for way, seconds in sorted(times.items()):
        print(f"{way:40} {1000 * statistics.median(seconds):6.0f} ms, {statistics.median(seconds) / reference:.2f}x")


if __name__ == "__main__":
    main()
