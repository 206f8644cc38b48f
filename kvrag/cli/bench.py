"""Options of `kvrag bench`, apart from the benchmarks: importing those takes seconds."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from kvrag.bench.datasets import ARTICLES, WORLDS
from kvrag.bench.plan import LOAD_SPEEDS, LOAD_UNITS, ROUTINGS, SHAPES, Plan
from kvrag.bench.simulate import DEVICES, LOADS, MODELS
from kvrag.cli.common import DTYPES, add_setting, at_least, checked, encoded_behind, existing_path
from kvrag.config import CODECS, DEFAULT_POLICY, POLICIES, check_codec, check_policy, check_ratio
from kvrag.errors import SettingError

_SHAPES = ("qwen2.5-0.5b", "qwen2.5-1.5b", "llama-3.1-8b")  # of kvrag.backend.transformers.shapes
USUAL = "hkvd"
"""The usual reference in the literature."""


def _add_shape(parser: argparse.ArgumentParser) -> None:
    """Add the options of every benchmark on a random model."""
    parser.add_argument("--model", default="qwen2.5-0.5b", choices=_SHAPES, help="shape of the random model")
    parser.add_argument("--layers", type=at_least(1), metavar="N", help="use only the first N layers")
    _add_number(parser, "--repeats", 3, "number of repeats; the median counts")


def _add_number(parser: argparse.ArgumentParser, name: str, default: float, what: str, least: float = 0) -> None:
    """Add an option for a number of the default's type, with the default in its help."""
    kind = checked(float, check_ratio) if name in ("--ratio", "--overlap") else at_least(least, type(default))
    parser.add_argument(name, type=kind, default=default, metavar="N", help=f"{what} (default: {default})")


def ttft(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag bench ttft`."""
    _add_shape(parser)
    _add_number(parser, "--chunks", 6, "chunks per prompt")
    _add_number(parser, "--chunk-tokens", 512, "tokens per chunk")
    _add_number(parser, "--question-tokens", 64, "tokens of the question")
    _add_number(parser, "--ratio", 0.15, "recompute ratio")
    _add_number(parser, "--check-layer", 1, "of hkvd")
    parser.add_argument(
        "--ram-bytes", type=int, default=0, metavar="N", help="size of the RAM tier (default: off, read from disk)"
    )
    parser.add_argument(
        "--device-bytes", type=int, default=0, metavar="N", help="size of the tier on the device (default: off)"
    )
    parser.add_argument(
        "--cold", action="store_true", help="drop the chunk files from the page cache before each prompt"
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        default=["none", "first_k", "query", "hkvd"],
        choices=POLICIES,
        help="policies to compare with full prefill and an exact prefix cache",
    )


def gpu(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag bench gpu`."""
    parser.add_argument(
        "--models",
        nargs="+",
        choices=_SHAPES,
        default=["qwen2.5-1.5b", "llama-3.1-8b"],
        help="shapes of the random models (default: qwen2.5-1.5b llama-3.1-8b)",
    )
    parser.add_argument("--layers", type=at_least(1), metavar="N", help="use only the first N layers")
    parser.add_argument(
        "--tokens",
        nargs="+",
        type=at_least(512),
        default=[2048, 4096, 16384, 32768],
        metavar="N",
        help="lengths of the prompts (default: 2048 4096 16384 32768)",
    )
    parser.add_argument("--device", help="device: cuda, cpu, ... (default: a GPU if there is one)")
    _add_number(parser, "--repeats", 3, "rounds per length; the median counts")
    _add_number(parser, "--seconds", 450, "no part begins later than this")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result there as JSON")


def chat(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag bench chat`."""
    _add_shape(parser)
    _add_number(parser, "--turns", 10, "number of turns, at least 2", least=2)  # growth counts from the second
    _add_number(parser, "--chunks", 4, "new chunks per turn")
    _add_number(parser, "--chunk-tokens", 128, "tokens per chunk")
    _add_number(parser, "--question-tokens", 32, "tokens of a question")
    _add_number(parser, "--answer-tokens", 32, "tokens of an answer")
    _add_number(parser, "--ratio", 0.15, "recompute ratio")


def decode(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag bench decode`."""
    _add_shape(parser)
    parser.add_argument("--rows", type=at_least(1), default=8, metavar="N", help="answers together (default: 8)")
    _add_number(parser, "--prompt-tokens", 96, "tokens of the shortest prompt")
    parser.add_argument(
        "--answer-tokens", type=at_least(2), default=24, metavar="N", help="tokens of an answer (default: 24)"
    )
    parser.add_argument("--compiled", action="store_true", help="also measure compiled decode steps (torch.compile)")


def _check_ratios(text: str) -> None:
    """Check ratios, separated by commas."""
    for part in filter(None, text.split(",")):
        try:
            check_ratio(float(part))
        except ValueError as error:
            raise SettingError(str(error)) from None


def _check_codecs(text: str) -> None:
    """Check codecs, separated by commas."""
    for part in filter(None, text.split(",")):
        check_codec(part)


def _check_contexts(text: str) -> None:
    """Check what chunks are encoded behind, separated by commas."""
    for part in filter(None, text.split(",")):
        encoded_behind(part)


def quality(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag bench quality`."""
    add_setting(parser, "model", default="reader")
    add_setting(parser, "dtype", choices=DTYPES)
    add_setting(parser, "device")
    parser.add_argument(
        "--data",
        type=existing_path,
        metavar="FILE",
        help="JSON lines with passages, question, answers (default: drawn from the reader's world)",
    )
    parser.add_argument(
        "--world", type=int, choices=WORLDS, help="the world to draw from (default: the one the reader was trained on)"
    )
    parser.add_argument(
        "--docs",
        type=existing_path,
        metavar="FOLDER",
        help="documents to make prompts from, without questions: compares blending with full prefill on sentences "
        "that break off",
    )
    parser.add_argument(
        "--samples", type=at_least(1), metavar="N", help="number of questions (default: 200; with --docs 100)"
    )
    parser.add_argument("--seed", type=at_least(0), default=0, help="seed of the drawn questions and of the intervals")
    parser.add_argument(
        "--policies",
        nargs="+",
        type=checked(str, lambda text: check_policy(re.split("[:,]", text)[0])),
        metavar="POLICY",
        help="policies, optionally with settings: hkvd hkvd:check_layer=3,metric=cosine query:band=0.2:0.6 "
        f"(default: all; full, none and random are always included; with --docs {DEFAULT_POLICY}, full and none)",
    )
    parser.add_argument(
        "--ratios",
        nargs="+",
        type=checked(str, _check_ratios),
        default=["0.05", "0.15", "0.3"],
        metavar="R",
        help="0 to 1",
    )
    parser.add_argument(
        "--chunk-tokens",
        nargs="+",
        metavar="N",
        help="cut and join the passages into chunks of about N tokens; 0 = unchanged (default); with --docs the "
        "maximum length of a chunk, as for `kvrag warm` (default: 256)",
    )
    parser.add_argument(
        "--preamble", nargs="+", default=["on"], metavar="on|off", help="encode chunks with or without the preamble"
    )
    parser.add_argument(
        "--codec",
        nargs="+",
        type=checked(str, _check_codecs),
        default=["native"],
        metavar="|".join(CODECS),
        help="codecs of the stored KV",
    )
    parser.add_argument(
        "--context-tokens",
        nargs="+",
        type=checked(str, _check_contexts),
        metavar="N|headings",
        help="encode passages with N tokens of their document as context, or with its title and headings; 0 = alone "
        "(default: as `kvrag warm` if rows name documents, else 0)",
    )
    parser.add_argument(
        "--top-k",
        type=at_least(1),
        metavar="K",
        help="chunks to retrieve for a prompt: from --docs (default: 4), else from an index of drawn articles, which "
        "are warmed as a whole (default: prompts of whole articles)",
    )
    parser.add_argument(
        "--around",
        type=at_least(0),
        default=0,
        metavar="N",
        help="neighbours to retrieve with each chunk of --top-k (default: 0)",
    )
    parser.add_argument(
        "--articles",
        type=at_least(1),
        metavar="N",
        help="number of articles in the index of --top-k (default: "
        + ", ".join(f"{number} in world {world}" for world, number in ARTICLES.items())
        + ")",
    )
    parser.add_argument(
        "--missing",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of the passages to leave out of the prompts at random, as if not retrieved",
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", dest="settings", help="settings of all policies"
    )
    parser.add_argument("--against", default=USUAL, metavar="POLICY", help=f"policy to compare with (default: {USUAL})")
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
    parser.add_argument(
        "--ram-bytes",
        type=at_least(0),
        default=2 << 30,
        help="size of the RAM tier (default: 2 GiB; 0 = read from disk)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="store rows.jsonl and results.json there; run again to resume"
    )
    parser.add_argument("--plots", action="store_true", help="write plots to --out; needs kvrag[bench]")


def simulate(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag bench simulate`."""
    parser.add_argument(
        "--devices",
        nargs="+",
        default=list(DEVICES),
        choices=DEVICES,
        metavar="DEVICE",
        help=f"devices of the tables: {'; '.join(DEVICES)} (default: all)",
    )
    parser.add_argument(
        "--models",
        nargs="+",
        default=list(MODELS),
        choices=MODELS,
        metavar="MODEL",
        help=f"models of the first table: {', '.join(MODELS)} (default: all)",
    )
    parser.add_argument(
        "--context", type=int, default=4000, metavar="N", help="context length of the first table (default: 4000)"
    )
    parser.add_argument("--length-model", default="Llama-3.1-8B", choices=MODELS, help="model of the second table")
    parser.add_argument("--length-load", default="NVMe, 3 GB/s", choices=LOADS, help="bandwidth of the second table")
    parser.add_argument(
        "--ratio", type=checked(float, check_ratio), default=0.15, metavar="R", help="recompute ratio (default: 0.15)"
    )
    parser.add_argument(
        "--check", action="store_true", help="compare predictions with measurements on this machine; takes minutes"
    )
    parser.add_argument("--model", default="qwen2.5-0.5b", help="with --check: shape of the random model")
    parser.add_argument("--layers", type=at_least(1), help="with --check: use only the first N layers")
    parser.add_argument("--repeats", type=int, default=3, help="with --check: number of repeats")


def cluster(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag bench cluster`."""
    default = Plan()
    parser.add_argument("--model", default="Llama-3.1-8B", choices=SHAPES, help="model (default: Llama-3.1-8B)")
    parser.add_argument("--device", default="H100", choices=DEVICES, metavar="DEVICE", help="GPU (default: H100)")
    parser.add_argument("--codec", default="int8", choices=CODECS, help="codec of stored chunks (default: int8)")
    _add_number(parser, "--ratio", 0.15, "recompute ratio")
    parser.add_argument("--policy", default=DEFAULT_POLICY, choices=POLICIES, help="which tokens are recomputed")
    parser.add_argument("--profile", type=existing_path, metavar="FILE", help="speeds, as written by --calibrate")
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="measure this machine with --model, write the speeds to FILE and use them; what it cannot measure stays "
        "as assumed for --device; takes minutes",
    )
    parser.add_argument("--repeats", type=at_least(1), default=1, metavar="N", help="with --calibrate: rounds")
    parser.add_argument(
        "--replicas", type=at_least(1), metavar="N", help="copies of the model (default: as many as the target needs)"
    )
    parser.add_argument(
        "--controller",
        default=default.controller,
        choices=("auto", "off"),
        help="auto: full prefill where the engine would choose it; off: always blend (default: auto)",
    )
    parser.add_argument(
        "--routing",
        default=default.routing,
        choices=ROUTINGS,
        help="replica of a request: any, or the home of most of its chunks (default: random)",
    )
    for name, what, least in (
        ("chunks", "chunks of the corpus", 1),
        ("chunk_tokens", "tokens per chunk", 1),
        ("chunks_per_prompt", "chunks per prompt", 1),
        ("system_tokens", "tokens of the system prompt, in every cache", 0),
        ("question_tokens", "tokens of the question", 1),
        ("answer_tokens", "tokens of the answer", 1),
        ("exponent", "of Zipf's law, the popularity of chunks", 0),
        ("rate", "requests per second", 1e-6),
        ("target_s", "time to first token of 95 %% of the requests", 1e-6),
        ("gpus_per_replica", "GPUs that hold one copy of the model, by tensor parallelism", 1),
        ("device_gib", "GiB for chunks in a replica's GPU memory, where kvrag keeps none today", 0),
        ("ram_gib", "GiB for chunks in a replica's RAM", 0),
        ("disk_gib", "GiB for chunks on a replica's disk", 0),
        ("stored", "share of the corpus that is warmed, the most popular chunks", 0),
        ("prefix_gib", "GiB of a replica's GPU memory that prefix caching uses", 0),
        ("gpu_hour", "price of a GPU with its host per hour", 0),
        ("store_gb_month", "price of 10^9 stored bytes per month", 0),
        ("reads_thousand", "price of 1,000 reads of 4 MiB from the store", 0),
        ("requests", "requests to simulate", 100),
        ("seed", "of everything that is drawn", 0),
    ):
        _add_number(parser, f"--{name.replace('_', '-')}", getattr(default, name), what, least)
    for option, name, what in (
        ("--disk-gb-s", "disk_bytes_per_s", "GB/s of a local disk"),
        ("--store-gb-s", "store_bytes_per_s", "GB/s from the shared store to one machine"),
        ("--store-total-gb-s", "store_total_bytes_per_s", "GB/s from the shared store to all machines"),
        ("--store-latency-ms", "store_latency_s", "milliseconds until the shared store sends the first byte"),
    ):
        parser.add_argument(
            option,
            type=at_least(0 if name == "store_latency_s" else 1e-6, float),
            dest=name,
            metavar="N",
            help=f"{what} (default: the profile's, else {LOAD_SPEEDS[name] / LOAD_UNITS[name]:g}, assumed)",
        )
    parser.add_argument("--brief", action="store_true", help="leave out other decisions and other assumptions")


def ingest(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag bench ingest`."""
    _add_shape(parser)
    _add_number(parser, "--chunks", 16, "to encode")
    _add_number(parser, "--chunk-tokens", 256, "tokens per chunk")
    _add_number(parser, "--document-chunks", 1, "chunks per document, each the context of the next", least=1)
    _add_number(parser, "--overlap", 0.0, "share of a chunk that repeats the end of the one before")


def serve(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag bench serve`."""
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="URL of the server (default: http://127.0.0.1:8000)"
    )
    parser.add_argument("--api-key", default="", metavar="KEY", help="API key, if the server requires one")
    parser.add_argument("--model", default="", help="model name (default: the server's first model)")
    parser.add_argument("--clients", type=int, default=32, metavar="N", help="concurrent clients (default: 32)")
    parser.add_argument(
        "--rate",
        type=at_least(0, float),
        default=0.0,
        metavar="N",
        help="requests per second at random times, instead of --clients that wait for their answers",
    )
    parser.add_argument("--seconds", type=float, default=120, metavar="S", help="duration in seconds (default: 120)")
    parser.add_argument(
        "--kill", type=int, default=8, metavar="N", help="clients per second that disconnect mid-stream (default: 8)"
    )


def vllm(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag bench vllm`."""
    _add_shape(parser)
    parser.set_defaults(repeats=2)  # rounds with many requests each
    _add_number(parser, "--chunks", 6, "chunks per prompt")
    _add_number(parser, "--chunk-tokens", 512, "tokens per chunk")
    _add_number(parser, "--question-tokens", 64, "tokens of the question")
    _add_number(parser, "--corpus", 24, "warmed chunks that prompts choose from")
    _add_number(parser, "--answer-tokens", 24, "tokens per answer")
    _add_number(parser, "--clients", 16, "concurrent clients")
    _add_number(parser, "--requests", 32, "requests per round and server")
    _add_number(parser, "--singles", 5, "requests to an idle server, per method; the medians count")
    _add_number(parser, "--ratio", 0.15, "recompute ratio")
    parser.add_argument(
        "--vllm",
        default="--enforce-eager",
        metavar="ARGS",
        help="further arguments of both servers, in one string (default: --enforce-eager)",
    )
    parser.add_argument(
        "--extra", default="{}", type=json.loads, metavar="JSON", help="further kv_connector_extra_config of vllm-kvrag"
    )


def match(parser: argparse.ArgumentParser) -> None:
    """Command line of `kvrag bench match`."""
    for name, default, what in (
        ("--chunks", 20_000, "in the catalog of the second part"),
        ("--chunk-tokens", 512, "tokens in each of them"),
        ("--prompt-tokens", 5_400, "tokens of the prompts matched against it"),
        ("--prompts", 200, "such prompts; the median counts"),
        ("--case-tokens", 30_000, "tokens of the adversarial prompts; 0 leaves the first part out"),
        ("--repeats", 5, "of each of these; the best counts"),
    ):
        _add_number(parser, name, default, what)
    parser.add_argument(
        "--folder", type=Path, help="where the synthetic store is made and kept (default: a temporary folder)"
    )


def codec(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag bench codec`."""
    parser.add_argument("paths", nargs="+", type=existing_path, metavar="FILE", help="text files, one chunk each")
    add_setting(parser, "model", default="reader")
    add_setting(parser, "dtype", choices=DTYPES)
    parser.add_argument(
        "--question", default="Question: Who is this about?", metavar="TEXT", help="question of each prompt"
    )
    parser.add_argument("--prompts", type=at_least(1), default=50, metavar="N", help="number of prompts (default: 50)")
    parser.add_argument("--chunks", type=at_least(1), default=6, metavar="N", help="chunks per prompt (default: 6)")
