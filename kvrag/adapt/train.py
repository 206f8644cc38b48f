"""The training loop: steps by the clock, checkpoints, and resuming."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvrag.adapt.differentiable import checkpointed, decoder_layers
from kvrag.adapt.distill import loss_of, teach
from kvrag.adapt.files import new_layers, read_tensors, write_tensors
from kvrag.adapt.lessons import Lessons
from kvrag.backend.attention import Chunked
from kvrag.backend.transformers.adapter import Adapter, LowRank
from kvrag.backend.transformers.model import Model
from kvrag.config import BlendConfig
from kvrag.errors import KvragError, ModelError, SettingError

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


@dataclass
class _State:
    """Content of a checkpoint besides tensors."""

    step: int = 0
    seconds: float = 0.0
    loss: float = math.nan


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
    layers = new_layers(model.hf, course.rank, course.seed)
    adapter = Adapter(model.hf, layers)
    parameters = [part for layer in layers.values() for part in (layer.down, layer.up)]
    optimiser = torch.optim.AdamW(parameters, lr=course.rate, weight_decay=0.0)
    path, settings = folder / CHECKPOINT, json.loads(json.dumps({**asdict(course), **identity}))
    del settings["minutes"]  # a longer training goes on from a shorter one
    state = _resume(path, settings, layers, optimiser) if path.exists() else _State()
    progress(state.seconds, 60 * course.minutes, state.step, state.loss)
    total, saved, config = 60 * course.minutes, time.perf_counter(), BlendConfig(controller="off")
    wrapped = decoder_layers(model) if model.device.type == "cuda" else []
    frozen = [parameter for parameter in model.hf.parameters() if parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        with checkpointed(wrapped):
            while state.seconds < total:
                started = time.perf_counter()
                for group in optimiser.param_groups:
                    warmed, left = min(1.0, (state.step + 1) / _WARM_UP), 1 - state.seconds / total
                    group["lr"] = course.rate * warmed * left
                loss = 0.0
                for number in range(course.lessons):
                    lesson = lessons.draw(state.step * course.lessons + number)
                    is_blended = (state.step * course.lessons + number) % 100 < 100 * course.blended
                    if is_blended:  # its tokens are recomputed for each prompt
                        lesson = replace(lesson, ends=lesson.ends[:_BLENDED_ENDS])
                    targets = teach(model, lesson, course.tokens)
                    part = loss_of(model, adapter, lesson, targets, config if is_blended else None) / course.lessons
                    part.backward()  # type: ignore[no-untyped-call]
                    loss += float(part.detach())
                norm = float(torch.nn.utils.clip_grad_norm_(parameters, 1.0))
                if not math.isfinite(loss + norm):  # before the weights change: the checkpoint stays good
                    raise ModelError(
                        f"the loss of step {state.step} is {loss} and its gradient {norm}: use dtype bfloat16, or a "
                        "lower --rate with another --out"
                    )
                optimiser.step()
                optimiser.zero_grad()
                state.loss = loss if math.isnan(state.loss) else _SMOOTHING * state.loss + (1 - _SMOOTHING) * loss
                state.step += 1
                state.seconds += time.perf_counter() - started
                progress(min(state.seconds, total), total, state.step, state.loss)
                if time.perf_counter() - saved >= _EVERY_S:
                    _save(path, settings, state, layers, optimiser)
                    saved = time.perf_counter()
    except BaseException:
        if state.step and math.isfinite(state.loss):
            _save(path, settings, state, layers, optimiser)
        raise
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
    _save(path, settings, state, layers, optimiser)
    return {name: LowRank(layer.down.detach(), layer.up.detach(), layer.scale) for name, layer in layers.items()}


def _check(model: Model) -> None:
    if getattr(model.hf, "is_quantized", False):
        raise SettingError(
            "a quantised model cannot be adapted: load it in bfloat16; its adapter fits the quantised one"
        )
    if model.rope_follows_length:
        raise SettingError(f"{model.name} cannot be adapted: its RoPE frequencies depend on the prompt length")
    if model.is_latent or any(isinstance(window, Chunked) for window in model.windows):
        raise SettingError(f"{model.name} cannot be adapted: it has latents (MLA) or chunked attention")


def _tensors(layers: Mapping[str, LowRank], optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return all tensors of a training by name; they are the training's own memory."""
    tensors = {}
    for name, layer in layers.items():
        for part, parameter in (("down", layer.down), ("up", layer.up)):
            tensors[f"{name}.{part}"] = parameter.detach()
            for key, value in optimiser.state[parameter].items():
                tensors[f"{name}.{part}.{key}"] = value
    return tensors


def _save(
    path: Path, settings: dict[str, Any], state: _State, layers: Mapping[str, LowRank], optimiser: torch.optim.Optimizer
) -> None:
    try:
        write_tensors(path, _tensors(layers, optimiser), {"settings": settings, "state": asdict(state)})
    except OSError as error:
        raise KvragError(f"cannot write {path}: {os.strerror(error.errno or 0)}") from error


def _resume(
    path: Path, settings: dict[str, Any], layers: Mapping[str, LowRank], optimiser: torch.optim.Optimizer
) -> _State:
    tensors, content = read_tensors(path)
    different = [name for name in settings if content["settings"].get(name) != settings[name]]
    if different:
        raise SettingError(
            f"{path} is of another training (different: {', '.join(different)}): choose another --out, or delete it"
        )
    with torch.no_grad():
        for name, layer in layers.items():
            for part, parameter in (("down", layer.down), ("up", layer.up)):
                prefix = f"{name}.{part}"
                parameter.copy_(tensors.pop(prefix))
                # the last layer's output projection never has a gradient, so no state either
                keys = ("step", "exp_avg", "exp_avg_sq") if f"{prefix}.step" in tensors else ()
                kept = {key: tensors[f"{prefix}.{key}"] for key in keys}
                optimiser.state[parameter] = {
                    key: value if key == "step" else value.to(parameter.device) for key, value in kept.items()
                }
    return _State(**content["state"])
