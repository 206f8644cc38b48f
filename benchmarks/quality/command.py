"""`kvrag bench quality` with questions about the readers' worlds, on whole articles or retrieved chunks, and plots."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.quality import plots
from benchmarks.quality.retrieved import check_size, draw_corpus, open_index, retrieved_rows
from benchmarks.quality.worlds import ARTICLES, WORLDS, world_of, world_rows
from kvrag.bench.datasets import Row
from kvrag.cli import bench, quality
from kvrag.cli.common import at_least, progress, require_extra
from kvrag.errors import SettingError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    bench.quality(parser)
    parser.add_argument(
        "--world",
        type=int,
        choices=WORLDS,
        help="the world to draw from without --docs and --data (default: the one the reader was trained on)",
    )
    parser.add_argument(
        "--articles",
        type=at_least(1),
        metavar="N",
        help="with --top-k K, which retrieves K chunks for a prompt from an index of drawn articles: their number "
        f"(default: {', '.join(f'{number} in world {world}' for world, number in ARTICLES.items())})",
    )
    parser.add_argument(
        "--around",
        type=at_least(0),
        default=0,
        metavar="N",
        help="neighbours to retrieve with each chunk of --top-k (default: 0)",
    )
    parser.add_argument("--plots", action="store_true", help="write plots to --out; needs matplotlib")


def run(args: argparse.Namespace) -> int:
    """Measure, print and store the results."""
    _check(args)
    if args.docs is None and args.data is None:
        quality.fill(args)
        code = quality.evaluate(args, *_rows(args))
    else:
        code = quality.run(args)
    if args.plots:
        draw = plots.draw if args.docs is None else plots.draw_kept
        draw(json.loads((args.out / "results.json").read_text()), args.out)
    return code


def _check(args: argparse.Namespace) -> None:
    if args.docs is not None or args.data is not None:
        for name in ("world", "articles", "around"):
            if getattr(args, name):
                raise SettingError(f"--{name} excludes --docs and --data: leave out one of them")
    elif args.top_k is None and (args.articles is not None or args.around):
        raise SettingError("--articles and --around need --top-k K")
    if args.plots:
        if args.out is None:
            raise SettingError("--plots needs --out DIR")
        plots.require()


def _rows(args: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """Return the rows, and a description of their source that does not depend on their number."""
    world = args.world or world_of(args.model)
    if args.top_k is None:
        rows = world_rows(args.samples, args.seed, world)
        return rows, {"file": WORLDS[world], "seed": args.seed, "digest": rows[0].key}
    require_extra()
    articles = ARTICLES[world] if args.articles is None else args.articles
    corpus = draw_corpus(world, articles, args.seed)
    check_size(corpus, args.samples, args.top_k)
    with (
        tempfile.TemporaryDirectory(prefix="kvrag-index-") as temporary,
        progress("indexing", quiet=args.json) as update,
        open_index(corpus, args.out or Path(temporary), update) as index,
    ):
        rows = retrieved_rows(corpus, index, args.samples, args.top_k, args.around)
    around = f" with {args.around} around each" if args.around else ""
    name = f"{WORLDS[world]}, top {args.top_k} of {len(corpus.chunks)} chunks{around}"
    return rows, {"file": name, "seed": args.seed, "digest": corpus.digest, "embedder": index.embedder}
