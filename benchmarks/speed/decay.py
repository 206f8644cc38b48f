"""Reuse that lasts: hit rate and time to first token over thousands of prompts, in a store with too little room.

Every prompt has other chunks, drawn by Zipf's law, in random order, and a new question. Every few prompts a document is
rewritten and warmed again, or forgotten and replaced by a new one, which is as popular. The first part is the warm-up.

The best hit rate is that of a store which always holds the most popular chunks, as many as there is room for, also
those of a document that has just changed. With `--out`, another run continues where one was killed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.settings import run_settings
from benchmarks.shapes import SHAPES, one_token_words, random_model
from benchmarks.speed.first_token import PrefixCache, ask, messages_of
from kvrag.backend.transformers import Model
from kvrag.cli.common import add_number, at_least
from kvrag.config import DEFAULT_POLICY, BlendConfig
from kvrag.engine import BlendEngine
from kvrag.errors import SettingError
from kvrag.store import FileStore
from kvrag.store.files import write_file

_RESULTS = "decay.json"
_OPTIONS = {
    "parts": "parts, the first of which is the warm-up",
    "prompts": "prompts per part",
    "documents": "in the corpus",
    "document_chunks": "chunks per document",
    "chunk_tokens": "tokens per chunk; those of fewer than 64 are not learned",
    "top_k": "chunks per prompt",
    "question_tokens": "tokens of a question",
    "exponent": "of Zipf's law",
    "change_every": "prompts between changes of a document",
    "room": "size of the store as a share of the whole corpus's",
    "full_every": "prefill one in N prompts in full, too, without kvrag",
    "ratio": "recompute ratio",
    "seed": "of all random choices",
}


@dataclass(frozen=True)
class DecayRow:
    """One part of the prompts.

    Attributes:
        prompts: So far.
        hit_rate, best: Share of the chunks' tokens that were reused, and the best one, see above.
        computed: Share of the prompts' tokens that were computed.
        ttft_s, full_s, speedup: Of the same prompts: time to first token, full prefill's, their quotient; medians.
        encoded: Tokens of the chunks that were encoded for changed documents, or learned.
        chunks: Stored at the end.
    """

    learn: bool
    prompts: int
    hit_rate: float
    best: float
    computed: float
    ttft_s: float
    full_s: float
    speedup: float
    encoded: int
    chunks: int


@dataclass(frozen=True)
class DecaySetup:
    """A random model, the first `layers` of a shape (None = all), a corpus and prompts; see `_OPTIONS`."""

    model: str = "tiny"
    layers: int | None = None
    parts: int = 11
    prompts: int = 1000
    documents: int = 400
    document_chunks: int = 5
    chunk_tokens: int = 72
    top_k: int = 5
    question_tokens: int = 20
    exponent: float = 1.0
    change_every: int = 20
    room: float = 1 / 3
    full_every: int = 10
    ratio: float = 0.15
    seed: int = 0

    def __post_init__(self) -> None:
        room = self.room * self.documents * self.document_chunks
        if room < self.top_k:
            raise SettingError(f"a store with room for {room:.3g} chunks lacks some of every prompt's {self.top_k}")


class Document(NamedTuple):
    """A version of a document."""

    name: str
    version: int = 0


class Step(NamedTuple):
    """A prompt's chunks, each a document and a place in it. `forgotten` and `warmed` change before it."""

    chunks: list[tuple[Document, int]]
    num_popular: int  # chunks that the best store has
    forgotten: str = ""
    warmed: Document | None = None


def corpus(setup: DecaySetup) -> list[Document]:
    """Return the documents before the first prompt."""
    return [Document(f"document {number}") for number in range(setup.documents)]


def steps(setup: DecaySetup) -> Iterator[Step]:
    """Yield all prompts; the same in every run with these settings."""
    rng, documents = random.Random(setup.seed), corpus(setup)
    ranks = [(number, place) for number in range(setup.documents) for place in range(setup.document_chunks)]
    rng.shuffle(ranks)
    weights = list(accumulate((rank + 1) ** -setup.exponent for rank in range(len(ranks))))
    for prompt in range(setup.parts * setup.prompts):
        change: tuple[str, Document | None] = "", None
        if prompt and prompt % setup.change_every == 0:
            number, is_rewritten = rng.randrange(setup.documents), prompt // setup.change_every % 2
            old = documents[number]
            new = old._replace(version=old.version + 1) if is_rewritten else Document(f"document from {prompt}")
            documents[number], change = new, ("" if is_rewritten else old.name, new)
        drawn = dict[int, None]()
        while len(drawn) < setup.top_k:
            drawn.update(dict.fromkeys(rng.choices(range(len(ranks)), cum_weights=weights)))
        chunks = [(documents[number], place) for number, place in map(ranks.__getitem__, drawn)]
        yield Step(chunks, sum(rank < setup.room * len(ranks) for rank in drawn), *change)


def measure(
    setup: DecaySetup,
    learn: Sequence[bool] = (False, True),
    out: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure without and with learning; return the rows and, for each, the last hit rate as a share of the second.

    Args:
        out: Folder that keeps the stores and the rows. Those of an earlier run with this setup are not measured again.
    """
    net = random_model(setup.model, setup.layers)
    with tempfile.TemporaryDirectory() as temporary:
        kept = (out or Path(temporary)) / _RESULTS
        rows = _read(kept, setup)
        for learns in learn:
            for row in _measure(net, setup, learns, sum(row.learn == learns for row in rows), kept.parent, progress):
                rows.append(row)
                content = {"setup": asdict(setup), "rows": [asdict(row) for row in rows]}
                write_file(kept, json.dumps(content, indent=1).encode())
    rates = {learns: [row.hit_rate for row in rows if row.learn == learns] for learns in learn}
    lasting = {"on" if learns else "off": rate[-1] / rate[1] for learns, rate in rates.items() if rate[1:]}
    return {"rows": [asdict(row) for row in rows], "lasting": lasting, "settings": run_settings(net) | asdict(setup)}


def _read(path: Path, setup: DecaySetup) -> list[DecayRow]:
    if not path.exists():
        return []
    content = json.loads(path.read_text())
    if content["setup"] != asdict(setup):
        raise SettingError(f"{path} is of a run with other settings: choose another folder for --out")
    return [DecayRow(**row) for row in content["rows"]]


def _measure(
    net: Model, setup: DecaySetup, learn: bool, done: int, folder: Path, progress: Callable[[str], None]
) -> Iterator[DecayRow]:
    """Yield the rows after the first `done`."""
    words, questions = one_token_words(net), random.Random(f"{setup.seed} {done}")
    store = FileStore(folder / f"learn-{'on' if learn else 'off'}", store_bytes(net, setup), min_free_bytes=0)
    config = BlendConfig(ratio=setup.ratio)
    with BlendEngine(net, store, config, ram_bytes=0, conversation_bytes=0, learn=learn) as engine:
        for number, document in enumerate([] if done else corpus(setup)):
            progress(f"learn {'on' if learn else 'off'}: warming document {number + 1} of {setup.documents}")
            engine.warm(_texts(setup, words, document), document=document.name)
        ahead = islice(steps(setup), done * setup.prompts, None)
        for part in range(done, setup.parts):
            sums, times = Counter({"encoded": -_learned(engine)}), list[tuple[float, float]]()
            for number, step in enumerate(islice(ahead, setup.prompts)):
                if step.forgotten:
                    engine.forget(step.forgotten)
                if step.warmed:
                    report = engine.warm(_texts(setup, words, step.warmed), document=step.warmed.name)
                    sums["encoded"] += report.tokens
                chunks = [_texts(setup, words, document)[place] for document, place in step.chunks]
                question = "".join(questions.choices(words, k=setup.question_tokens))
                started = time.perf_counter()
                answered = ask(engine, DEFAULT_POLICY, chunks, question)
                ttft_s = time.perf_counter() - started
                engine.wait_until_idle()
                if number % setup.full_every == 0:
                    started = time.perf_counter()
                    PrefixCache(net).generate(net.tokenizer.render(messages_of(chunks, question)))
                    times.append((ttft_s, time.perf_counter() - started))
                sums["reused"] += answered.stored_tokens
                sums["chunk tokens"] += sum(len(net.tokenizer.encode(chunk)) for chunk in chunks)
                sums["computed"] += answered.fresh_tokens + answered.recomputed_tokens
                sums["prompt tokens"] += answered.prompt_tokens
                sums["popular"] += step.num_popular
            row = DecayRow(
                learn,
                (part + 1) * setup.prompts,
                hit_rate=sums["reused"] / sums["chunk tokens"],
                best=sums["popular"] / setup.prompts / setup.top_k,
                computed=sums["computed"] / sums["prompt tokens"],
                ttft_s=statistics.median(ours for ours, _ in times),
                full_s=statistics.median(full for _, full in times),
                speedup=statistics.median(full / ours for ours, full in times),
                encoded=sums["encoded"] + _learned(engine),
                chunks=store.stats().chunks,
            )
            progress(_line(row))
            yield row


def store_bytes(net: Model, setup: DecaySetup) -> int:
    """Return the size of the store."""
    with tempfile.TemporaryDirectory() as folder, BlendEngine(net, folder) as engine:
        engine.warm(_texts(setup, one_token_words(net), corpus(setup)[0]), document="only this one")
        return int(setup.room * setup.documents * engine.store.stats().bytes)


def _texts(setup: DecaySetup, words: list[str], document: Document) -> list[str]:
    rng = random.Random(f"{setup.seed} {document.name} {document.version}")
    return ["".join(rng.choices(words, k=setup.chunk_tokens)).strip() for _ in range(setup.document_chunks)]


def _learned(engine: BlendEngine) -> int:
    learned = engine.stats().get("learned")
    return learned.tokens if learned else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--model", default="tiny", choices=list(SHAPES), help="shape of the random model")
    parser.add_argument("--layers", type=at_least(1), metavar="N", help="use only the first N layers")
    for name, what in _OPTIONS.items():
        default, option = getattr(DecaySetup(), name), f"--{name.replace('_', '-')}"
        add_number(parser, option, default, what, least=isinstance(default, int) and name != "seed")
    parser.add_argument("--learn", choices=("off", "on", "both"), default="both", help="(default: both)")
    parser.add_argument("--out", type=Path, help="folder that keeps stores and results; another run continues there")


def run(args: argparse.Namespace) -> int:
    """Measure and print the results."""
    setup = DecaySetup(**{name: getattr(args, name) for name in DecaySetup.__dataclass_fields__})
    learn = {"off": [False], "on": [True], "both": [False, True]}[args.learn]
    result = measure(setup, learn, args.out, progress=lambda line: print(line, file=sys.stderr, flush=True))
    if args.json:
        print(json.dumps(result))
        return 0
    print(", ".join(f"{name} {value}" for name, value in result["settings"].items()))
    print("\nlearn  prompts  hit rate   best  computed     TTFT     full  speed-up   encoded  chunks")
    print("\n".join(_line(DecayRow(**row)) for row in result["rows"]))
    for name, share in result["lasting"].items():
        print(f"learn {name}: the last hit rate is {share:.3f} times the first after the warm-up")
    return 0


def _line(row: DecayRow) -> str:
    counts = f"{'on' if row.learn else 'off':>5}{row.prompts:>9}"
    shares = f"{row.hit_rate:>10.3f}{row.best:>7.3f}{row.computed:>10.3f}"
    times = f"{row.ttft_s * 1000:>6.0f} ms{row.full_s * 1000:>6.0f} ms{row.speedup:>9.2f}x"
    return f"{counts}{shares}{times}{row.encoded:>10}{row.chunks:>8}"
