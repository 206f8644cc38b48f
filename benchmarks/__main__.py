"""Run a benchmark: `python -m benchmarks NAME`, in the root of the repository."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvrag.cli.main import Parser, add_command, execute

_COMMANDS: dict[str, tuple[str, str]] = {
    "answers": (
        "benchmarks.quality.answers",
        "measure how many of full prefill's answers your model keeps on your documents or questions",
    ),
    "decay": ("benchmarks.speed.decay", "measure whether reuse lasts over thousands of prompts, in a bounded store"),
    "decode": ("benchmarks.speed.decode", "measure decoding: several answers together, and one"),
    "gpu": ("benchmarks.speed.gpu", "check a GPU: exactness, time to first token, ingestion, a profile"),
    "host": ("benchmarks.speed.host", "measure the host's work before the first launch, step by step"),
    "kept": (
        "benchmarks.quality.kept",
        "measure right and kept answers and the time to the first token, per setting of the engine",
    ),
    "serve": ("benchmarks.speed.serve", "load-test a running server"),
    "ttft": (
        "benchmarks.speed.ttft",
        "measure the limits of the time to first token: computing and loading, each alone",
    ),
    "vllm": ("benchmarks.speed.vllm", "measure vLLM with vllm-kvrag against vLLM alone, under load"),
    "quality": (
        "benchmarks.quality.command",
        "measure answer quality on the reader's world, or as `answers`, with more settings",
    ),
    "simulate": ("benchmarks.simulate", "predict where reuse wins and where it loses, with a cost model"),
}


def _parser(argv: Sequence[str]) -> Parser:
    parser = Parser(prog="python -m benchmarks", description=__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="NAME")
    for name, (module, about) in _COMMANDS.items():
        add_command(subparsers, name, module, about, name in argv)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark; the exit codes are those of `kvrag`."""
    return execute(_parser, argv)


if __name__ == "__main__":
    sys.exit(main())
