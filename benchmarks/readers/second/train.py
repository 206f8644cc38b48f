"""Fine-tune the second reader: `python -m benchmarks.readers.second.train --base FOLDER --out DIR`.

The base is a pretrained Llama with a chat template, such as SmolLM2-135M-Instruct. It learns to answer questions about
the second world with the value alone. The loss covers the answers' tokens and nothing else: attention has no targets.
An interrupted run resumes from `DIR/checkpoint.pt`; `DIR/log.txt` keeps the report. Reasons: benchmarks/notes/0017.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from benchmarks.readers.first.net import Net, Size
from benchmarks.readers.first.train import keep_memory
from benchmarks.readers.prompts import prompt_parts
from benchmarks.readers.second.world import FULL, KINDS, Question, Scale, draw, sample
from kvrag.errors import SettingError

TAIL = "\n\nAnswer:"  # the end of the first reader's formats; here, the template's generation prompt takes its place


@dataclass(frozen=True)
class Stage:
    """Contexts of one size, and the share of the steps until which they are drawn."""

    until: float
    scale: Scale
    rows: int
    questions: int


STAGES = (
    Stage(0.25, Scale((80, 300), (32, 128), (3, 6), (1, 3), near=0.2), 2, 16),
    Stage(0.60, Scale((250, 700), (48, 160), (4, 8), (1, 4)), 1, 32),
    Stage(1.00, Scale((500, 1300), (64, 192), (6, 12), (2, 4)), 1, 40),
)
FULL_STAGE = Stage(1.0, replace(FULL, context=(1200, 3500), chunks=(10, 24)), 1, 60)
"""Long contexts, for tests: about 1,300 to 3,800 of SmolLM2's tokens."""


def question_parts(tokenizer: PreTrainedTokenizerFast) -> tuple[str, str]:
    """Return what the chat template puts before and after a user message."""
    message = [{"role": "user", "content": "\x00"}]
    text = str(tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False))
    before, after = text.split("\x00")
    return before, after


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
    """Draw contexts."""
    rows = [_make_row(tokenizer, rng, split, stage) for _ in range(stage.rows)]
    width = max(len(context) for context, _ in rows)
    num_questions = max(len(branches) for _, branches in rows)
    length = max(len(asks) + len(answer) for _, branches in rows for asks, answer, _ in branches)
    shape = stage.rows, num_questions, length
    padding = tokenizer.pad_token_id
    batch = Batch(
        torch.full((stage.rows, width), padding),
        torch.tensor([len(context) for context, _ in rows]),
        torch.full(shape, padding),
        torch.zeros(shape, dtype=torch.bool),
        torch.full(shape[:2], -1),
        padding,
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
    asked: tuple[Question, ...] = ()
    while not asked:
        drawn = sample(rng, split, stage.scale)
        asked = drawn.questions
    if rng.random() < 0.5:
        before, joint, after = prompt_parts(rng, drawn.passages)
    else:
        before, joint, after = "\n\n".join([*drawn.passages, "Question:"]), " ", TAIL
    opening, closing = question_parts(tokenizer)
    questions = draw(rng, asked, stage.questions)
    texts = [opening + before]
    for question in questions:
        texts += [f"{joint}{question.text}{after.removesuffix(TAIL)}{closing}", question.answer]
    encoded, *rest = tokenizer(texts, add_special_tokens=False)["input_ids"]
    branches = [
        (asks, [*answer, tokenizer.eos_token_id], KINDS.index(question.kind))
        for question, asks, answer in zip(questions, rest[::2], rest[1::2], strict=True)
    ]
    return encoded, branches


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
        return f"{self.share:.3f} of {int(self.asked.sum())} ({', '.join(shares)})"


def answer_loss(net: Net, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the mean loss of the answers' tokens, and (B, Q, L - 1) bool: wrong ones."""
    asked, _ = net.read(batch.context, batch.lengths, batch.questions)
    targets, answers = batch.questions[:, :, 1:], batch.answers[:, :, 1:]
    logits = net.logits(asked[:, :, :-1][answers])
    mistakes = torch.zeros_like(answers)
    mistakes[answers] = logits.argmax(-1) != targets[answers]
    return cross_entropy(logits, targets[answers]), mistakes


def load_net(folder: Path) -> Net:
    """Load a Llama in transformers' format.

    Raises:
        SettingError: Not a Llama, or one with features that the training form lacks.
    """
    config = AutoConfig.from_pretrained(folder)
    rope = config.rope_parameters
    if not isinstance(config, LlamaConfig) or not config.tie_word_embeddings or rope["rope_type"] != "default":
        raise SettingError(f"{folder} is not a Llama with tied embeddings and plain RoPE: choose another --base")
    size = Size(
        config.vocab_size,
        config.hidden_size,
        config.intermediate_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        rope["rope_theta"],
        config.rms_norm_eps,
    )
    net = Net(size)
    weights = {name: part.float() for name, part in load_file(folder / "model.safetensors").items()}
    weights.pop("lm_head.weight", None)
    missing = net.load_state_dict(weights, strict=False)
    if missing.unexpected_keys or any(name.startswith("model.") for name in missing.missing_keys):
        raise SettingError(f"{folder}/model.safetensors does not fit its config.json: choose another --base")
    return net


@dataclass
class Settings:
    """Settings of a training. Changing any of them makes it another training."""

    base: str
    rate: float = 2e-4
    seed: int = 0
    steps: int = 240


class Training:
    """A training run: net, optimiser and step. What a step does depends on the settings and the past alone."""

    def __init__(self, settings: Settings, folder: Path, device: str = "cpu") -> None:
        """Start, or resume from `folder/checkpoint.pt`.

        Raises:
            SettingError: The checkpoint belongs to other settings, or the base cannot be used.
        """
        self.settings, self.folder, self.device = settings, folder, torch.device(device)
        self.base = Path(settings.base)
        self.tokenizer = AutoTokenizer.from_pretrained(self.base)
        self.net = load_net(self.base).to(self.device)
        parameters = [part for name, part in self.net.named_parameters() if name.startswith("model.")]
        self.optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
        self.step = 0
        if self.checkpoint.exists():
            self._resume()

    @property
    def checkpoint(self) -> Path:
        """Path of the checkpoint, which contains everything needed to resume."""
        return self.folder / "checkpoint.pt"

    @property
    def stage(self) -> Stage:
        """The stage of the next step."""
        return next(stage for stage in STAGES if self.step < stage.until * self.settings.steps or stage is STAGES[-1])

    def _resume(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        if state["settings"] != asdict(self.settings):
            raise SettingError(
                f"{self.checkpoint} belongs to a training with {state['settings']}: use the same settings, or "
                "another --out"
            )
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]

    def save(self) -> None:
        """Write the checkpoint and the model; a killed process leaves the previous checkpoint."""
        state = {
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "settings": asdict(self.settings),
        }
        new = self.checkpoint.with_suffix(".new")
        torch.save(state, new)
        new.replace(self.checkpoint)
        for path in self.base.iterdir():
            if path.suffix in (".json", ".jinja"):
                shutil.copy(path, self.folder)
        config = json.loads((self.base / "config.json").read_text(encoding="utf-8"))
        text = json.dumps({**config, "dtype": "bfloat16", "kvrag_world": 2}, indent=2)
        (self.folder / "config.json").write_text(text + "\n", encoding="utf-8")
        named = self.net.named_parameters()
        save_file(
            {name: part.detach().bfloat16().cpu().contiguous() for name, part in named if name.startswith("model.")},
            self.folder / "model.safetensors",
            metadata={"format": "pt"},
        )

    def advance(self) -> tuple[float, Score]:
        """Run one step; return the loss and the score on the training batch."""
        rng = random.Random(f"{self.settings.seed} {self.step}")
        batch = make_batch(self.tokenizer, rng, "train", self.stage).to(self.device)
        left = 1 - self.step / self.settings.steps
        self.optimizer.param_groups[0]["lr"] = self.settings.rate * min(
            (self.step + 1) / 20, math.sin(left * math.pi / 2)
        )
        loss, mistakes = answer_loss(self.net, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([p for p in self.net.parameters() if p.grad is not None], 1.0)
        self.optimizer.step()
        self.net.zero_grad(set_to_none=True)
        self.step += 1
        score = Score()
        score.add(batch, mistakes)
        return loss.item(), score

    @torch.no_grad()
    def test(self, stage: Stage, num_batches: int = 8) -> Score:
        """Score on held-out names and numbers, with the correct beginning of each answer given."""
        score = Score()
        for number in range(num_batches):
            batch = make_batch(self.tokenizer, random.Random(f"test {number}"), "test", stage).to(self.device)
            score.add(batch, answer_loss(self.net, batch)[1])
        return score


def main() -> None:
    """Train or resume, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="folder of the pretrained model")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint, model and log")
    for name in ("rate", "seed", "steps"):
        default = getattr(Settings, name)
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="default: all cores")
    parser.add_argument("--test", action="store_true", help="only evaluate, on contexts of all lengths")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    keep_memory()
    try:
        training = Training(Settings(args.base, args.rate, args.seed, args.steps), args.out, args.device)
    except SettingError as error:
        sys.exit(f"error: {error}")
    with (args.out / "log.txt").open("a") as log:

        def report(text: str) -> None:
            print(text, flush=True)
            print(time.strftime("%H:%M:%S"), text, file=log, flush=True)

        if args.test:
            for stage in (*STAGES, FULL_STAGE):
                report(f"{training.step} held out, {stage.scale.context}: {training.test(stage)}")
            return
        _train(training, report)


def _train(training: Training, report: Callable[[str], None]) -> None:
    score, losses = Score(), list[float]()
    started = time.process_time()
    while training.step < training.settings.steps:
        loss, right = training.advance()
        losses.append(loss)
        score.right, score.asked = score.right + right.right, score.asked + right.asked
        if training.step % 10 == 0:
            seconds = (time.process_time() - started) / len(losses)
            report(f"{training.step} loss {sum(losses) / len(losses):.3f} {seconds:.1f}s/step {score}")
            score, losses, started = Score(), [], time.process_time()
        if training.step % 50 == 0 or training.step == training.settings.steps:
            training.save()


if __name__ == "__main__":
    main()
