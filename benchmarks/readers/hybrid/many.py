"""Measure the witness on many questions per context: `python -m benchmarks.readers.hybrid.many DIR`.

What `measure` asks kvrag, in a fraction of the time: kvrag says which tokens of a prompt are reused, and with what
before them they were encoded; the rest is the training's own arithmetic, in float32, for all questions at once.
DIR is a training's folder. An answer is right if each of its tokens is the likeliest after those before it. Adaptive
settings become full prefill at the first token whose margin is below kvrag's; its own begins with a tail of 15 %.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, pad, rms_norm, silu, softplus
from transformers import AutoTokenizer

from benchmarks.quality.metrics import Bootstrap
from benchmarks.readers.first.world import KINDS, sample
from benchmarks.readers.hybrid import net as hybrid
from benchmarks.readers.hybrid.measure import CONTEXTS, TAILS, noting
from benchmarks.readers.hybrid.net import CHUNK, CONV, Attention, DeltaNet, Net
from benchmarks.readers.hybrid.train import READER, load_net
from kvrag.answer import overridden
from kvrag.backend.transformers import Model
from kvrag.config import BlendConfig
from kvrag.control.prompts import ask
from kvrag.control.tuning import MARGIN
from kvrag.engine import BlendEngine
from kvrag.reuse.blend import FIRST
from kvrag.types import Run

WITH_STATES = (0.15,)

State = dict[int, tuple[Tensor, Tensor]]
"""Layer -> the convolution's window (3, 3 * dim) and the state (H, D, D)."""
KV = dict[int, tuple[Tensor, Tensor]]
"""Layer -> (T, H, D) keys without their position, and values."""


Drawn = tuple[Sequence[str], Sequence[str], Sequence[tuple[str, str, str]]]
"""Passages, their documents, and questions: text, answer, kind."""


def draw(seed: int, number: int) -> Drawn:
    """Draw passages, their documents, and a question of every kind that the context has: text, answer, kind."""
    rng = random.Random(f"{seed} {number}")
    while True:
        drawn = sample(rng, "test", rng.randint(4, 6))
        if 12 <= len(drawn.passages) <= 20:
            break
    by_kind = {kind: [q for q in drawn.questions if q.kind == kind] for kind in KINDS}
    chosen = [rng.choice(questions) for questions in by_kind.values() if questions]
    return list(drawn.passages), list(drawn.articles), [(q.text, q.answer, q.kind) for q in chosen]


class Runner:
    """The witness on rows of one prompt, with given KV and states."""

    def __init__(self, net: Net) -> None:
        self.net, self.layers = net, net.model.layers
        self.attending = [number for number in range(len(self.layers)) if number not in net.recurrent]

    def empty(self) -> State:
        """States before the first token."""
        size = self.net.size
        dim = size.num_heads * size.head_dim
        window, state = torch.zeros(CONV - 1, 3 * dim), torch.zeros(size.num_heads, size.head_dim, size.head_dim)
        return dict.fromkeys(self.net.recurrent, (window, state))

    def run(self, ids: Tensor, at: Tensor, kv: KV, states: State) -> tuple[Tensor, State]:
        """Compute (S,) rows of the prompt and write their KV; return the last hidden states and the states."""
        x, after = self.net.model.embed_tokens(ids[None]), State()
        for number, layer in enumerate(self.layers):
            inputs = layer.input_layernorm(x)
            if isinstance(layer.mixer, DeltaNet):
                window, state = states[number]
                out, windows, ends = go_on(layer.mixer, inputs, window[None], state[None])
                after[number] = windows[0], ends[0]
            else:
                q, k, v = self._project(layer.mixer, inputs)
                keys, values = kv[number]
                keys[at], values[at] = k[0], v[0]
                mask = torch.arange(len(keys)) <= at[:, None]
                out = self._attend(
                    layer.mixer, q, at[None], keys[None], values[None], torch.arange(len(keys)), mask[None]
                )
            x = x + out
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x[0], after

    def branch(self, rows: Tensor, start: int, kv: KV, states: State) -> Tensor:
        """Return (Q, L, V) logits of (Q, L) right-padded questions that follow the prompt's first `start` tokens."""
        x, num = self.net.model.embed_tokens(rows), len(rows)
        at = start + torch.arange(rows.shape[1])
        before = torch.ones(rows.shape[1], start, dtype=torch.bool)
        mask = torch.cat([before, torch.ones(rows.shape[1], rows.shape[1], dtype=torch.bool).tril()], 1)
        for number, layer in enumerate(self.layers):
            inputs = layer.input_layernorm(x)
            if isinstance(layer.mixer, DeltaNet):
                window, state = (part.expand(num, *part.shape) for part in states[number])
                out, _, _ = go_on(layer.mixer, inputs, window, state)
            else:
                q, k, v = self._project(layer.mixer, inputs)
                keys, values = (part[:start].expand(num, -1, -1, -1) for part in kv[number])
                keys, values = torch.cat([keys, k], 1), torch.cat([values, v], 1)
                positions = torch.arange(start + rows.shape[1])
                out = self._attend(
                    layer.mixer, q, at.expand(num, -1), keys, values, positions, mask.expand(num, -1, -1)
                )
            x = x + out
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.net.logits(x)

    def _project(self, mixer: Attention, x: Tensor) -> Iterator[Tensor]:
        return (proj(x).unflatten(-1, (-1, mixer.head_dim)) for proj in (mixer.q_proj, mixer.k_proj, mixer.v_proj))

    def _attend(
        self, mixer: Attention, q: Tensor, at: Tensor, keys: Tensor, values: Tensor, positions: Tensor, mask: Tensor
    ) -> Tensor:
        q = self._rotate(q, at)
        keys = self._rotate(keys, positions.expand(len(keys), -1))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * mixer.head_dim**-0.5
        weights = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1)
        return mixer.o_proj(torch.einsum("bhqk,bkhd->bqhd", weights, values).flatten(2))

    def _rotate(self, x: Tensor, at: Tensor) -> Tensor:
        return hybrid._rotate(x, self.net.cos[at][:, :, None], self.net.sin[at][:, :, None])


def go_on(mixer: DeltaNet, x: Tensor, window: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mix (B, L, hidden) from windows (B, 3, 3 * dim) and states (B, H, D, D); return the output and those after it."""
    length = x.shape[1]
    inputs = torch.cat([window, mixer.in_proj_qkv(x)], 1)
    beta = mixer.in_proj_b(x).sigmoid()
    decay = -mixer.A_log.exp() * softplus(mixer.in_proj_a(x) + mixer.dt_bias)
    more = -length % CHUNK
    qkv, decay, beta = (
        pad(part, (0, 0, 0, more)) for part in (silu(hybrid._convolve(inputs, mixer.conv)), decay, beta)
    )
    q, k, v = (part.unflatten(2, (-1, CHUNK)) for part in mixer.heads(qkv))
    decay, beta = (part.transpose(1, 2).unflatten(2, (-1, CHUNK)) for part in (decay, beta))
    read, write, weights, total = hybrid._within(q, k, v, decay, beta)
    outs = []
    for n in range(q.shape[2]):
        new = write[:, :, n] - read[:, :, n] @ state
        outs.append((q[:, :, n] * total[:, :, n].exp()[..., None]) @ state + weights[:, :, n] @ new)
        left = (total[:, :, n, -1:] - total[:, :, n]).exp()[..., None]
        state = state * total[:, :, n, -1].exp()[..., None, None] + (k[:, :, n] * left).transpose(-1, -2) @ new
    out = rms_norm(torch.cat(outs, 2).transpose(1, 2)[:, :length], (mixer.head_dim,), mixer.norm_weight, mixer.eps)
    return mixer.out_proj(out.flatten(2) * silu(mixer.in_proj_z(x))), inputs[:, 1 - CONV :], state


@dataclass
class Found:
    """What kvrag finds in a prompt: the runs, and what each was encoded as, up to its end."""

    runs: Sequence[Run]
    texts: list[list[int]]


def find(model: Model, ids: list[int], passages: Sequence[str], documents: Sequence[str], context_tokens: int) -> Found:
    """Encode the passages with kvrag, and return what it finds in the prompt."""
    config = BlendConfig(context_tokens=context_tokens, controller="off")
    with TemporaryDirectory(prefix="kvrag-hybrid-") as folder, BlendEngine(model, folder, config) as engine:
        encoded = noting(engine)
        for name in dict.fromkeys(documents):
            engine.warm([text for text, of in zip(passages, documents, strict=True) if of == name], document=name)
        runs = engine.prefill(ids, overridden(config, policy="none")).runs
        texts = [[*model.preamble, *encoded[run.key][0], *encoded[run.key][1][: run.offset + len(run)]] for run in runs]
        return Found(runs, texts)


@torch.no_grad()
def measure(
    model: Model, runner: Runner, tokenizer: AutoTokenizer, drawn: Drawn, number: int
) -> list[dict[str, object]]:
    """Return the records of one context's questions in every setting."""
    passages, documents, questions = drawn
    prompts = [ask(model.tokenizer, passages, text) for text, _, _ in questions]
    differ = (at for at, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1)
    common = next(differ, len(prompts[0]) - 4)
    encode = tokenizer.backend_tokenizer.encode  # type: ignore[attr-defined]
    answers = [
        [*encode(f" {answer}", add_special_tokens=False).ids, model.tokenizer.hf.eos_token_id]
        for _, answer, _ in questions
    ]
    ids = torch.tensor(prompts[0][:common])
    rows = [[*prompt[common:], *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    padded = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for row, tokens in enumerate(rows):
        padded[row, : len(tokens)] = torch.tensor(tokens)
    size = runner.net.size

    def blank(length: int) -> KV:
        shape = length, size.num_heads, size.head_dim
        return {layer: (torch.zeros(shape), torch.zeros(shape)) for layer in runner.attending}

    def copy(kv: KV) -> KV:
        return {layer: (keys.clone(), values.clone()) for layer, (keys, values) in kv.items()}

    records: list[dict[str, object]] = []
    full: list[tuple[Tensor, list[bool]]] = []

    def add(setting: str, kv: KV, states: State, computed: float, adaptive: bool = False) -> None:
        logits = runner.branch(padded, common, kv, states)
        for row, answer in enumerate(answers):
            first = len(prompts[row]) - common - 1
            ours = logits[row, first : first + len(answer)]
            hits = [guess == token for guess, token in zip(ours.argmax(-1).tolist(), answer, strict=True)]
            if len(full) <= row:
                full.append((ours[0], hits))
            length = len(prompts[row])
            record = {"context": number, "kind": questions[row][2], "question": row}
            p, q = full[row][0].double().log_softmax(-1), ours[0].double().log_softmax(-1)
            done = computed + length - common
            records.append(
                record
                | {
                    "setting": setting,
                    "right": all(hits),
                    "kl": float((p.exp() * (p - q)).sum()),
                    "rows": done / length,
                }
            )
            if adaptive:
                top = ours.topk(2).values
                margins = (top[:, 0] - top[:, 1]).tolist()
                doubt = next((at for at, m in enumerate(margins) if m < MARGIN * (FIRST if at == 0 else 1)), None)
                right = all(hits) if doubt is None else all(hits[:doubt]) and all(full[row][1][doubt:])
                total = done if doubt is None else done + length
                records.append(
                    record
                    | {"setting": f"{setting}, adaptive", "right": right, "kl": float("nan"), "rows": total / length}
                )

    exact = blank(common)
    _, states = runner.run(ids, torch.arange(common), exact, runner.empty())
    add("full", exact, states, common)
    for name, context_tokens in CONTEXTS.items():
        found = find(model, prompts[0], passages, documents, context_tokens)
        stitched, ends = blank(common), dict[int, State]()
        reused = torch.zeros(common, dtype=torch.bool)
        for run, text in zip(found.runs, found.texts, strict=True):
            kv = blank(len(text))
            _, ends[run.stop] = runner.run(torch.tensor(text), torch.arange(len(text)), kv, runner.empty())
            reused[run.start : run.stop] = True
            for layer, parts in kv.items():
                for whole, part in zip(stitched[layer], parts, strict=True):
                    whole[run.start : run.stop] = part[-len(run) :]
        inexact = reused.nonzero().flatten()

        def blend(
            selected: Tensor,
            start: int | None = None,
            states: State | None = None,
            reused: Tensor = reused,
            stitched: KV = stitched,
        ) -> tuple[KV, State, int]:
            """Compute fresh and selected rows in kvrag's two passes, the last stretch from `start` with `states`."""
            rows = (~reused).index_fill(0, selected, True).nonzero().flatten()
            gaps = (rows.diff() > 1).nonzero().flatten()
            start = int(rows[gaps[-1] + 1]) if start is None else start
            kv, first = copy(stitched), rows[rows < start]
            if len(first):
                runner.run(ids[first], first, kv, runner.empty())
            last = torch.arange(start, common)
            _, after = runner.run(ids[last], last, kv, states or runner.empty())
            return kv, after, len(first) + len(last)

        add(f"{name}, plain reuse", *blend(inexact[:0]), adaptive=True)
        for tail in TAILS:
            selected = inexact[len(inexact) - round(tail * len(inexact)) :]
            add(f"{name}, tail {tail}", *blend(selected), adaptive=tail == 0.15)
            if name == "alone":
                last = torch.arange(int(selected[0]), common)
                kv = copy(exact)
                _, after = runner.run(ids[last], last, kv, runner.empty())
                add(f"exact KV, tail {tail}", kv, after, len(last))
            before = [stop for stop in ends if stop <= int(selected[0])]
            if before and tail in WITH_STATES:
                start = max(before)
                selected = inexact[inexact >= start]
                add(f"{name}, tail {tail} from a chunk's end", *blend(selected, start), adaptive=True)
                add(f"{name}, tail {tail} from its state", *blend(selected, start, ends[start]), adaptive=True)
    return records


def table(records: Sequence[dict[str, object]]) -> list[str]:
    """Return a Markdown table, with intervals over contexts."""
    settings = list(dict.fromkeys(str(record["setting"]) for record in records))
    keyed = {(r["setting"], r["context"], r["question"]): r for r in records}
    questions = sorted({(r["context"], r["question"]) for r in records})  # type: ignore[type-var]
    contexts = np.array([context for context, _ in questions])
    full = np.array([float(bool(keyed["full", *question]["right"])) for question in questions])
    resample = Bootstrap(contexts, seed=0)
    lines = [f"{len(questions)} questions about {len(set(contexts.tolist()))} contexts", ""]
    lines += ["| | right | of full prefill's | KL | rows |", "|---|---|---|---|---|"]
    for setting in settings:
        rows = [keyed.get((setting, *question), keyed["full", *question]) for question in questions]
        right, kl, computed = (np.array([float(row[name]) for row in rows]) for name in ("right", "kl", "rows"))  # type: ignore[arg-type]
        kept = resample.of(lambda ours, theirs: ours / theirs, right, full)
        share = f"{kept['value']:.1%} ({kept['low']:.1%} to {kept['high']:.1%})"
        lines.append(f"| {setting} | {right.mean():.1%} | {share} | {kl.mean():.3f} | {computed.mean():.0%} |")
    return lines


def main() -> None:
    """Measure or resume, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--model", type=Path, required=True, help="the same, as `export` wrote it")
    parser.add_argument("--contexts", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON lines; run again to resume")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    hybrid.matrix = linear  # in float32, as kvrag
    model, tokenizer = Model.from_pretrained(str(args.model)), AutoTokenizer.from_pretrained(READER)
    runner = Runner(load_net(args.folder))
    records = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    done = {record["context"] for record in records}
    for number in range(args.contexts):
        if number not in done:
            new = measure(model, runner, tokenizer, draw(args.seed, number), number)
            with args.out.open("a") as file:
                file.writelines(json.dumps(record) + "\n" for record in new)
            records += new
            print(number + 1, end=" ", flush=True, file=sys.stderr)
    print("\n".join(table(records)))


if __name__ == "__main__":
    main()
