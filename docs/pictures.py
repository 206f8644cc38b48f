"""Draw the pictures of the pages from real runs: `make pictures`.

`python docs/pictures.py --ttft` measures the time to first token first, which takes a minute or two on an idle
machine; otherwise that picture is drawn from the last measurement. Hit rates are drawn from the last
`python -m benchmarks decay --json > docs/images/decay.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from benchmarks.speed.first_token import FULL, PREFIX, TtftSetup, measure
from kvrag import BlendConfig, BlendEngine, Model
from kvrag.config import DEFAULT_POLICY, DEFAULT_RATIO
from kvrag.request import Request

IMAGES = Path(__file__).parent / "images"
CORPUS = Path(__file__).parents[1] / "examples" / "corpus"
MEASURED, DECAY = IMAGES / "ttft-length.json", IMAGES / "decay.json"
POLICIES = ("query", "hkvd", "first_k", "random")
SHAPE, LAYERS, CHUNKS, CHUNK_TOKENS = "qwen2.5-0.5b", 8, (1, 2, 4, 8), 512
WIDTH = 104  # characters of a line of text


def draw() -> None:
    """Draw all pictures, the last one from the last measurement."""
    with tempfile.TemporaryDirectory() as folder, BlendEngine.from_pretrained("reader", store=folder) as engine:
        chunks, question = example_prompt()
        engine.warm(chunks)
        content = "\n\n".join([*chunks, f"Question: {question}"])
        ids = engine.model.tokenizer.render([{"role": "user", "content": content}])
        chosen = {policy: selected(engine, ids, policy) for policy in POLICIES}
        stitched, deviations = deviation(engine, ids)
        draw_deviation(stitched, deviations, chosen, IMAGES / "deviation.png")
        draw_text(engine.model, stitched, chosen[DEFAULT_POLICY], IMAGES / "recomputed.png")
    if MEASURED.exists():
        draw_ttft(json.loads(MEASURED.read_text()), IMAGES / "ttft-length.png")
    if DECAY.exists():
        draw_decay(json.loads(DECAY.read_text()), IMAGES / "decay.png")


def example_prompt() -> tuple[list[str], str]:
    """Return paragraphs of three articles; the middle article answers the question."""
    question, answer = "What does Ingla play?", "leather drum"
    articles = [path.read_text().strip() for path in sorted(CORPUS.glob("*.txt"))]
    about = next(article for article in articles if answer in article)
    before, behind = [article for article in articles if answer not in article][:2]
    return "\n\n".join([before, about, behind]).split("\n\n"), question


def selected(engine: BlendEngine, ids: list[int], policy: str) -> Tensor:
    """Return the (S,) positions that a policy recomputes at the default ratio."""
    return engine.prefill(ids, BlendConfig(policy=policy, ratio=DEFAULT_RATIO)).selected


def deviation(engine: BlendEngine, ids: list[int]) -> tuple[Request, Tensor]:
    """Return the (L, T) relative distance of stitched keys and values to full prefill's; NaN at fresh positions."""
    stitched = engine.prefill(ids, BlendConfig(policy="none"))
    full = engine.prefill(ids, BlendConfig(policy="full"))
    rows = []
    for layer in range(engine.model.num_layers):
        caches = stitched.cache.layer(layer), full.cache.layer(layer)
        pairs = ((ours[:, :, : len(ids)], true[:, :, : len(ids)]) for ours, true in zip(*caches, strict=True))
        distances = [((ours - true).float().square(), true.float().square()) for ours, true in pairs]
        ours, true = (sum(part.sum(dim=(0, 1, 3)) for part in parts) for parts in zip(*distances, strict=True))
        rows.append((ours / true).sqrt())
    return stitched, torch.stack(rows)[:, : len(ids)].masked_fill(~stitched.reused, torch.nan)


def draw_deviation(stitched: Request, deviations: Tensor, chosen: dict[str, Tensor], path: Path) -> None:
    """Draw the deviation by token and layer, and beneath it what the policies recompute."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    top.set_facecolor("lightgrey")
    norm = LogNorm(vmin=0.01, vmax=1.0)
    image = top.imshow(deviations.clamp(min=0.01), aspect="auto", norm=norm, interpolation="nearest", cmap="magma")
    top.set(ylabel="layer", title="deviation of stitched KV from full prefill's, by token and layer (grey: not reused)")
    figure.colorbar(image, ax=top, label="relative deviation")
    for row, positions in enumerate(chosen.values()):
        bottom.vlines(positions, row - 0.4, row + 0.4, lw=2.5, color="tab:orange")
    bottom.set_yticks(range(len(chosen)), chosen)
    bottom.invert_yaxis()
    bottom.set(xlabel="token of the prompt", title=f"what each policy recomputes at a ratio of {DEFAULT_RATIO:g}")
    for run in stitched.runs:
        for axis in (top, bottom):
            axis.axvline(run.start - 0.5, color="tab:cyan", lw=0.8)
    figure.savefig(path, dpi=110)


def draw_text(model: Model, stitched: Request, recomputed: Tensor, path: Path) -> None:
    """Draw the prompt's text, tokens coloured by what is done to them."""
    pieces, line, column = [], 0, 0
    for position, token in enumerate(stitched.ids.tolist()):
        for number, piece in enumerate(model.tokenizer.decode([token]).split("\n")):
            if number or column + len(piece) > WIDTH:
                line, column = line + 1, 0
            pieces.append((line, column, position, piece))
            column += len(piece)
    size = 9.0
    wide, high = size * 0.602 / 72, size * 1.7 / 72  # inches of a character of DejaVu Sans Mono
    figure = Figure(figsize=(WIDTH * wide, (line + 3) * high))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, WIDTH), ylim=(line + 3, 0))
    axis.axis("off")
    colours = {"reused": "#dcebf7", "reused and recomputed": "#ffb366", "computed fresh": "#e4e4e4"}
    names = list(colours)
    again = set(recomputed.tolist())
    pieces += [(line + 2, 30 * number + 1, -1 - number, name) for number, name in enumerate(names)]
    for row, column, position, piece in pieces:
        what = names[-1 - position] if position < 0 else names[2]
        if position >= 0 and stitched.reused[position]:
            what = names[position in again]
        axis.add_patch(Rectangle((column, row), len(piece), 0.95, color=colours[what], lw=0))
        axis.text(column, row + 0.5, piece, family="DejaVu Sans Mono", size=size, va="center_baseline")
    figure.savefig(path, dpi=110)


def measure_ttft() -> None:
    """Write the measurement that `draw_ttft` draws."""
    results = [
        measure(TtftSetup(SHAPE, LAYERS, chunks, CHUNK_TOKENS, policies=(DEFAULT_POLICY, "first_k", "none"), repeats=2))
        for chunks in CHUNKS
    ]
    MEASURED.write_text(json.dumps([asdict(result) for result in results], indent=1))


def draw_ttft(results: list[dict[str, Any]], path: Path) -> None:
    """Draw the time to first token over the length of the prompt, and its speed-up over full prefill."""
    settings, lengths = results[-1]["settings"], [result["prompt_tokens"] for result in results]
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, row in enumerate(results[0]["rows"]):
        name, look = row["name"], {"marker": "o", "color": "black" if row["name"] == FULL else f"C{number}"}
        label = name if name in (FULL, PREFIX, "none") else f"{name} {settings['ratio']:.0%}"
        rows = [result["rows"][number] for result in results]
        left.plot(lengths, [row["ttft_s"] for row in rows], label=label, **look)
        right.plot(lengths, [row["speedup"] for row in rows], **look)
    for axis, what in ((left, "time to first token, seconds"), (right, "speed-up over full prefill")):
        axis.set(xlabel="tokens of the prompt", ylabel=what, ylim=(0, None), xlim=(0, None))
    right.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    left.legend(fontsize=8)
    about = f"{settings['model']}, {settings['dtype']}, threads: {settings['threads']}, chunks from disk"
    figure.suptitle(about, size=9)
    figure.savefig(path, dpi=110)


def draw_decay(result: dict[str, Any], path: Path) -> None:
    """Draw the hit rates of a bounded store over thousands of prompts, with and without learning, and the best ones."""
    setup, figure = result["settings"], Figure(figsize=(9, 3.6), layout="constrained")
    axis = figure.subplots()
    for learn, colour in ((True, "tab:blue"), (False, "tab:orange")):
        rows = [row for row in result["rows"] if row["learn"] == learn]
        prompts = [row["prompts"] for row in rows]
        if learn:
            axis.plot(prompts, [row["best"] for row in rows], "k--", label="the most popular chunks, always stored")
        axis.plot(prompts, [row["hit_rate"] for row in rows], "o-", color=colour, label=f"{learn=}")
    axis.axvspan(0, setup["prompts"], color="lightgrey", lw=0)
    axis.set(xlabel="prompts (grey: warm-up)", ylabel="tokens of chunks that are reused")
    axis.set(xlim=(0, None), ylim=(0, 1), title=f"a store with room for {setup['room']:.0%} of the corpus")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ttft", action="store_true", help="measure the time to first token again")
    if parser.parse_args().ttft:
        print(f"measuring {len(CHUNKS)} lengths", file=sys.stderr)
        measure_ttft()
    draw()
