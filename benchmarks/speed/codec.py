"""Size and error of the codecs: bytes, error of keys and values, attention and answers, relative to the native codec.

Each prompt consists of some text files in random order, one chunk each, and a question. Every figure compares plain
reuse under the codec with plain reuse under the native one, which isolates the codec's error. The last column, full
prefill against plain reuse, gives the error of reuse itself for comparison.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from benchmarks.settings import run_settings
from kvrag.backend.transformers import Model
from kvrag.cli.common import DTYPES, add_setting, at_least, existing_path
from kvrag.config import CODECS, BlendConfig
from kvrag.engine import BlendEngine
from kvrag.errors import SettingError
from kvrag.ingest.encode import encode
from kvrag.store.values import pack, unpack

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class CodecRow:
    """Means over all chunks or prompts.

    Attributes:
        bytes_per_token: On disk, names and digests included.
        smaller: Size ratio to the native codec, without names and digests.
        keys, values: Root mean squared error, relative to the root mean square of the tensors.
        attention: Share of the question's attention that moves to other tokens, mean over layers and heads.
        kl: KL divergence of the next token's distribution after plain reuse, native against this codec.
        kl_full: The same, full prefill against this codec.
        unpack: Native bytes unpacked per second, for a layer with 8 heads of 128 and 256 tokens on the CPU.
    """

    codec: str
    bytes_per_token: float
    smaller: float
    keys: float
    values: float
    attention: float
    kl: float
    kl_full: float
    unpack: float


def measure(model: Model, texts: Sequence[str], question: str, prompts: int, chunks: int) -> list[CodecRow]:
    """Return one row per codec, the native one first."""
    rng = random.Random(0)
    rendered = [
        model.tokenizer.render([{"role": "user", "content": "\n\n".join([*rng.sample(texts, chunks), question])}])
        for _ in range(prompts)
    ]
    kv = [layers for _, layers in encode(model, [model.tokenizer.encode(text) for text in texts])]
    results = {codec: _ask(model, texts, rendered, codec) for codec in CODECS}
    rows = []
    for codec, (size, answers) in results.items():
        packed = [pack(layers, codec, "") for layers in kv]
        unpacked = [[unpack(layer, codec, _CPU) for layer in layers] for layers in packed]
        pairs = list(zip(answers, results["native"][1], strict=True))
        rows.append(
            CodecRow(
                codec,
                size,
                _bytes(kv) / _bytes(packed),
                keys=_error(kv, unpacked, 0),
                values=_error(kv, unpacked, 1),
                attention=_mean([float((ours[1] - theirs[1]).abs().sum()) / 2 for ours, theirs in pairs]),
                kl=_mean([_kl(theirs[0], ours[0]) for ours, theirs in pairs]),
                kl_full=_mean([_kl(full, logits) for logits, _, full in answers]),
                unpack=_unpack_speed(codec, model.dtype),
            )
        )
    return rows


def _ask(
    model: Model, texts: Sequence[str], prompts: Sequence[list[int]], codec: str
) -> tuple[float, list[tuple[Tensor, Tensor, Tensor]]]:
    """Return bytes per token on disk; per prompt, logits and attention of plain reuse, and full prefill's logits."""
    answers = []
    with tempfile.TemporaryDirectory() as folder, BlendEngine(model, folder, ram_bytes=0, codec=codec) as engine:
        warmed = engine.warm(texts)
        for ids in prompts:
            done = engine.prefill(ids, BlendConfig(policy="none", ratio=0.0))
            fresh = done.fresh
            question = int((fresh > int(done.reused.nonzero()[-1])).sum())
            again = engine.prefill(ids, BlendConfig(policy="none", ratio=0.0)).cache
            layers = range(model.num_layers)
            attention = model.attention_received(done.ids[fresh][None], again, fresh, question, layers)
            full = engine.prefill(ids, BlendConfig(policy="full")).logits
            answers.append((done.logits, attention, full))
    return warmed.bytes / warmed.tokens, answers


def _unpack_speed(codec: str, dtype: torch.dtype) -> float:
    tensor = torch.randn(8, 256, 128).to(dtype)
    (layer,) = pack([(tensor, tensor)], codec, "")
    times = []
    for _ in range(100):
        started = time.perf_counter()
        unpack(layer, codec, _CPU)
        times.append(time.perf_counter() - started)
    return 2 * tensor.nbytes / statistics.median(times)


def _bytes(chunks: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> int:
    return sum(tensor.nbytes for layers in chunks for layer in layers for tensor in layer)


def _error(
    before: Sequence[Sequence[tuple[Tensor, Tensor]]], after: Sequence[Sequence[tuple[Tensor, Tensor]]], which: int
) -> float:
    pairs = [
        (a[which].float(), b[which].float())
        for layers, others in zip(before, after, strict=True)
        for a, b in zip(layers, others, strict=True)
    ]
    error, size = (
        sum(float(x.square().sum()) for x in xs) for xs in ([b - a for a, b in pairs], [a for a, _ in pairs])
    )
    return (error / size) ** 0.5


def _kl(reference: Tensor, logits: Tensor) -> float:
    ours, theirs = logits.log_softmax(dim=-1), reference.log_softmax(dim=-1)
    return float(kl_div(ours, theirs, log_target=True, reduction="sum"))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("paths", nargs="+", type=existing_path, metavar="FILE", help="text files, one chunk each")
    add_setting(parser, "model", default="reader")
    add_setting(parser, "dtype", choices=DTYPES)
    parser.add_argument(
        "--question", default="Question: Who is this about?", metavar="TEXT", help="question of each prompt"
    )
    parser.add_argument("--prompts", type=at_least(1), default=50, metavar="N", help="number of prompts (default: 50)")
    parser.add_argument("--chunks", type=at_least(1), default=6, metavar="N", help="chunks per prompt (default: 6)")


def run(args: argparse.Namespace) -> int:
    """Measure and print the results."""
    model = Model.from_pretrained(args.model, dtype=args.dtype)
    texts = [path.read_text("utf-8").strip() for path in args.paths]
    texts = [text for text in texts if len(model.tokenizer.encode(text)) >= BlendConfig().min_run]
    if args.chunks > len(texts):
        raise SettingError(
            f"{len(texts)} long enough files are too few for {args.prompts} prompts of {args.chunks}: pass more files"
        )
    print("measuring", file=sys.stderr, flush=True)
    rows = measure(model, texts, args.question, args.prompts, args.chunks)
    settings = run_settings(model) | {"texts": len(texts), "prompts": args.prompts, "chunks": args.chunks}
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "settings": settings}))
        return 0
    print(", ".join(f"{name} {value}" for name, value in settings.items()))
    print(
        f"{'codec':8}{'bytes/token':>12}{'smaller':>9}{'keys':>8}{'values':>8}{'attention':>11}{'KL':>10}{'KL full':>9}"
    )
    for row in rows:
        errors = f"{row.keys:>8.2%}{row.values:>8.2%}{row.attention:>11.2%}{row.kl:>10.2g}{row.kl_full:>9.2g}"
        speed = f"   unpacked at {row.unpack / 1e9:.1f} GB/s" if row.codec != "native" else ""
        print(f"{row.codec:8}{row.bytes_per_token:>12.0f}{row.smaller:>8.2f}x{errors}{speed}")
    return 0
