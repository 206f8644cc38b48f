"""The training loop: steps by the clock, checkpoints, and resuming."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapt_kvrag.differentiable import checkpointed, decoder_layers
from adapt_kvrag.distill import loss_of, teach
from adapt_kvrag.files import new_layers, read_tensors, write_tensors
from adapt_kvrag.lessons import Lessons
from kvrag import BlendConfig, KvragError, Model, ModelError, SettingError
from kvrag.ext import Adapter, Chunked, LowRank

CHECKPOINT = "checkpoint.safetensors"
_EVERY_S = 120.0  # between checkpoints
_WARM_UP = 20  # steps
_SMOOTHING = 0.95
_BLENDED_ENDS = 2  # prompts of a lesson whose tokens are recomputed


@dataclass(frozen=True)
class Course:
    """Settings of a training.

    Attributes:
        minutes: Duration of the training, without the measurements before and after it.
        rank: Rank of the change of each linear layer.
        rate: Highest learning rate; it rises during the first steps and falls to zero at the end.
        lessons: Lessons per step.
        tokens: Maximum length of the teacher's answers.
        blended: Share of the lessons in which the default policy recomputes its share of the tokens.
        seed: Seed of the lessons and of the initial weights.
    """

    minutes: float = 60.0
    rank: int = 16
    rate: float = 1e-3
    lessons: int = 2
    tokens: int = 4
    blended: float = 0.5
    seed: int = 0


Progress = Callable[[float, float, int, float], None]
"""Called with seconds done, seconds to do, the number of steps, and the smoothed loss in nats."""


def train(
    model: Model,
    lessons: Lessons,
    course: Course,
    folder: Path,
    identity: Mapping[str, Any],
    progress: Progress = lambda done, total, step, loss: None,
) -> dict[str, LowRank]:
    """Train an adapter for `course.minutes`, or go on from the checkpoint in `folder`.

    Args:
        identity: What the result depends on besides the course: model and documents, as JSON types.

    Raises:
        SettingError: The checkpoint is of another training.
        ModelError: The loss or its gradient is not finite.
        KvragError: A checkpoint cannot be written; the one before it is kept.
    """
    _check(model)
    training = _Training(model, course, folder / CHECKPOINT, identity)
    adapter, total = Adapter(model.hf, training.layers), 60 * course.minutes
    saved = time.perf_counter()
    progress(training.seconds, total, training.step, training.loss)
    try:
        with _frozen(model), checkpointed(decoder_layers(model) if model.device.type == "cuda" else []):
            while training.seconds < total:
                started = time.perf_counter()
                loss = _backward(model, adapter, lessons, course, training.step)
                warmed, left = min(1.0, (training.step + 1) / _WARM_UP), 1 - training.seconds / total
                training.update(loss, course.rate * warmed * left)
                training.seconds += time.perf_counter() - started
                progress(min(training.seconds, total), total, training.step, training.loss)
                if time.perf_counter() - saved >= _EVERY_S:
                    training.save()
                    saved = time.perf_counter()
    except BaseException:
        if training.step and math.isfinite(training.loss):
            training.save()
        raise
    training.save()
    return {name: LowRank(low.down.detach(), low.up.detach(), low.scale) for name, low in training.layers.items()}


def _backward(model: Model, adapter: Adapter, lessons: Lessons, course: Course, step: int) -> float:
    """Add the gradient of one step's lessons; return their mean loss."""
    loss = 0.0
    for number in range(step * course.lessons, (step + 1) * course.lessons):
        lesson, config = lessons.draw(number), None
        if number % 100 < 100 * course.blended:
            config = BlendConfig(controller="off")
            lesson = replace(lesson, ends=lesson.ends[:_BLENDED_ENDS])  # tokens are recomputed for each of them
        targets = teach(model, lesson, course.tokens)
        part = loss_of(model, adapter, lesson, targets, config) / course.lessons
        part.backward()  # type: ignore[no-untyped-call]
        loss += float(part.detach())
    return loss


@contextmanager
def _frozen(model: Model) -> Iterator[None]:
    """Compute no gradients of the model's own weights."""
    trainable = [parameter for parameter in model.hf.parameters() if parameter.requires_grad]
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


class _Training:
    """An adapter's weights, the state of its training, and the checkpoint of both. `loss` is smoothed."""

    def __init__(self, model: Model, course: Course, path: Path, identity: Mapping[str, Any]) -> None:
        self.step, self.seconds, self.loss = 0, 0.0, math.nan
        self.layers = new_layers(model.hf, course.rank, course.seed)
        self._parameters: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            self._parameters |= {f"{name}.down": layer.down, f"{name}.up": layer.up}
        self._optimiser = torch.optim.AdamW(self._parameters.values(), lr=course.rate, weight_decay=0.0)
        self._path, self._settings = path, json.loads(json.dumps({**asdict(course), **identity}))
        del self._settings["minutes"]  # a longer training goes on from a shorter one
        if path.exists():
            self._resume()

    def update(self, loss: float, rate: float) -> None:
        """Change the weights by their gradient, whose loss this is. Raises ModelError if either is not finite."""
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), 1.0))
        if not math.isfinite(loss + norm):  # before the weights change: the checkpoint stays good
            raise ModelError(
                f"the loss of step {self.step} is {loss} and its gradient {norm}: use dtype bfloat16, or a "
                "lower --rate with another --out"
            )
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        self._optimiser.step()
        self._optimiser.zero_grad()
        self.loss = loss if math.isnan(self.loss) else _SMOOTHING * self.loss + (1 - _SMOOTHING) * loss
        self.step += 1

    def save(self) -> None:
        tensors = {name: parameter.detach() for name, parameter in self._parameters.items()}
        for name, parameter in self._parameters.items():
            tensors |= {f"{name}.{key}": value for key, value in self._optimiser.state[parameter].items()}
        state = {"step": self.step, "seconds": self.seconds, "loss": self.loss}
        try:
            write_tensors(self._path, tensors, {"settings": self._settings, "state": state})
        except OSError as error:
            raise KvragError(f"cannot write {self._path}: {os.strerror(error.errno or 0)}") from error

    def _resume(self) -> None:
        tensors, content = read_tensors(self._path)
        different = [name for name in self._settings if content["settings"].get(name) != self._settings[name]]
        if different:
            raise SettingError(
                f"{self._path} is of another training (different: {', '.join(different)}): choose another --out, or "
                "delete it"
            )
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(tensors[name])
                # the last layer's output projection never has a gradient, so no state either
                if f"{name}.step" in tensors:
                    moments = {key: tensors[f"{name}.{key}"].to(parameter.device) for key in ("exp_avg", "exp_avg_sq")}
                    self._optimiser.state[parameter] = {"step": tensors[f"{name}.step"], **moments}
        self.step, self.seconds, self.loss = (content["state"][name] for name in ("step", "seconds", "loss"))


def _check(model: Model) -> None:
    if getattr(model.hf, "is_quantized", False):
        raise SettingError(
            "a quantised model cannot be adapted: load it in bfloat16; its adapter fits the quantised one"
        )
    if model.rope_follows_length:
        raise SettingError(f"{model.name} cannot be adapted: its RoPE frequencies depend on the prompt length")
    if model.is_latent or any(isinstance(window, Chunked) for window in model.windows):
        raise SettingError(f"{model.name} cannot be adapted: it has latents (MLA) or chunked attention")
    if model.keeps_states:
        raise SettingError(f"{model.name} cannot be adapted: some of its layers keep a state in place of KV")
