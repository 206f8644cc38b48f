"""Time to first token, and its limits: the model on as many tokens, and loading the chunks, each alone."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.shapes import random_model
from benchmarks.speed import first_token
from benchmarks.speed.first_token import TtftSetup
from kvrag.backend.protocol import KVCache
from kvrag.backend.transformers import Model
from kvrag.cli.common import add_number, checked
from kvrag.config import BlendConfig, check_option
from kvrag.engine import BlendEngine
from kvrag.request import Request
from kvrag.reuse.load import LayerLoader, Trace
from kvrag.store import ChunkReader
from kvrag.types import BlendReport

# measured in the same rounds, as if they were policies
_TOKENS, _LOAD, _ROWS = "tokens of the prompt", "loading alone", "rows of "


@dataclass(frozen=True)
class Limits:
    """Limits of a policy's time to first token.

    `rows_s` is the time of the model's own forward pass over as many tokens with the other tokens in its cache;
    `rows_share` is `rows_s / ttft_s`. Both are None where layers keep a state, which such a pass would lack.
    `load_alone_s` is how long loading the chunks takes while nothing is computed, and `hidden` the share of it that the
    forward pass did not wait for.
    """

    rows_s: float | None
    rows_share: float | None
    load_alone_s: float
    hidden: float


def measure(
    setup: TtftSetup,
    progress: Callable[[str], None] = lambda line: None,
    net: Model | None = None,
    with_prefix: bool = True,
) -> tuple[first_token.TtftResult, dict[str, Limits]]:
    """Return `first_token.measure`, and the limits of every policy by name.

    Args:
        with_prefix: As there; never with models whose layers keep a state, which cannot be cropped.
    """
    if net is None:
        progress(f"building a random model of {setup.model}'s shape")
        net = random_model(setup.model, setup.layers)
    ids: list[int] = []
    caches: list[KVCache] = []
    reports: dict[str, BlendReport] = {}

    def ask(engine: BlendEngine, policy: str, chunks: list[str], question: str) -> BlendReport | None:
        name = policy.removeprefix(_ROWS)
        if policy == _TOKENS:
            ids[:] = engine.tokenize(first_token.messages_of(chunks, question))
            caches[:] = caches or [engine.prefill(ids, BlendConfig(policy="none", controller="off")).cache]
        elif policy == _LOAD:
            _load_alone(engine, ids)
        elif name != policy:
            _rows_alone(engine, ids, caches[0], reports[name].fresh_tokens + reports[name].recomputed_tokens)
        else:
            reports[policy] = first_token.ask(engine, policy, chunks, question)
            return reports[policy]
        return None

    rows = () if net.keeps_states else tuple(f"{_ROWS}{policy}" for policy in setup.policies)
    more = (_TOKENS, _LOAD, *rows)
    asked = replace(setup, policies=(*setup.policies, *more))
    result = first_token.measure(asked, ask, progress, net, with_prefix and not net.keeps_states)
    seconds = {row.name: row.ttft_s for row in result.rows}
    result = replace(result, rows=[row for row in result.rows if row.name not in more])
    limits = {}
    for row in result.rows:
        if row.load_stall_s is not None:
            rows_s, load_s = seconds.get(f"{_ROWS}{row.name}"), seconds[_LOAD]
            share, hidden = rows_s and rows_s / row.ttft_s, max(1 - row.load_stall_s / load_s, 0.0)
            limits[row.name] = Limits(rows_s, share, load_s, hidden)
    return result, limits


def _rows_alone(engine: BlendEngine, ids: list[int], cache: KVCache, number: int) -> None:
    """Run the model on a prompt's last tokens, with a complete cache of the others."""
    cache.set_length(len(ids) - number)
    engine.model.forward(torch.tensor(ids[-number:])[None], cache)


def _load_alone(engine: BlendEngine, ids: list[int]) -> None:
    """Load a prompt's chunks as a request does, without computing anything meanwhile."""
    memory, readers = engine._pipeline.memory, dict[str, ChunkReader]()
    matches = engine._lookup.find(ids, engine.config.min_run)
    with closing(Request(ids, readers=readers)) as request:
        request.match(matches)
        for run in request.runs:
            reader = memory.open(run.key) or engine.store.open(run.key)
            assert reader is not None
            readers[run.key] = reader
        with closing(LayerLoader(engine.model, request, engine.codec, Trace(engine.model), len(ids))) as layers:
            for number in range(engine.model.num_layers):
                layers.layer(number)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    first_token.add_shape(parser)
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
        type=checked(str, partial(check_option, "policy")),
        metavar="POLICY",
        help="policies to compare with full prefill and an exact prefix cache",
    )


def run(args: argparse.Namespace) -> int:
    """Measure and print the results."""
    setup = TtftSetup(**{name: getattr(args, name) for name in TtftSetup.__dataclass_fields__})
    result, limits = measure(setup, lambda line: print(line, file=sys.stderr, flush=True))
    if args.json:
        rows: list[dict[str, Any]] = [
            asdict(row) | (asdict(limits[row.name]) if row.name in limits else {}) for row in result.rows
        ]
        print(json.dumps(asdict(result) | {"rows": rows}))
        return 0
    print(", ".join(f"{name} {value}" for name, value in result.settings.items()))
    print(f"prompt of {result.prompt_tokens} tokens, medians of {args.repeats} rounds\n")
    heads = f"{'':14}{'TTFT':>10}{'speed-up':>10}{'bound':>8}{'share':>8}{'of rows':>9}"
    print(f"{heads}{'loading':>10}{'stall':>9}{'hidden':>8}")
    for row in result.rows:
        line = f"{row.name:14}{row.ttft_s * 1000:>7.0f} ms{row.speedup:>9.2f}x"
        if row.name in limits and row.load_stall_s is not None:
            limit = limits[row.name]
            of_rows = "-" if limit.rows_share is None else f"{limit.rows_share:.2f}"
            line += f"{row.bound:>7.2f}x{row.share:>8.2f}{of_rows:>9}{limit.load_alone_s * 1000:>7.0f} ms"
            line += f"{row.load_stall_s * 1000:>6.0f} ms{limit.hidden:>8.2f}"
        print(line)
    return 0
