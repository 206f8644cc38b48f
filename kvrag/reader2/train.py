"""Train the second reader: `python -m kvrag.reader2.train --out DIR`.

The loss covers answers and, with smaller weights, the tokens of questions and contexts: nothing shows a head where to
look. Contexts grow from one chunk to 6,000 tokens, a stage at a time, as soon as a stage is learned (`MASTERY`). An
interrupted run resumes from `DIR/checkpoint.pt`; `DIR/log.txt` keeps the report. Reasons: docs/decisions/0017.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast

from kvrag.errors import SettingError
from kvrag.reader.net import Net, Size
from kvrag.reader.prompts import PLAIN, all_texts, prompt_parts
from kvrag.reader.train import build_tokenizer, keep_memory, optimizers, save
from kvrag.reader2.world import FULL, KINDS, NOT_STATED, Question, Scale, draw, sample, words

WINDOW = 8192
ECHO, CONTEXT = 0.3, 0.1  # weights of the questions' tokens and of the contexts'
MASTERY = 0.7  # share of right answers, averaged over about 40 steps, that ends a stage


@dataclass(frozen=True)
class Stage:
    """Contexts of one size: rows of a batch, questions per context, whether all prompt formats and kinds occur."""

    scale: Scale
    rows: int
    questions: int
    formats: bool = True
    answerable: bool = False  # no questions without an answer, which "not stated" would often get right


STAGES = (
    Stage(Scale((30, 60), (30, 60), (1, 1), (1, 1), 0.0, 0.0, ("listed", "code")), 16, 10, False, answerable=True),
    Stage(Scale((50, 70), (50, 70), (1, 1), (1, 1), near=0.0, idle=0.1), 16, 12, formats=False),
    Stage(Scale((60, 120), (24, 64), (2, 4), (1, 2), near=0.1, idle=0.3), 16, 12, formats=False),
    Stage(Scale((100, 250), (32, 96), (3, 6), (1, 3), near=0.2), 14, 16),
    Stage(Scale((250, 600), (48, 128), (4, 8), (1, 4), near=0.3), 8, 24),
    Stage(Scale((600, 1500), (64, 192), (6, 12), (2, 4)), 4, 40),
    Stage(replace(FULL, context=(1500, 3000), chunks=(10, 16)), 2, 60),
    Stage(replace(FULL, chunks=(10, 24)), 1, 90),
)


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer to which every word of the world is one token, with and without a space before it."""
    rng = random.Random(seed)
    texts = all_texts() * 60
    for _ in range(200):
        drawn = sample(rng, "train", Scale((250, 600), (48, 128), (4, 8), (1, 4)))
        texts.append("\n\n".join(drawn.passages))
    texts += [text for word in words() for text in (word, f" {word}")] * 300
    return build_tokenizer(texts, 4096, digits=1, window=WINDOW)


@dataclass
class Batch:
    """A batch. Kinds are indices of `KINDS`, -1 without a question."""

    context: Tensor  # (B, C)
    lengths: Tensor  # (B,)
    questions: Tensor  # (B, Q, L)
    answers: Tensor  # (B, Q, L) bool, tokens of answers
    kinds: Tensor  # (B, Q)
    padding: int

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        return replace(self, **{name: part.to(device) for name, part in vars(self).items() if name != "padding"})


def make_batch(tokenizer: PreTrainedTokenizerFast, rng: random.Random, split: str, stage: Stage) -> Batch:
    """Draw contexts, padded to a multiple of 16 tokens."""
    rows = [_make_row(tokenizer, rng, split, stage) for _ in range(stage.rows)]
    width = -(-max(len(context) for context, _ in rows) // 16) * 16
    num_questions = max(len(branches) for _, branches in rows)
    length = max(len(asks) + len(answer) for _, branches in rows for asks, answer, _ in branches)
    shape = stage.rows, num_questions, length
    batch = Batch(
        torch.full((stage.rows, width), tokenizer.pad_token_id),
        torch.tensor([len(context) for context, _ in rows]),
        torch.full(shape, tokenizer.pad_token_id),
        torch.zeros(shape, dtype=torch.bool),
        torch.full(shape[:2], -1),
        tokenizer.pad_token_id,
    )
    for number, (context, branches) in enumerate(rows):
        batch.context[number, : len(context)] = torch.tensor(context)
        for branch, (asks, answer, kind) in enumerate(branches):
            ids = torch.tensor(asks + answer)
            batch.questions[number, branch, : len(ids)] = ids
            batch.answers[number, branch, len(asks) : len(ids)] = True
            batch.kinds[number, branch] = kind
    return batch


def _make_row(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, split: str, stage: Stage
) -> tuple[list[int], list[tuple[list[int], list[int], int]]]:
    """Return the ids of a context, and those of its questions and answers with their kinds; at least one."""
    asked: list[Question] = []
    while not asked:
        drawn = sample(rng, split, stage.scale)
        asked = [one for one in drawn.questions if not (stage.answerable and one.answer == NOT_STATED)]
    if stage.formats:
        before, joint, after = prompt_parts(rng, drawn.passages)
    else:
        before, after = PLAIN.format(passages="\n\n".join(drawn.passages), question="{question}").split(" {question}")
        joint = " "
    questions = draw(rng, asked, stage.questions)
    texts = [before]
    for question in questions:
        texts += [f"{joint}{question.text}{after}", f" {question.answer}"]
    encoded, *rest = (one.ids for one in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False))
    branches = [
        (asks, [*answer, tokenizer.eos_token_id], KINDS.index(question.kind))
        for question, asks, answer in zip(questions, rest[::2], rest[1::2], strict=True)
    ]
    return [tokenizer.bos_token_id, *encoded], branches


class Score:
    """Share of questions with all tokens right, by kind."""

    def __init__(self) -> None:
        self.right, self.asked = torch.zeros(len(KINDS)), torch.zeros(len(KINDS))

    def add(self, batch: Batch, mistakes: Tensor) -> None:
        """Count a batch; `mistakes`: (B, Q, L - 1) bool."""
        kinds, wrong = batch.kinds.flatten().cpu(), mistakes.any(-1).flatten().cpu()
        self.asked += torch.bincount(kinds[kinds >= 0], minlength=len(KINDS))
        self.right += torch.bincount(kinds[(kinds >= 0) & ~wrong], minlength=len(KINDS))

    @property
    def share(self) -> float:
        """Share of all questions."""
        return float(self.right.sum() / self.asked.sum())

    def __str__(self) -> str:
        shares = (f"{k} {r / a:.2f}" for k, r, a in zip(KINDS, self.right, self.asked, strict=True) if a)
        return f"{self.share:.3f} ({', '.join(shares)})"


def losses(net: Net, batch: Batch, with_context: bool = True) -> tuple[dict[str, Tensor], Tensor]:
    """Return the parts of the loss, and (B, Q, L - 1) bool: wrong tokens of answers."""
    asked, read = net.read(batch.context, batch.lengths, batch.questions)
    targets, answers = batch.questions[:, :, 1:], batch.answers[:, :, 1:]
    follows = targets != batch.padding
    logits = net.logits(asked[:, :, :-1][follows])
    each = cross_entropy(logits, targets[follows], reduction="none")
    of_answer = answers[follows]
    parts = {"answer": each[of_answer].mean(), "echo": each[~of_answer].mean()}
    if with_context:
        follows_context = batch.context[:, 1:] != batch.padding
        parts["context"] = cross_entropy(
            net.logits(read[:, :-1][follows_context]), batch.context[:, 1:][follows_context]
        )
    mistakes = torch.zeros_like(follows)
    mistakes[follows] = (logits.argmax(-1) != targets[follows]) & of_answer
    return parts, mistakes


def join_spaced(net: Net, tokenizer: PreTrainedTokenizerFast, std: float = 0.02) -> None:
    """Start with equal embeddings of a word with and without a space before it, but for a direction that all share.

    Otherwise a name at the beginning of a line has nothing to do with the same name within a sentence. Changes `net`.
    """
    vocabulary = tokenizer.get_vocab()
    spaced = {
        vocabulary[word]: vocabulary[word[1:]] for word in vocabulary if word[0] == "Ġ" and word[1:] in vocabulary
    }
    weights = net.model.embed_tokens.weight.data
    weights[list(spaced)] = weights[list(spaced.values())] + torch.randn(weights.shape[1]) * std


@dataclass
class Settings:
    """Settings of a training. Changing any of them makes it another training."""

    rate: float = 3e-3
    seed: int = 0
    layers: int = 6
    hidden: int = 192
    heads: int = 4
    kv_heads: int = 2
    feed_forward: int = 512


class Training:
    """A training run: net, optimisers, step and stage. What a step does depends on the settings and the past alone."""

    def __init__(self, settings: Settings, folder: Path, device: str = "cpu", compiled: bool = False) -> None:
        """Start, or resume from `folder/checkpoint.pt`.

        Raises:
            SettingError: The checkpoint belongs to other settings.
        """
        self.settings, self.folder, self.device = settings, folder, torch.device(device)
        if self.checkpoint.exists():  # a changed world may make another one
            self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        else:
            self.tokenizer = train_tokenizer(settings.seed)
        torch.manual_seed(settings.seed)
        size = Size(
            len(self.tokenizer),
            settings.hidden,
            settings.feed_forward,
            settings.layers,
            settings.heads,
            settings.kv_heads,
        )
        self.net = Net(size)
        join_spaced(self.net, self.tokenizer)
        self.net.to(self.device)
        self.optimizers = optimizers(self.net)
        self.step, self.stage, self.level = 0, 0, 0.0
        if self.checkpoint.exists():
            self._resume()
        if compiled:
            torch._dynamo.config.cache_size_limit = 256  # one compiled layer per shape
            for layer in self.net.model.layers:
                layer.compile(dynamic=False)

    @property
    def checkpoint(self) -> Path:
        """Path of the checkpoint, which contains everything needed to resume."""
        return self.folder / "checkpoint.pt"

    def _resume(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        if state["settings"] != asdict(self.settings):
            raise SettingError(
                f"{self.checkpoint} belongs to a training with {state['settings']}: use the same settings, or "
                "another --out"
            )
        self.net.load_state_dict(state["net"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.stage, self.level = state["step"], state["stage"], state["level"]

    def save(self) -> None:
        """Write the checkpoint and the model; a killed process leaves the previous checkpoint."""
        state = {
            "net": self.net.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "stage": self.stage,
            "level": self.level,
            "settings": asdict(self.settings),
        }
        new = self.checkpoint.with_suffix(".new")
        torch.save(state, new)
        new.replace(self.checkpoint)
        save(self.net, self.tokenizer, self.folder, world=2)

    def advance(self, decay: float = 1.0) -> tuple[dict[str, float], Score]:
        """Run one step; return the parts of the loss and the score on the training batch.

        Args:
            decay: Factor of the learning rate, for the end of a run.
        """
        rng = random.Random(f"{self.settings.seed} {self.step}")
        number = self.stage if rng.random() < 0.8 else rng.randint(0, self.stage)  # earlier stages are not forgotten
        batch = make_batch(self.tokenizer, rng, "train", STAGES[number]).to(self.device)
        rate = self.settings.rate * min(1, (self.step + 1) / 60) * decay
        for optimizer, factor in zip(self.optimizers, (1, 2), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = factor * rate
        parts, mistakes = losses(self.net, batch)
        loss = parts["answer"] + ECHO * parts["echo"] + CONTEXT * parts["context"]
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([p for p in self.net.parameters() if p.grad is not None], 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.net.zero_grad(set_to_none=True)
        self.step += 1
        score = Score()
        score.add(batch, mistakes)
        if number == self.stage:
            self.level += (score.share - self.level) / 40
            if self.level > MASTERY and self.stage + 1 < len(STAGES):
                self.stage, self.level = self.stage + 1, 0.0
        return {name: part.item() for name, part in parts.items()}, score

    @torch.no_grad()
    def test(self, stage: int, num_batches: int = 8) -> Score:
        """Score on held-out names and numbers, with the correct beginning of each answer given."""
        score = Score()
        for number in range(num_batches):
            batch = make_batch(self.tokenizer, random.Random(f"test {number}"), "test", STAGES[stage]).to(self.device)
            score.add(batch, losses(self.net, batch, with_context=False)[1])
        return score


def main() -> None:
    """Train or resume, and report."""
    defaults = Settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint, model and log")
    parser.add_argument("--steps", type=int, default=20000, help="stop at this step (default: 20000)")
    parser.add_argument("--decay", type=int, default=0, help="let the learning rate fall to 0 over the last N steps")
    for name, value in asdict(defaults).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="default: all cores")
    parser.add_argument("--compile", action="store_true", help="compile the layers: pays after some hundred steps")
    parser.add_argument(
        "--test", action="store_true", help="only evaluate the checkpoint, on the contexts of all stages"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)  # vanishing activations would slow the CPU down
    keep_memory()
    try:
        settings = Settings(**{name: getattr(args, name) for name in asdict(defaults)})
        training = Training(settings, args.out, args.device, args.compile)
    except SettingError as error:
        sys.exit(f"error: {error}")
    with (args.out / "log.txt").open("a") as log:

        def report(text: str) -> None:
            print(text, flush=True)
            print(time.strftime("%H:%M:%S"), text, file=log, flush=True)

        if args.test:
            for stage in range(len(STAGES)):
                report(f"{training.step} held out, stage {stage}: {training.test(stage)}")
            return
        _train(training, args.steps, args.decay, report)


def _train(training: Training, steps: int, decay: int, report: Callable[[str], None]) -> None:
    score, seen = Score(), list[dict[str, float]]()
    started = time.process_time()
    while training.step < steps:
        stage = training.stage
        parts, right = training.advance(min(1.0, (steps - training.step) / decay) if decay else 1.0)
        seen.append(parts)
        score.right, score.asked = score.right + right.right, score.asked + right.asked
        if training.step % 25 == 0:
            means = " ".join(f"{name} {sum(part[name] for part in seen) / len(seen):.3f}" for name in parts)
            seconds = (time.process_time() - started) / len(seen)
            report(f"{training.step} stage {stage} level {training.level:.2f} {means} {seconds:.1f}s/step {score}")
            score, seen, started = Score(), [], time.process_time()
        if training.step % 50 == 0 or training.step == steps or training.stage != stage:
            training.save()
        if training.step % 500 == 0 or training.stage != stage:
            report(f"{training.step} held out, stage {stage}: {training.test(stage)}")


if __name__ == "__main__":
    main()
