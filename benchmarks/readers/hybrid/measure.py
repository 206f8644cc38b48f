"""Measure a hybrid: `python -m benchmarks.readers.hybrid.measure --model DIR`.

Held-out questions of the first world, through kvrag's engine: right answers and the divergence at the answer's first
token, against full prefill, per tail and what its recurrent layers begin with: zero states, or those stored with the
chunk before it (`store_states`). Resumes from --out.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.quality.grid import exact_match
from benchmarks.quality.metrics import Bootstrap
from benchmarks.quality.rows import QuestionRow
from benchmarks.quality.worlds import world_rows
from kvrag.answer import overridden
from kvrag.backend.transformers import Model
from kvrag.config import BlendConfig, Sampling
from kvrag.control.agreement import divergence
from kvrag.control.prompts import ask
from kvrag.control.tuning import MARGIN
from kvrag.engine import BlendEngine
from kvrag.generate.decode import decode
from kvrag.reuse.request_state import RequestState

TAILS = (0.05, 0.1, 0.15, 0.3)
CONTEXTS = {"alone": 0, "with context": 256}
_GREEDY = Sampling(16, temperature=0, stop=("\n\n",))


@dataclass(frozen=True)
class Record:
    """One setting's answer to a prompt. `rows` were computed before its first token."""

    setting: str
    is_right: bool
    is_same: bool
    kl: float
    rows: int
    prompt_tokens: int


_Full = tuple[str, list[int], Tensor]
"""Full prefill's answer: its text, its tokens, and the logits before the first."""


def measure(models: Mapping[str, Model], row: QuestionRow, tails: Sequence[float]) -> list[Record]:
    """Answer a row's prompt in all settings; full prefill is the first."""
    plain = models["zero"]
    ids = ask(plain.tokenizer, row.passages, row.question)
    records: list[Record] = []
    full: list[_Full] = []

    def add(model: Model, setting: str, request: RequestState) -> None:
        text = _full_text(model, request, request.logits, full[0]) if full else None
        request.cache.set_length(len(ids))
        if text is None:
            answer = list(decode(model, request.ids, request.cache, request.logits, _GREEDY))
            text = "".join(delta.text for delta in answer)
            full[:] = full or [(text, [token for delta in answer for token in delta.token_ids], request.logits)]
        right, kl = bool(exact_match(text, row.answers)), divergence(full[0][2], request.logits)
        rows = request.report.fresh_tokens + request.report.recomputed_tokens
        records.append(Record(setting, right, text == full[0][0], kl, rows, len(ids)))

    for (begin, model), (context, tokens) in product(models.items(), CONTEXTS.items()):
        name, config = f"{context}, {begin}", BlendConfig(context_tokens=tokens, controller="off")
        with TemporaryDirectory(prefix="kvrag-hybrid-") as folder, BlendEngine(model, folder, config) as engine:
            if not full:
                add(model, "full", engine.prefill(ids, overridden(config, policy="full")))
            for document, chunks in row.all_documents().items():
                engine.warm(chunks, document=document)
            add(model, f"{name}, plain reuse", engine.prefill(ids, overridden(config, policy="none")))
            for tail in tails:
                add(model, f"{name}, tail {tail}", engine.prefill(ids, overridden(config, policy="tail", ratio=tail)))
            answer = engine.generate(ids, temperature=0, max_new_tokens=16, stop=["\n\n"], margin=MARGIN)
            report, right = answer.report, bool(exact_match(answer.text, row.answers))
            rows = report.fresh_tokens + (report.completed.rows if report.completed else 0)
            records.append(Record(f"{name}, adaptive", right, answer.text == full[0][0], math.nan, rows, len(ids)))
    return records


def _full_text(model: Model, request: RequestState, logits: Tensor, full: _Full) -> str | None:
    """Return full prefill's text if this cache leads to it too, without decoding; None if a token may differ."""
    text, tokens, _ = full
    if not 0 < len(tokens) < _GREEDY.max_new_tokens:
        return None
    following = model.forward_all(torch.tensor([tokens]), request.cache)[0]
    best = torch.cat([logits, following]).argmax(-1).tolist()
    return text if best[:-1] == tokens and best[-1] in model.eos_ids else None


def table(rows: Sequence[list[Record]]) -> list[str]:
    """Return a Markdown table: right answers, also relative to full prefill's with an interval, and the rest."""
    lines = ["| | right | of full prefill's | same answer | KL | rows |", "|---|---|---|---|---|---|"]
    right = np.array([float(records[0].is_right) for records in rows])
    resample = Bootstrap(np.arange(len(rows)), seed=0)
    settings = list(dict.fromkeys(record.setting for records in rows for record in records))
    for setting in settings:
        found = [next((one for one in records if one.setting == setting), None) for records in rows]
        chosen = [one or records[0] for one, records in zip(found, rows, strict=True)]  # a tail that is all of it
        ours = np.array([float(one.is_right) for one in chosen])
        share = resample.of(lambda ours, full: ours / full, ours, right)
        interval = (
            "-" if share["value"] is None else f"{share['value']:.1%} ({share['low']:.1%} to {share['high']:.1%})"
        )
        same, kl = (np.mean([getattr(one, name) for one in chosen]) for name in ("is_same", "kl"))
        computed = np.mean([one.rows / one.prompt_tokens for one in chosen])
        lines.append(f"| {setting} | {ours.mean():.1%} | {interval} | {same:.1%} | {kl:.3f} | {computed:.0%} |")
    return lines


def main() -> None:
    """Measure or resume, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="DIR", help="a model that `export` wrote, or another")
    parser.add_argument("--n", type=int, default=300, help="questions (default: 300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tails", type=float, nargs="+", default=list(TAILS))
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="JSON lines of measured questions; run again to resume"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    models = {name: Model.from_pretrained(args.model, store_states=name == "stored") for name in ("zero", "stored")}
    done: dict[str, list[Record]] = {}
    settings = {"fingerprint": models["zero"].fingerprint.digest, "begins": list(models), "tails": args.tails}
    if args.out and args.out.exists():
        for line in args.out.read_text().splitlines():
            stored: dict[str, Any] = json.loads(line)
            if stored["settings"] == settings:
                done[stored["row"]] = [Record(**record) for record in stored["records"]]
    rows = world_rows(args.n, args.seed)
    for number, row in enumerate(rows):
        if row.key not in done:
            done[row.key] = measure(models, row, args.tails)
            if args.out:
                stored = {"settings": settings, "row": row.key, "records": [asdict(one) for one in done[row.key]]}
                with args.out.open("a") as file:
                    file.write(json.dumps(stored) + "\n")
            print(number + 1, end=" ", flush=True, file=sys.stderr)
    print("\n".join(table([done[row.key] for row in rows])))


if __name__ == "__main__":
    main()
