"""Train the reader: `python -m benchmarks.readers.first.train --out DIR`.

A Llama of five million parameters learns to answer questions about the synthetic world (`world`). The loss covers the
answers and, with smaller weights, the questions' own tokens and three auxiliary targets: the subject of a passage
(`Net.subject_logits`), the answer's first token (`Net.answer_logits`), and the attention of two heads (`pointers` of
`Net.forward`). The parameters of the first two targets are not saved. Contexts grow from one article to
26. An interrupted run resumes from `DIR/checkpoint.pt`. Needs torch 2.9 (for Muon). Reasons: benchmarks/notes/0009.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from benchmarks.readers.first.net import Net, Size
from benchmarks.readers.first.world import KINDS, ONSETS, Sample, draw, gather, sample
from benchmarks.readers.prompts import all_texts, prompt_parts
from kvrag.errors import SettingError

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if not loop.first %}{{ '\n\n' }}{% endif %}{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '\n\nAnswer:' }}{% endif %}"
)
WINDOW = 2048


@dataclass(frozen=True)
class Shape:
    """Shape of a batch: articles and maximum tokens per context, questions per context."""

    articles: tuple[int, int]
    rows: int
    context: int
    questions: int


LENGTH = 22  # maximum of a question with its answer
STAGES = (  # (share of the steps, shape) pairs: each stage lasts until that share
    (0.075, (Shape((1, 1), 12, 128, 12),)),
    (0.15, (Shape((1, 2), 12, 224, 12),)),
    (0.28, (Shape((2, 3), 12, 320, 12),)),
    (0.88, (Shape((3, 4), 10, 416, 22), Shape((4, 6), 8, 608, 24))),
    (1.00, (Shape((4, 6), 8, 608, 24), Shape((8, 20), 3, 1984, 24), Shape((20, 34), 3, 1984, 24))),
)
_SHORT = 6  # articles drawn as one context, whose values differ
ECHO = 0.3  # weight of the questions' own tokens, which teaches to complete names from the context
HINT = 0.5  # weight of each auxiliary target


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer on the world's words. Names are too rare to be tokens: they remain pairs of syllables."""
    rng = random.Random(seed)
    texts = all_texts() * 60
    for _ in range(1500):
        drawn = sample(rng, "train", 4)
        texts.append("\n\n".join(drawn.passages))
        texts += [f" {question.text}" for question in draw(rng, drawn.questions, 8)]
    # repeated often enough to make every syllable a token in any position
    texts += [text for onset in ONSETS for text in (onset, f" {onset}", f" {onset.lower()}")] * 400
    return build_tokenizer(texts, 1536, digits=2, window=WINDOW)


def build_tokenizer(texts: Sequence[str], vocab_size: int, digits: int, window: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on texts; at most `digits` digits form a token."""
    tokenizer = Tokenizer(models.BPE())
    pattern = rf"'[a-z]+| ?\p{{L}}+| ?\p{{N}}{{1,{digits}}}| ?[^\s\p{{L}}\p{{N}}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=40,
        special_tokens=[AddedToken(name, special=True) for name in (BOS, EOS, PAD)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=TEMPLATE,
        model_max_length=window,
        clean_up_tokenization_spaces=False,
    )


@dataclass
class Batch:
    """A batch, shapes as in `Net.forward`. Kinds are indices of `KINDS`, -1 without a question."""

    context: Tensor  # (B, C)
    lengths: Tensor  # (B,)
    questions: Tensor  # (B, Q, L)
    answers: Tensor  # (B, Q, L) bool, tokens of answers
    kinds: Tensor  # (B, Q)
    subjects: Tensor  # (B, C) first token of the name that the passage is about, -1 for none
    pointers: Tensor  # (4, P) row, token within its questions, index in POINTING, head
    places: Tensor  # (P, C) bool, target positions of the head's attention in the context
    padding: int

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        return replace(self, **{name: part.to(device) for name, part in vars(self).items() if name != "padding"})


def make_batch(tokenizer: PreTrainedTokenizerFast, rng: random.Random, split: str, shape: Shape) -> Batch:
    """Draw contexts that fit."""
    rows: list[_Row] = []
    num_articles = rng.randint(*shape.articles)
    while len(rows) < 2 * shape.rows:
        row = _make_row(tokenizer, rng, split, num_articles, shape.questions)
        if len(row.context) <= shape.context and row.branches:
            rows.append(row)
    # similar lengths, for little padding
    rows.sort(key=lambda row: len(row.context))
    rows = rows[: shape.rows] if rng.random() < 0.5 else rows[shape.rows :]
    step = 64 if shape.context < 1024 else 512  # every width is compiled
    width = -(-len(rows[-1].context) // step) * step
    batch = Batch(
        torch.full((shape.rows, width), tokenizer.pad_token_id),
        torch.tensor([len(row.context) for row in rows]),
        torch.full((shape.rows, shape.questions, LENGTH), tokenizer.pad_token_id),
        torch.zeros((shape.rows, shape.questions, LENGTH), dtype=torch.bool),
        torch.full((shape.rows, shape.questions), -1),
        torch.full((shape.rows, width), -1),
        *_pointers(rows, width),
        tokenizer.pad_token_id,
    )
    for number, row in enumerate(rows):
        batch.context[number, : len(row.context)] = torch.tensor(row.context)
        batch.subjects[number, : len(row.context)] = torch.tensor(row.subjects)
        for branch, (asks, answer, kind, _) in enumerate(row.branches):
            ids = torch.tensor(asks + answer)
            batch.questions[number, branch, : len(ids)] = ids
            batch.answers[number, branch, len(asks) : len(ids)] = True
            batch.kinds[number, branch] = kind
    return batch


@dataclass
class _Row:
    """A context and its questions: ids of the question and the answer, kind, position of the fact in the context."""

    context: list[int]
    subjects: list[int]
    branches: list[tuple[list[int], list[int], int, list[list[int]]]]


def _make_row(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, split: str, num_articles: int, num_questions: int
) -> _Row:
    drawn = (sample if num_articles <= _SHORT else gather)(rng, split, num_articles)
    questions = draw(rng, drawn.questions, num_questions)
    before, joint, after = prompt_parts(rng, drawn.passages)
    texts = [before]
    for question in questions:
        texts += [f"{joint}{question.text}{after}", f" {question.answer}"]
    encoded, *rest = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    branches = []
    for question, asks, answer in zip(questions, rest[::2], rest[1::2], strict=True):
        if len(asks.ids) + len(answer.ids) < LENGTH:
            facts = [_place(*fact, before, encoded.offsets) for fact in question.facts]
            branches.append((asks.ids, [*answer.ids, tokenizer.eos_token_id], KINDS.index(question.kind), facts))
    subjects = _subjects(tokenizer, drawn, before, encoded.offsets)
    return _Row([tokenizer.bos_token_id, *encoded.ids], [-1, *subjects], branches)


def _pointers(rows: Sequence[_Row], width: int) -> tuple[Tensor, Tensor]:
    """Return attention targets: the fact for a question's last tokens, the copied tokens for an answer's.

    Returns:
        `Batch.pointers` and `Batch.places`.
    """
    pointers: list[tuple[int, int, int, int]] = []
    places: list[list[int]] = []
    for number, row in enumerate(rows):
        for branch, (asks, answer, _, facts) in enumerate(row.branches):
            end = branch * LENGTH + len(asks)
            for depth, fact in enumerate((facts[0], facts[-1])):
                pointers += [(number, end - back, depth, 0) for back in (1, 2, 3)]
                places += [fact] * 3
            for num in range(2, len(answer)):
                pointers.append((number, end + num - 2, 1, 1))
                places.append(_copied(row.context, answer[:num]))
    targets = torch.zeros(len(places), width, dtype=torch.bool)
    for index, place in enumerate(places):
        targets[index, place] = True
    return torch.tensor(pointers).T, targets


def _copied(context: list[int], tokens: list[int]) -> list[int]:
    """Return the positions of the last token after the others."""
    first, num = tokens[0], len(tokens)
    return [
        at + num - 1
        for at in range(len(context) - num + 1)
        if context[at] == first and context[at : at + num] == tokens
    ]


def _place(value: str, sentence: str, text: str, offsets: list[tuple[int, int]]) -> list[int]:
    """Return the context tokens of the value in the sentence."""
    start = text.index(sentence) + sentence.rindex(value)
    return [number + 1 for number, (low, high) in enumerate(offsets) if high > start and low < start + len(value)]


def _subjects(
    tokenizer: PreTrainedTokenizerFast, drawn: Sample, text: str, offsets: list[tuple[int, int]]
) -> list[int]:
    """Return, per token, the first token of the name that its passage is about; -1 before the name is known."""
    labels, at, token = [-1] * len(offsets), 0, 0
    for passage, name in zip(drawn.passages, drawn.subjects, strict=True):
        start = text.index(passage, at)
        at = start + len(passage)
        if name:
            start += 0 if name in text[:start] else passage.index(name)
            first = tokenizer.backend_tokenizer.encode(f" {name}", add_special_tokens=False).ids[0]
            while offsets[token][1] <= start:
                token += 1
            while token < len(offsets) and offsets[token][1] <= at:
                labels[token] = first
                token += 1
    for sentence, name in drawn.defined:
        start = text.index(sentence)
        known, stop = start + sentence.index(name), start + len(sentence)
        first = tokenizer.backend_tokenizer.encode(f" {name}", add_special_tokens=False).ids[0]
        for token, (low, high) in enumerate(offsets):
            if high > known and low < stop:
                labels[token] = first
    return labels


@dataclass
class Predictions:
    """Predictions for N tokens of the questions, A of them in answers.

    Attributes:
        logits: (N, V) float32.
        targets: (N,) ids of the next tokens.
        numbers: (N,) index of the question.
        answers: (N,) bool, the next token belongs to an answer.
        subjects: (S, V) float32, predicted subjects of the labelled context tokens.
        early: (M, V) float32, the answer's first token as predicted at the questions' tokens.
        first: (M,) id of the answer's first token.
        looks: (P,) log-probability of the target positions in the heads' attention.
    """

    logits: Tensor
    targets: Tensor
    numbers: Tensor
    answers: Tensor
    subjects: Tensor
    early: Tensor
    first: Tensor
    looks: Tensor


def predict(net: Net, batch: Batch) -> Predictions:
    """Run the net on a batch."""
    hidden, half_way, looks = net(batch.context, batch.lengths, batch.questions, batch.pointers)
    follows = batch.questions[:, :, 1:] != batch.padding  # (B, Q, L - 1)
    numbers = torch.arange(batch.kinds.numel(), device=hidden.device).view(*batch.kinds.shape, 1).expand_as(follows)
    asking = (batch.questions != batch.padding) & ~batch.answers
    first = batch.answers.int().argmax(dim=2, keepdim=True)  # (B, Q, 1)
    return Predictions(
        net.logits(hidden[:, :, :-1][follows]),
        batch.questions[:, :, 1:][follows],
        numbers[follows],
        batch.answers[:, :, 1:][follows],
        net.subject_logits(half_way[batch.subjects >= 0]),
        net.answer_logits(hidden[asking]),
        batch.questions.gather(2, first).expand_as(asking)[asking],
        looks.masked_fill(~batch.places, -1e4).logsumexp(-1),
    )


class Score:
    """Share of questions with all tokens right, by kind."""

    def __init__(self) -> None:
        self.right, self.asked = torch.zeros(len(KINDS)), torch.zeros(len(KINDS))

    def add(self, batch: Batch, predictions: Predictions) -> None:
        """Count a batch."""
        wrong = torch.zeros(batch.kinds.numel(), device=predictions.logits.device)
        mistakes = (predictions.logits.argmax(-1) != predictions.targets) & predictions.answers
        wrong = wrong.index_add_(0, predictions.numbers, mistakes.float()).cpu()
        kinds = batch.kinds.flatten().cpu()
        asked = kinds >= 0
        self.asked += torch.bincount(kinds[asked], minlength=len(KINDS))
        self.right += torch.bincount(kinds[asked & (wrong == 0)], minlength=len(KINDS))

    def __add__(self, other: Score) -> Score:
        total = Score()
        total.right, total.asked = self.right + other.right, self.asked + other.asked
        return total

    def __str__(self) -> str:
        shares = (f"{k} {r / a:.2f}" for k, r, a in zip(KINDS, self.right, self.asked, strict=True) if a)
        return f"{self.right.sum() / self.asked.sum():.3f} ({', '.join(shares)})"


def optimizers(net: Net) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, AdamW for embeddings and norms."""
    matrices = [p for name, p in net.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in net.named_parameters() if p.ndim < 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def save(net: Net, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the model in transformers' format, in bfloat16; its window is the tokenizer's."""
    size = net.size
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        dtype="bfloat16",
        kvrag_world=1,
        rope_parameters={"rope_type": "default", "rope_theta": size.rope_theta},
        **{k: v for k, v in asdict(size).items() if k != "rope_theta"},
    )
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file(
        {name: p.detach().bfloat16().contiguous() for name, p in net.named_parameters() if name.startswith("model.")},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


@dataclass
class Settings:
    """Settings of a training. Changing any of them makes it another training."""

    steps: int = 3600
    rate: float = 3e-3
    seed: int = 0
    layers: int = Size.num_hidden_layers
    hidden: int = Size.hidden_size


class Training:
    """A training run: net, optimisers, step. Deterministic for given settings, device and number of threads."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        device: str = "cpu",
        compiled: bool = True,
        weights: Path | None = None,
    ) -> None:
        """Start, or resume from `folder/checkpoint.pt`.

        Args:
            weights: Folder of a trained reader to start from, in the last stage; None = random weights.

        Raises:
            SettingError: The checkpoint belongs to other settings.
        """
        self.settings, self.folder, self.device = settings, folder, torch.device(device)
        self.tokenizer = train_tokenizer(settings.seed)
        torch.manual_seed(settings.seed)
        size = Size(len(self.tokenizer), hidden_size=settings.hidden, num_hidden_layers=settings.layers)
        self.net = Net(size).to(self.device)
        self.optimizers = optimizers(self.net)
        self.step = 0
        if self.checkpoint.exists():
            self._resume()
        elif weights:
            trained = load_file(weights / "model.safetensors")
            self.net.load_state_dict({name: tensor.float() for name, tensor in trained.items()}, strict=False)
            self.step = round(STAGES[-2][0] * settings.steps)
        if compiled:
            torch._dynamo.config.cache_size_limit = 64  # one compiled layer per shape
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
        self.step = state["step"]

    def save(self) -> None:
        """Write the checkpoint and the model; a killed process leaves the previous checkpoint."""
        state = {
            "net": self.net.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "settings": asdict(self.settings),
        }
        new = self.checkpoint.with_suffix(".new")
        torch.save(state, new)
        new.replace(self.checkpoint)
        save(self.net, self.tokenizer, self.folder)

    def advance(self) -> tuple[dict[str, float], Score]:
        """Run one step; return the parts of the loss and the score on the training batch."""
        settings, step = self.settings, self.step
        shapes = next(shapes for until, shapes in STAGES if step < until * settings.steps)
        rng = random.Random(f"{settings.seed} {step}")  # depends on the step only: a resumed run sees the same batches
        batch = make_batch(self.tokenizer, rng, "train", shapes[step % len(shapes)]).to(self.device)
        # linear warm-up for 60 steps, constant until the middle, then linear decay
        rate = settings.rate * min(1, (step + 1) / 60, max(0.02, 2 * (1 - step / settings.steps)))
        for optimizer, factor in zip(self.optimizers, (1, 2), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = factor * rate
        predictions = predict(self.net, batch)
        losses = cross_entropy(predictions.logits, predictions.targets, reduction="none")
        loss, echo = losses[predictions.answers].mean(), losses[~predictions.answers].mean()
        hint = cross_entropy(predictions.subjects, batch.subjects[batch.subjects >= 0])
        hint = hint + cross_entropy(predictions.early, predictions.first)
        point = -predictions.looks.mean()
        (loss + ECHO * echo + HINT * (hint + point)).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.net.zero_grad(set_to_none=True)
        self.step += 1
        score = Score()
        score.add(batch, predictions)
        parts = {"loss": loss, "echo": echo, "hint": hint, "point": point}
        return {name: part.item() for name, part in parts.items()}, score

    @torch.no_grad()
    def test(self, num_batches: int = 8) -> list[Score]:
        """Score on held-out names, values and wordings, in contexts of every shape of the last stage."""
        scores = []
        for shape in STAGES[-1][1]:
            scores.append(score := Score())
            for number in range(num_batches):
                batch = make_batch(self.tokenizer, random.Random(f"test {number}"), "test", shape).to(self.device)
                score.add(batch, predict(self.net, batch))
        return scores


def main() -> None:
    """Train or resume, and report."""
    defaults = Settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint and the model")
    parser.add_argument("--steps", type=int, default=defaults.steps, help=f"default: {defaults.steps}")
    parser.add_argument("--rate", type=float, default=defaults.rate, help=f"learning rate (default: {defaults.rate})")
    parser.add_argument(
        "--from", type=Path, dest="weights", metavar="FOLDER", help="folder of a trained reader to start from"
    )
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="number of threads (default: all cores)"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)  # vanishing activations would slow the CPU down
    keep_memory()
    try:
        settings = Settings(args.steps, args.rate, args.seed)
        training = Training(settings, args.out, args.device, weights=args.weights)
    except SettingError as error:
        sys.exit(f"error: {error}")
    score = Score()
    losses: list[float] = []
    with tqdm(total=args.steps, initial=training.step, unit="step", dynamic_ncols=True) as bar:
        while training.step < args.steps:
            parts, right = training.advance()
            score, losses = score + right, [*losses, parts.pop("loss")]
            bar.update()
            if training.step % 25 == 0:
                others = " ".join(f"{name} {value:.3f}" for name, value in parts.items())
                bar.write(f"{training.step} loss {sum(losses) / len(losses):.3f} {others} {score}")
                score, losses = Score(), []
            if training.step % 100 == 0 or training.step == args.steps:
                training.save()
                bar.write("\n".join(f"{training.step} held out {score}" for score in training.test()))


def keep_memory() -> None:
    """Make glibc keep freed memory: fresh pages for every step's activations cost a tenth of the time."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            libc.mallopt(option, 2**31 - 1)


if __name__ == "__main__":
    main()
