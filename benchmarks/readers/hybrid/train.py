"""Train the witness: `python -m benchmarks.readers.hybrid.train --out DIR`.

The bundled reader becomes a hybrid: all layers but two are replaced by gated delta nets that begin with the attention's
projections. First each learns its layer's output from the reader's own input (`align`), then all together learn the
reader's logits and the answers. Resumes from `DIR/checkpoint.pt`; the curve is in `DIR/log.txt`. Needs torch 2.9.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.readers.first.world import KINDS
from benchmarks.readers.hybrid.data import Batch, Shape, make_batch
from benchmarks.readers.hybrid.net import GUIDED, DeltaNet, Net, Size

READER = Path(__file__).parents[3] / "kvrag" / "reader"
STAGES = (  # (until this step, shapes)
    (130, (Shape((1, 1), 6, 128, 6), Shape((1, 2), 4, 224, 6))),
    (200, (Shape((1, 2), 4, 224, 10), Shape((2, 3), 4, 320, 10), Shape((3, 4), 3, 416, 12))),
    (
        10**9,
        (Shape((2, 3), 4, 320, 12), Shape((3, 4), 4, 416, 16), Shape((4, 6), 3, 608, 20), Shape((4, 6), 3, 608, 20)),
    ),
)
TESTED = (Shape((1, 3), 4, 320, 10), Shape((4, 6), 3, 608, 20))


@dataclass
class Settings:
    """Settings of a training."""

    recurrent: tuple[int, ...] = (0, 1, 2, 3, 5, 7)
    align: int = 130
    steps: int = 500
    align_rate: float = 1.2e-2
    rate: float = 1e-3
    answers: float = 1.0  # weights of the parts of the loss
    match: float = 1.0
    stream: float = 1.0
    point: float = 0.2
    seed: int = 0


def load_reader() -> Net:
    """Load the bundled reader, float32, frozen."""
    net = Net(Size())
    tensors = load_file(READER / "model.safetensors")
    net.load_state_dict({name.replace("self_attn", "mixer"): tensor.float() for name, tensor in tensors.items()})
    return net.requires_grad_(False)


def load_net(folder: Path) -> Net:
    """Load a training's net, frozen."""
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    net = Net(Size(), tuple(state["settings"]["recurrent"]))
    net.load_state_dict(state["net"])
    return net.requires_grad_(False)


def convert(reader: Net, recurrent: tuple[int, ...]) -> Net:
    """Return the reader with untrained gated delta nets in the layers `recurrent`."""
    net = Net(reader.size, recurrent)
    own = net.state_dict()
    net.load_state_dict({name: tensor for name, tensor in reader.state_dict().items() if name in own}, strict=False)
    for number in recurrent:
        net.model.layers[number].mixer.start(reader.model.layers[number].mixer)
    return net


class Score:
    """Questions with all tokens of the answer right, by kind, of a net and of the reader."""

    def __init__(self) -> None:
        self.right, self.reader, self.asked = (torch.zeros(len(KINDS)) for _ in range(3))

    def add(self, batch: Batch, logits: Tensor, reader: Tensor, follows: Tensor) -> None:
        """Count a batch."""
        kinds = batch.kinds.flatten()
        asked = kinds >= 0
        self.asked += torch.bincount(kinds[asked], minlength=len(KINDS))
        numbers = torch.arange(len(kinds)).view(*batch.kinds.shape, 1).expand_as(follows)[follows]
        targets, answers = batch.questions[:, :, 1:][follows], batch.answers[:, :, 1:][follows]
        for guess, right in ((logits, self.right), (reader, self.reader)):
            mistakes = ((guess.argmax(-1) != targets) & answers).float()
            wrong = torch.zeros(len(kinds)).index_add_(0, numbers, mistakes)
            right += torch.bincount(kinds[asked & (wrong == 0)], minlength=len(KINDS))

    def __str__(self) -> str:
        total = f"{self.right.sum() / self.asked.sum():.3f} (reader {self.reader.sum() / self.asked.sum():.3f})"
        shares = (f"{k} {r / a:.2f}" for k, r, a in zip(KINDS, self.right, self.asked, strict=True) if a)
        return f"{total} {', '.join(shares)}"


class Training:
    """A training run."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings, self.folder = settings, folder
        self.tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(READER)
        torch.manual_seed(settings.seed)
        self.reader = load_reader()
        self.net = convert(self.reader, settings.recurrent)
        new = [p for m in self.net.modules() if isinstance(m, DeltaNet) for p in m.parameters()]
        self.new = {id(p) for p in new}
        groups: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {}
        for name, p in self.net.named_parameters():
            matrix = p.ndim == 2 and not any(part in name for part in ("embed", "conv", "proj_a", "proj_b"))
            groups.setdefault((matrix, id(p) in self.new), []).append(p)
        # the copied parameters learn more slowly
        matrices = [{"params": groups[True, fresh], "factor": 1.0 if fresh else 0.3} for fresh in (True, False)]
        rest = [{"params": groups[False, fresh], "factor": 1.0 if fresh else 0.1} for fresh in (True, False)]
        self.optimizers = [
            torch.optim.Muon(matrices, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
        ]
        self.step, self.seconds = 0, 0.0
        if self.checkpoint.exists():
            state = torch.load(self.checkpoint, weights_only=True)
            self.net.load_state_dict(state["net"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.step, self.seconds = state["step"], state["seconds"]

    @property
    def checkpoint(self) -> Path:
        """Everything needed to resume."""
        return self.folder / "checkpoint.pt"

    def save(self) -> None:
        """Write the checkpoint; a killed process leaves the previous one."""
        state = {
            "net": self.net.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
            "settings": asdict(self.settings),
        }
        new = self.checkpoint.with_suffix(".new")
        torch.save(state, new)
        new.replace(self.checkpoint)

    def advance(self) -> tuple[dict[str, float], Score]:
        """Run one step; return the parts of the loss and the score on the batch."""
        settings, step = self.settings, self.step
        shapes = next(shapes for until, shapes in STAGES if step < until)
        batch = make_batch(
            self.tokenizer, random.Random(f"{settings.seed} {step}"), "train", shapes[step % len(shapes)]
        )
        aligning, score = step < settings.align, Score()
        if aligning:
            losses = self.align(batch)
            loss = sum(losses.values(), torch.zeros(()))
            at, length = step, settings.align + 20
        else:
            losses = self.distil(batch, score)
            weights = {name: getattr(settings, name) for name in losses}
            loss = sum((weights[name] * part for name, part in losses.items()), torch.zeros(()))
            at, length = step - settings.align, settings.steps - settings.align
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0 if not aligning else 10.0)
        top = settings.align_rate if aligning else settings.rate
        rate = top * min(1.0, (at + 1) / 15, max(0.02, 1.6 * (1 - at / length)))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["factor"]
            optimizer.step()
        self.net.zero_grad(set_to_none=True)
        self.step += 1
        return {name: part.item() for name, part in losses.items()}, score

    def align(self, batch: Batch) -> dict[str, Tensor]:
        """Return each new layer's distance to the attention it replaces, on the reader's input."""
        ids = torch.cat([batch.context, batch.questions.flatten(1)], 1)
        layout = self.net.layout(batch.context, batch.lengths, batch.questions)
        used = torch.cat([layout.valid, (batch.questions != batch.padding).flatten(1)], 1)
        with torch.no_grad():
            streams, mixed = self.reader.run(ids, layout)
        losses = {}
        for number in self.settings.recurrent:
            layer = self.net.model.layers[number]
            target = mixed[number]
            with torch.no_grad():
                x = self.reader.model.layers[number].input_layernorm(streams[number])
            losses[f"layer{number}"] = _distance(layer.mixer(x, layout), target, used)
        return losses

    def distil(self, batch: Batch, score: Score) -> dict[str, Tensor]:
        """Return the parts of the loss of the whole net."""
        ids = torch.cat([batch.context, batch.questions.flatten(1)], 1)
        layout = self.net.layout(batch.context, batch.lengths, batch.questions)
        used = torch.cat([layout.valid, (batch.questions != batch.padding).flatten(1)], 1)
        follows = batch.questions[:, :, 1:] != batch.padding
        at, shape = layout.num_context, batch.questions.shape
        with torch.no_grad():
            streams, _ = self.reader.run(ids, layout)
            known = self.reader.logits(streams[-1][:, at:].view(*shape, -1)[:, :, :-1][follows])
        own, _ = self.net.run(ids, layout)
        logits = self.net.logits(own[-1][:, at:].view(*shape, -1)[:, :, :-1][follows])
        score.add(batch, logits.detach(), known, follows)
        answers = batch.answers[:, :, 1:][follows]
        targets = batch.questions[:, :, 1:][follows]
        divergence = kl_div(logits.log_softmax(-1), known.log_softmax(-1), log_target=True, reduction="none").sum(-1)
        losses = {
            "answers": cross_entropy(logits[answers], targets[answers]),
            "match": divergence[answers].mean() + 0.3 * divergence[~answers].mean(),
            # before layers that look facts up, and half-way
            "stream": torch.stack([_distance(own[n], streams[n], used) for n in (2, 4, 6)]).mean(),
        }
        if not {*GUIDED} & {*self.net.recurrent}:
            looks = self.net.looks(own, layout, batch.pointers)
            losses["point"] = -looks.masked_fill(~batch.places, -1e4).logsumexp(-1).mean()
        return losses

    @torch.no_grad()
    def test(self, num_batches: int = 3) -> list[Score]:
        """Score on the held-out split."""
        scores = []
        for shape in TESTED:
            scores.append(Score())
            for number in range(num_batches):
                self.distil(make_batch(self.tokenizer, random.Random(f"test {number}"), "test", shape), scores[-1])
        return scores


def _distance(out: Tensor, target: Tensor, used: Tensor) -> Tensor:
    """Mean squared error of the tokens used, relative to the target's variance."""
    error = ((out - target).square().mean(-1) * used).sum()
    return error / (target.square().mean(-1) * used).sum()


def main() -> None:
    """Train or resume."""
    defaults = Settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--align", type=int, default=defaults.align)
    parser.add_argument("--rate", type=float, default=defaults.rate)
    parser.add_argument("--recurrent", type=int, nargs="+", default=list(defaults.recurrent))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # vanishing activations would slow the CPU down
    keep_memory()
    training = Training(Settings(tuple(args.recurrent), args.align, args.steps, rate=args.rate), args.out)
    log = (args.out / "log.txt").open("a")

    def write(text: str) -> None:
        print(text, flush=True)
        log.write(text + "\n")
        log.flush()

    score, parts, started = Score(), [], time.process_time()
    while training.step < args.steps:
        losses, right = training.advance()
        parts.append(losses)
        for mine, other in ((score.right, right.right), (score.reader, right.reader), (score.asked, right.asked)):
            mine += other
        if training.step % 10 == 0 or training.step == args.align:
            training.seconds, started = training.seconds + time.process_time() - started, time.process_time()
            means = {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
            shown = " ".join(f"{name} {value:.3f}" for name, value in means.items())
            write(f"{training.step} {training.seconds / 60:.1f} min {shown} | {score}")
            score, parts = Score(), []
        if training.step % 50 == 0 or training.step == args.steps:
            training.save()
            write("\n".join(f"{training.step} held out {json.dumps(shape.articles)} {score}"
                            for shape, score in zip(TESTED, training.test(), strict=True)))  # fmt: skip


def keep_memory() -> None:
    """Make glibc keep freed memory: fresh pages for every step's activations cost a tenth of the time."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            libc.mallopt(option, 2**31 - 1)


if __name__ == "__main__":
    main()
