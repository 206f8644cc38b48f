"""`kvrag adapt`: train an adapter for encoding, so that stored KV is nearer to full prefill's."""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrag import KvragError, SettingError
from kvrag.ext import (
    DEFAULT_CONTEXT,
    DTYPES,
    HANDBOOK,
    Gap,
    add_number,
    add_setting,
    ask,
    check_model,
    duration,
    existing_path,
    find_gaps,
    make_prompts,
    progress,
    read_files,
    read_questions,
    require_extra,
    say,
    search_by_words,
    splitter,
)

if TYPE_CHECKING:
    from adapt_kvrag.measure import Effect
    from kvrag import Model
    from kvrag.ext import LowRank

_ABOUT = """\
Train a LoRA adapter that is active only while chunks are encoded, on your documents, without labels. It ends with a
table of held-out prompts, before and after. An adapter that does not help is not written, and the exit code is 1.
Checkpoints are saved every two minutes: run the same command again to resume, with more --minutes to go on"""
_REPORT = "adapt.json"
_HELD_OUT = 40  # prompts, and as many of another kind
_TOP_K = 4
_LESSON_TOKENS = 1024  # at most, or four chunks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag adapt`."""
    parser.description = _ABOUT
    parser.set_defaults(text_field="text")
    add_setting(parser, "model", default="reader")
    many: dict[str, Any] = {"dest": "paths", "nargs": "+", "metavar": "PATH", "type": existing_path}
    paths = "files and folders to adapt to: those that you warm, or more of their kind"
    parser.add_argument("--docs", **many, required=True, help=paths)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for adapter and checkpoint")
    questions = "questions of your users, one per line; a third, at most 40, is held out to measure with"
    parser.add_argument("--questions", type=existing_path, metavar="FILE", help=questions)
    add_number(parser, "--minutes", 60.0, "training time", least=0.1)
    add_number(parser, "--chunk-tokens", 256, "maximum tokens per chunk, as for `kvrag warm`", least=16)
    add_number(parser, "--context-tokens", DEFAULT_CONTEXT, "preceding tokens that chunks are encoded with")
    add_number(parser, "--rank", 16, "rank of the adapter", least=1)
    add_number(parser, "--rate", 0.001, "learning rate", least=1e-6)
    add_number(parser, "--seed", 0, "seed of the prompts and the initial weights")
    parser.add_argument("--force", action="store_true", help="write the adapter even if it does not help")
    add_setting(parser, "dtype", choices=DTYPES)
    add_setting(parser, "device")


def run(args: argparse.Namespace) -> int:
    """Train, measure, and write the adapter if it helps; return 1 if it does not."""
    started = time.perf_counter()
    require_extra()
    check_model(args.model)
    read = list(read_files(args, "reading", []))  # report mistakes before loading the model
    questions = read_questions(args.questions) if args.questions else []
    from adapt_kvrag.files import save
    from adapt_kvrag.measure import measure, verdict
    from adapt_kvrag.train import CHECKPOINT
    from kvrag import Model
    from kvrag.ext import CONFIG, Adapter, write_file

    _check_out(args.out, CONFIG)
    model = Model.from_pretrained(args.model, dtype=args.dtype, device=args.device)
    split = splitter(lambda text: len(model.tokenizer.encode(text)), args.chunk_tokens, 0)
    corpus = {content.file: split(content.texts) for content in read}
    handbook = {name: split([text]) for name, text in HANDBOOK.documents().items()}
    random.Random(args.seed).shuffle(questions)
    asked = min(_HELD_OUT, len(questions) // 3)
    held_out = _asked(model, corpus, questions[:asked]) if asked else _held_out(model, corpus, args.seed)
    steps = [0]
    try:
        layers = _train(args, model, corpus, questions[asked:], held_out, steps)
        adapter, measured = Adapter(model.hf, layers), []
        for texts, prompts in ((corpus, held_out), (handbook, _held_out(model, handbook, args.seed))):
            with progress("measuring", args.json) as update:
                measured.append(measure(model, adapter, texts, prompts, args.context_tokens, update))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted after {steps[0]} steps: run the command again to resume") from None
    why_not = verdict(*measured)
    is_written = args.force or not why_not
    result = {
        "adapter": str(args.out) if is_written else None,
        "why_not": why_not,
        **{name: [asdict(row) for row in rows] for name, rows in zip(("own", "other"), measured, strict=True)},
        "steps": steps[0],
        "seconds": time.perf_counter() - started,
    }
    try:
        if is_written:
            save(args.out, layers, model.name)
        write_file(args.out / _REPORT, json.dumps(result, indent=1).encode(), mode=0o666)
        if is_written:
            (args.out / CHECKPOINT).unlink()
    except OSError as error:
        raise KvragError(
            f"cannot write to {args.out}: {error.strerror}; the training is kept: run the command again"
        ) from error
    print(json.dumps(result) if args.json else "\n".join(_lines(args, result, *measured)))
    return int(not is_written)


def _check_out(out: Path, config: str) -> None:
    """Raise SettingError if the folder holds an adapter already, or cannot be one; nothing is created yet."""
    if (out / config).exists():
        raise SettingError(f"--out {out} holds an adapter already: choose another folder, or delete it")
    place = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not place.is_dir():
        raise SettingError(f"--out {out} is no folder: {place} is a file")
    if not os.access(place, os.W_OK | os.X_OK):
        raise SettingError(f"--out {out} cannot be written: no permission to write to {place}")


def _held_out(model: Model, corpus: Mapping[str, Sequence[str]], seed: int) -> list[Gap]:
    """Return prompts to measure with. Few documents keep two thirds of their sentences for the training."""
    chunks = _distinct(corpus)
    count = max(1, min(_HELD_OUT, len(find_gaps(chunks, seed + 1)) // 3))
    return make_prompts(model, chunks, search_by_words(chunks), count, _TOP_K, seed + 1)


def _asked(model: Model, corpus: Mapping[str, Sequence[str]], questions: Sequence[str]) -> list[Gap]:
    """Return prompts of questions to measure with."""
    search = search_by_words(_distinct(corpus))
    prompts = []
    for question in questions:
        chunks = tuple(search(question, _TOP_K))
        prompts.append(Gap("question", question, "", "", chunks, ask(model.tokenizer, chunks, question)))
    return prompts


def _distinct(corpus: Mapping[str, Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(chunk for chunks in corpus.values() for chunk in chunks))


def _train(
    args: argparse.Namespace,
    model: Model,
    corpus: Mapping[str, Sequence[str]],
    questions: Sequence[str],
    held_out: Sequence[Gap],
    steps: list[int],
) -> dict[str, LowRank]:
    """Train with progress; `steps` gets the number of steps."""
    from adapt_kvrag.lessons import Lessons
    from adapt_kvrag.train import Course, train

    withheld = frozenset(prompt.sentence for prompt in held_out)
    lengths = args.context_tokens, max(4 * args.chunk_tokens, _LESSON_TOKENS)
    lessons = Lessons(
        model, corpus, search_by_words(_distinct(corpus)), questions, *lengths, args.seed, withheld=withheld
    )
    course = Course(args.minutes, args.rank, args.rate, seed=args.seed)
    texts = json.dumps([sorted(corpus.values()), questions]).encode()
    identity = {
        "model": model.fingerprint.digest,
        "docs": blake2b(texts, digest_size=8).hexdigest(),
        "context": args.context_tokens,
    }
    last = 0.0
    with progress("training", args.json) as update:

        def note(done: float, total: float, step: int, loss: float) -> None:
            nonlocal last
            steps[0], last = step, loss
            update(round(done), round(total))

        layers = train(model, lessons, course, args.out, identity, note)
    say(f"{steps[0]} steps, loss {last:.4f} nats per token")
    return layers


def _lines(
    args: argparse.Namespace, result: Mapping[str, Any], own: Sequence[Effect], other: Sequence[Effect]
) -> list[str]:
    """Return the table, one sentence, and the next command."""
    lines = [f"{'':36}{'KL to full prefill, nats':28}first tokens equal to its"]
    lines.append(f"{'':36}{'before    after':28}before    after")
    for title, rows in (("held-out prompts, these documents", own), ("held-out prompts, another kind", other)):
        lines.append(f"{title} ({rows[0].prompts})")
        for row in rows:
            name = f"{row.ratio:.0%} recomputed" if row.ratio else "plain reuse"
            cells = [f"{row.kl[0]:.4f}", f"{row.kl[1]:.4f}", *map(str, row.first)]
            lines.append("  {:34}{:10}{:18}{:10}{}".format(name, *cells))
    took, (before, after) = f"after {duration(result['seconds'])}", own[-1].kl
    lines.append("")
    if not result["adapter"]:
        return [
            *lines,
            f"nothing was written {took}: {result['why_not']} (the training is kept in {args.out}: run again with more "
            "--minutes to go on, or with --force to write it)",
        ]
    if result["why_not"]:
        lines.append(f"written to {args.out} {took}, though {result['why_not']}")
    else:
        lines.append(f"written to {args.out} {took}: {1 - after / before:.0%} less divergence from full prefill")
    return [*lines, f"next: kvrag warm {shlex.join(map(str, args.paths))} --model {args.model} --adapter {args.out}"]
