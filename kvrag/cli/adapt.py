"""Train an adapter for encoding, so that stored KV is nearer to full prefill's."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrag.cli.common import (
    DTYPES,
    add_number,
    add_setting,
    at_least,
    duration,
    existing_path,
    progress,
    require_extra,
    say,
)
from kvrag.config import DEFAULT_CONTEXT
from kvrag.errors import KvragError, SettingError
from kvrag.retrieval import documents
from kvrag.sample import HANDBOOK

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvrag.adapt.measure import Effect
    from kvrag.backend.transformers import Model

_REPORT = "adapt.json"
_TOP_K = 4
_HELD_OUT = 40  # prompts, and as many of another kind


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_setting(parser, "model", default="reader")
    parser.add_argument("--docs", type=existing_path, required=True, metavar="FOLDER", help="documents to adapt to")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the adapter; resumes there")
    parser.add_argument("--questions", type=existing_path, metavar="FILE", help="questions about them, one per line")
    parser.add_argument(
        "--minutes", type=at_least(0, float), default=60.0, metavar="N", help="length of the training (default: 60)"
    )
    add_number(parser, "--chunk-tokens", 256, "maximum tokens per chunk", least=16)
    add_number(parser, "--context-tokens", DEFAULT_CONTEXT, "preceding tokens that chunks are encoded with")
    add_number(parser, "--rank", 16, "rank of the adapter", least=1)
    add_number(parser, "--seed", 0, "seed of the prompts and the initial weights")
    parser.add_argument(
        "--rate", type=at_least(0, float), default=1e-3, metavar="R", help="learning rate (default: 0.001)"
    )
    parser.add_argument("--force", action="store_true", help="write the adapter even if held-out prompts do not gain")
    add_setting(parser, "dtype", choices=DTYPES)
    add_setting(parser, "device")


def run(args: argparse.Namespace) -> int:
    """Train, measure, and write the adapter if it helps; return 1 if it does not."""
    started = time.perf_counter()
    require_extra()
    documents.find([args.docs])  # report mistakes before loading the model
    questions = _questions(args.questions) if args.questions else []
    _check_out(args.out)
    from kvrag.adapt.files import save
    from kvrag.adapt.lessons import Lessons
    from kvrag.adapt.measure import measure, verdict
    from kvrag.adapt.train import CHECKPOINT, Course, train
    from kvrag.backend.transformers import Model
    from kvrag.backend.transformers.adapter import Adapter
    from kvrag.control.prompts import make_prompts, search_by_words

    model = Model.from_pretrained(args.model, dtype=args.dtype, device=args.device)
    corpus = _read(model, args)
    chunks = list(dict.fromkeys(chunk for texts in corpus.values() for chunk in texts))
    search = search_by_words(chunks)
    held_out = make_prompts(model, chunks, search, _HELD_OUT, _TOP_K, args.seed + 1)
    withheld = frozenset(prompt.sentence for prompt in held_out)
    lessons = Lessons(
        model, corpus, search, questions, args.context_tokens, 4 * args.chunk_tokens, args.seed, withheld=withheld
    )
    course = Course(args.minutes, args.rank, args.rate, seed=args.seed)
    identity = {"model": model.fingerprint.digest, "docs": _digest(corpus, questions), "context": args.context_tokens}
    with progress("training", args.json) as update:
        steps = [0, 0.0]

        def note(done: float, total: float, step: int, loss: float) -> None:
            steps[:] = step, loss
            update(round(done), round(total))

        try:
            layers = train(model, lessons, course, args.out, identity, note)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"interrupted after {steps[0]} steps: run the command again to resume") from None
    say(f"{steps[0]} steps, loss {steps[1]:.4f} nats per token")
    adapter = Adapter(model.hf, layers)
    with progress("measuring", args.json) as update:
        own = measure(model, adapter, corpus, [prompt.ids for prompt in held_out], args.context_tokens, update)
    others = {name: _split(model, args, [text]) for name, text in HANDBOOK.documents().items()}
    other_chunks = [chunk for texts in others.values() for chunk in texts]
    asked = make_prompts(model, other_chunks, search_by_words(other_chunks), _HELD_OUT, _TOP_K, args.seed + 1)
    with progress("measuring other text", args.json) as update:
        other = measure(model, adapter, others, [prompt.ids for prompt in asked], args.context_tokens, update)
    why_not = verdict(own, other)
    is_written = args.force or not why_not
    if is_written:
        save(args.out, layers, model.name)
    result = {
        "adapter": str(args.out) if is_written else None,
        "why_not": why_not,
        "own": [asdict(row) for row in own],
        "other": [asdict(row) for row in other],
        "steps": steps[0],
        "seconds": time.perf_counter() - started,
    }
    partial = args.out / f"{_REPORT}.tmp"
    partial.write_text(json.dumps(result, indent=1), encoding="utf-8")
    os.replace(partial, args.out / _REPORT)
    if is_written:
        (args.out / CHECKPOINT).unlink()
    print(json.dumps(result) if args.json else "\n".join(_lines(result, own, other)))
    return 0 if is_written else 1


def _check_out(out: Path) -> None:
    """Raise SettingError if the folder holds an adapter already, or is a file."""
    if out.exists() and not out.is_dir():
        raise SettingError(f"--out {out} is a file: give a folder")
    if (out / "adapter_config.json").exists():
        raise SettingError(f"--out {out} holds an adapter already: choose another folder")


def _questions(path: Path) -> list[str]:
    lines = (line.strip() for line in path.read_text("utf-8", "replace").splitlines())
    if not (questions := list(dict.fromkeys(line for line in lines if line))):
        raise KvragError(f"{path} contains no questions: write one per line")
    return questions


def _split(model: Model, args: argparse.Namespace, texts: Sequence[str]) -> list[str]:
    return documents.splitter(lambda text: len(model.tokenizer.encode(text)), args.chunk_tokens, 0)(texts)


def _read(model: Model, args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the chunks of each file."""
    paths, problems = documents.find([args.docs])
    corpus = {}
    for path in paths:
        content = documents.read(path)
        problems += content.problems
        if chunks := _split(model, args, content.texts):
            corpus[str(path)] = chunks
    for problem in problems:
        say(str(problem))
    return corpus


def _digest(corpus: Mapping[str, Sequence[str]], questions: Sequence[str]) -> str:
    return blake2b(json.dumps([sorted(corpus.values()), questions]).encode(), digest_size=8).hexdigest()


def _lines(result: Mapping[str, Any], own: Sequence[Effect], other: Sequence[Effect]) -> list[str]:
    """Return the table, and one sentence."""
    lines = [f"{'':42}{'KL':>8}   first tokens equal to full prefill's"]
    for title, rows in (("held-out prompts about these documents", own), ("text of another kind", other)):
        lines.append(title)
        for row in rows:
            name = f"  {'adapted' if row.adapted else 'as it is'}, {row.ratio:.0%} recomputed"
            lines.append(f"{name:42}{row.kl:>8.4f}   {row.first} of {row.prompts}")
    time_taken = duration(result["seconds"])
    if result["adapter"]:
        end = f"written to {result['adapter']} in {time_taken}: pass it as adapter= or --adapter, and warm again"
    else:
        end = f"nothing was written after {time_taken}: {result['why_not']} (--force writes it)"
    return [*lines, "", end]
