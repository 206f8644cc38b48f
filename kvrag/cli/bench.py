"""Options of `kvrag bench`, apart from the benchmarks: importing those takes seconds."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvrag.cli.common import (
    DTYPES,
    add_number,
    add_setting,
    at_least,
    checked,
    comma_separated,
    existing_path,
)
from kvrag.config import CODECS, DEFAULT_POLICY, POLICIES, check_policy, check_ratio

_SHAPES = ("qwen2.5-0.5b", "qwen2.5-1.5b", "llama-3.1-8b")  # of kvrag.backend.transformers.shapes


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Add the options of every benchmark on a random model."""
    parser.add_argument("--model", default="qwen2.5-0.5b", choices=_SHAPES, help="shape of the random model")
    parser.add_argument("--layers", type=at_least(1), metavar="N", help="use only the first N layers")
    add_number(parser, "--repeats", 3, "number of repeats; the median counts")


def ttft(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag bench ttft`."""
    add_shape(parser)
    add_number(parser, "--chunks", 6, "chunks per prompt")
    add_number(parser, "--chunk-tokens", 512, "tokens per chunk")
    add_number(parser, "--question-tokens", 64, "tokens of the question")
    add_number(parser, "--ratio", 0.15, "recompute ratio", most=1)
    add_number(parser, "--ram-bytes", 0, "size of the RAM tier; 0 = read from disk")
    add_number(parser, "--device-bytes", 0, "size of the tier on the device; 0 = off")
    cold = "drop the chunk files from the page cache before each prompt"
    parser.add_argument("--cold", action="store_true", help=cold)
    parser.add_argument(
        "--policies",
        nargs="+",
        default=["none", "first_k", "query", "hkvd"],
        choices=POLICIES,
        help="policies to compare with full prefill and an exact prefix cache",
    )


def quality(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag bench quality`."""
    add_setting(parser, "model", default="reader")
    add_setting(parser, "dtype", choices=DTYPES)
    add_setting(parser, "device")
    add_setting(parser, "adapter", metavar="FOLDER")
    data = "JSON lines with passages, question, answers"
    parser.add_argument("--data", type=existing_path, metavar="FILE", help=data)
    docs = "documents to make prompts from, without questions: sentences that break off, for the model to complete"
    parser.add_argument("--docs", type=existing_path, metavar="FOLDER", help=docs)
    parser.add_argument(
        "--samples", type=at_least(1), metavar="N", help="number of questions (default: 200; with --docs 100)"
    )
    seeds = "seeds of the prompts that are made, which are pooled"
    parser.add_argument("--seed", type=at_least(0), nargs="+", default=[0], help=seeds)
    parser.add_argument(
        "--policies",
        nargs="+",
        type=comma_separated(checked(str, check_policy)),
        metavar="POLICY",
        help=f"policies to compare with full prefill and plain reuse (default: all; with --docs {DEFAULT_POLICY})",
    )
    parser.add_argument(
        "--ratios",
        nargs="+",
        type=comma_separated(checked(float, check_ratio)),
        default=[[0.05, 0.15, 0.3]],
        metavar="R",
        help="0 to 1 (default: 0.05 0.15 0.3)",
    )
    parser.add_argument("--codec", choices=CODECS, default="native", help="codec of stored chunks (default: native)")
    parser.add_argument(
        "--context-tokens",
        type=at_least(0),
        metavar="N",
        help="encode passages with N tokens of their document as context; 0 = alone (default: as `kvrag warm` if rows "
        "name documents, else 0)",
    )
    parser.add_argument(
        "--chunk-tokens", type=at_least(16), metavar="N", help="with --docs: maximum tokens per chunk (default: 256)"
    )
    parser.add_argument(
        "--top-k", type=at_least(1), metavar="K", help="with --docs: chunks to retrieve for a prompt (default: 4)"
    )
    parser.add_argument(
        "--max-tokens", type=at_least(1), metavar="N", help="maximum length of an answer (default: 16; with --docs 8)"
    )
    parser.add_argument(
        "--stop",
        nargs="+",
        metavar="TEXT",
        help=r"strings that end an answer; \n = line break (default: \n\n for the reader; with --docs the end of the "
        "sentence or line)",
    )
    parser.add_argument("--instruction", default="", metavar="TEXT", help="text between passages and question")
    parser.add_argument("--skip-long", action="store_true", help="skip rows that do not fit into the window")
    add_number(parser, "--ram-bytes", 2 << 30, "size of the RAM tier; 0 = read from disk")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="store rows.jsonl and results.json there; run again to resume"
    )
