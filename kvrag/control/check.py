"""Checked answers: a share of them is compared with full prefill when the engine is idle, and the margin follows.

Full prefill is given the tokens that were answered. An answer is kept if each is the likeliest one there, too, or
full prefill itself is undecided, as in `kvrag.control.agreement`. Of a prompt that was checked, only counts are left.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from functools import partial

from kvrag.backend.transformers import Model
from kvrag.config import BlendConfig, Sampling
from kvrag.control.agreement import END, TARGET, TOKENS, is_kept, likeliest
from kvrag.control.calibrate import MARGIN
from kvrag.control.counts import Counts
from kvrag.control.tuning import Tuning
from kvrag.errors import AbandonedError
from kvrag.reuse.request_state import RequestState
from kvrag.scheduling.idle import Idle
from kvrag.types import CheckStats

WINDOW = 200
"""Answers, the latest ones, that the report and the margin are about."""
ENOUGH = 50
"""Checked answers before the margin falls."""
UP, DOWN = 1.1, 1 / 1.02
"""The margin's factor per lost answer while too few are kept, and per checked answer while enough are."""

_FULL = BlendConfig(policy="full", controller="off")


class Checker:
    """Checks answers, and keeps a factor of the margin for every namespace. Thread-safe."""

    def __init__(
        self, model: Model, tuning: Tuning, share: float, prefill: Callable[[RequestState], None], idle: Idle
    ) -> None:
        """Start without answers.

        Args:
            share: Of the answers that can be checked.
            prefill: Prefills a request.
        """
        self._model, self._tuning, self._share, self._prefill, self._idle = model, tuning, share, prefill, idle
        self._random = random.Random(0)
        self._counts, self._counting = tuning.counts, threading.Lock()

    def observe(self, request: RequestState, sampling: Sampling, answer: Sequence[int], is_ended: bool) -> None:
        """Perhaps check a complete answer later, unless it is sampled, exact or at a given ratio.

        Args:
            answer: Its tokens, chosen without a grammar.
            is_ended: An end token came after them.
        """
        config, is_changed = request.config, sampling.frequency_penalty or sampling.presence_penalty
        is_adaptive = config.ratio is None and config.policy != "none"
        if not is_adaptive or config.deterministic or request.report.exact:
            return
        if is_changed or sampling.logit_bias or self._random.random() >= self._share:
            return
        if self._model.logits_processor(sampling, len(request.ids))[1]:
            return
        with self._counting:
            self._counts[request.namespace].chosen += 1
        tokens = [*answer, *[END] * is_ended][:TOKENS]
        self._idle.add(request, partial(self._check, request, sampling, tokens))

    def factor(self, request: RequestState) -> float:
        """Return the factor of the margin for a request."""
        return 1.0 if request.config.deterministic else self._counts[request.namespace].factor

    def stats(self, namespace: str | None = None) -> CheckStats:
        """Return the counts of a namespace; None = of all, with the largest factor."""
        with self._counting:
            found = tuple(self._counts.values()) if namespace is None else (self._counts[namespace],)
            names = ("chosen", "kept", "lost", "failed")
            return CheckStats(
                last=sum(len(counts.last) for counts in found),
                last_kept=sum(counts.last.count("1") for counts in found),
                margin_factor=max((counts.factor for counts in found), default=1.0),
                **{name: sum(getattr(counts, name) for counts in found) for name in names},
            )

    def _check(self, request: RequestState, sampling: Sampling, answer: Sequence[int]) -> None:
        full = RequestState(request.token_ids, _FULL, request.namespace)
        try:
            self._prefill(full)
            tokens, margins = likeliest(self._model, full, answer, sampling)
        except AbandonedError:
            raise
        except Exception:
            with self._counting:
                self._counts[request.namespace].failed += 1
            raise
        self._count(request, is_kept([one == other for one, other in zip(tokens, answer, strict=True)], margins))

    def _count(self, request: RequestState, is_kept: bool) -> None:
        planned = self._tuning.plan(request.config).margin
        with self._counting:
            counts = self._counts[request.namespace]
            counts.last = f"{counts.last}{is_kept:d}"[-WINDOW:]
            counts.kept += is_kept
            counts.lost += not is_kept
            if request.config.margin is None:
                factor = counts.factor * _step(counts)
                least = 0.0 if planned else 1.0  # at a fixed ratio, a calibration's, there is no margin to lower
                margin = self._tuning.plan(request.config, max(factor, least)).margin
                counts.factor = max(margin / (planned or MARGIN), least)


def _step(counts: Counts) -> float:
    """Return the factor by which the margin changes after the last answer."""
    if counts.last.count("1") >= TARGET * len(counts.last):
        return DOWN if len(counts.last) >= ENOUGH else 1.0
    return 1.0 if counts.last.endswith("1") else UP
