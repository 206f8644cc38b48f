"""Evidence beyond what answers give: comparisons with full prefill, on answers when idle, and on prompts of the corpus.

Full prefill gives its tokens; blended KV is given the same ones, and asked for the likeliest at each. A token is *lost*
if full prefill surely decides otherwise, and an answer is *kept* if no token of it is. A token is decided if full
prefill's two likeliest differ by at least a nat: near ties, such as the first words of many answers, are resolved by
rounding. So answers are checked that no doubt announced as wrong, and starts that the model does not begin with.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kvrag.backend.transformers import Model
from kvrag.config import DEFAULT_POLICY, BlendConfig, Sampling
from kvrag.control.evidence import STARTS, Evidence, rung, scaled, tally
from kvrag.control.plan import Planner
from kvrag.errors import AbandonedError, ModelError
from kvrag.generate.decode import Row, decode
from kvrag.listen.listener import Answered, Listener, Prefill
from kvrag.request import Request
from kvrag.reuse.blend import LateRecompute
from kvrag.scheduling.waiting import Idle
from kvrag.types import CheckStats

FEW = 20
"""Answers of a namespace that are all checked, before only a share of them is."""

DECIDED = 1.0
"""Nats by which full prefill's likeliest token of a decided position is more likely than the next one."""
TOKENS = 32
"""Tokens of an answer that are compared by default."""
END = -1
"""Stands for every end token."""

_FULL = BlendConfig(policy="full", controller="off")
_GREEDY = Sampling(temperature=0.0)


def is_kept(agrees: Iterable[bool], margins: Iterable[float]) -> bool:
    """Return whether no decided token changed, by the tokens that agree and full prefill's margins."""
    return all(same or margin < DECIDED for same, margin in zip(agrees, margins, strict=True))


def own_answer(model: Model, prefilled: Request, sampling: Sampling) -> tuple[list[int], str]:
    """Return the tokens of the greedy answer, with `END` for an end token, and its text."""
    deltas = list(decode(Row(model, prefilled.ids, prefilled.cache, prefilled.logits, sampling)))
    tokens = [token for delta in deltas for token in delta.token_ids]
    if not deltas[-1].token_ids:
        tokens.append(END)
    return tokens, "".join(delta.text for delta in deltas)


def likeliest(
    model: Model, prefilled: Request, answer: Sequence[int], sampling: Sampling, ends_are_sure: bool = False
) -> tuple[list[int], list[float]]:
    """Return the likeliest token at each position of the answer, with the answer as input, and its margin.

    Args:
        ends_are_sure: The margin between an end token and another one is infinite, as for answers in progress.

    Raises:
        ModelError: Logits are NaN.
    """
    logits, given = prefilled.logits, torch.tensor([answer[:-1]], dtype=torch.long)
    if len(answer) > 1:
        logits = torch.cat([logits, model.forward_all(given, prefilled.cache)[0]])  # (S, V)
    if torch.isnan(logits).any():
        raise ModelError("the model's logits are NaN: a value overflowed; load it with dtype='bfloat16' or 'float32'")
    length = len(prefilled.ids)
    ids = torch.cat([prefilled.ids[None], given], dim=1).to(logits.device)
    process, _ = model.logits_processor(sampling, length)
    scores = [process(ids[:, : length + at], logits[at : at + 1]) for at in range(len(answer))]
    best = torch.cat(scores).topk(2)
    tokens = [[END if token in model.eos_ids else token for token in pair] for pair in best.indices.tolist()]
    margins = (best.values[:, 0] - best.values[:, 1]).tolist()
    if ends_are_sure:
        margins = [math.inf if END in pair else margin for pair, margin in zip(tokens, margins, strict=True)]
    return [first for first, _ in tokens], margins


@dataclass(frozen=True)
class Reference:
    """Full prefill's verdict on an answer: its likeliest token at each position, and that one's margin."""

    ids: Sequence[int]  # of the prompt
    namespace: str
    answer: Sequence[int]  # with `END` for an end token
    tokens: Sequence[int]
    margins: Sequence[float]


def measure(
    model: Model, prefill: Prefill, evidence: Evidence, full: Reference, starts: Iterable[float]
) -> Iterator[float]:
    """Compare starts, and what deepens them, with full prefill on an answer; yield each start once it is counted."""
    policy = _policy(model)

    def count(request: Request, is_deepened: bool) -> None:
        tokens, margins = likeliest(model, request, full.answer, _GREEDY, ends_are_sure=True)
        ours = [scaled(number, margin) for number, margin in enumerate(margins)]
        others = zip(tokens, full.tokens, full.margins, strict=True)
        lost = [one != other and margin >= DECIDED for one, other, margin in others]
        name = rung(policy, start, is_deepened, request.is_encoded_alone)
        evidence.add(name, tally(ours, zip(ours, lost, strict=True)))

    for start in starts:
        request = Request(full.ids, BlendConfig(policy=policy, ratio=start, controller="off"), full.namespace)
        prefill(request)
        if len(request.inexact):
            count(request, False)
            late = LateRecompute(model, request)
            if late.can_deepen:
                request.logits = late.recompute(request.ids, 0)
                count(request, True)
        yield start


def _policy(model: Model) -> str:
    return (*model.policies, DEFAULT_POLICY)[0]


def _refer(model: Model, prefill: Prefill, ids: Sequence[int], namespace: str, answer: Sequence[int] = ()) -> Reference:
    """Return full prefill's verdict on an answer, by default its own."""
    full = Request(ids, _FULL, namespace)
    prefill(full)
    if not answer:
        answer, _ = own_answer(model, full, Sampling(TOKENS, temperature=0.0))
        full.cache.set_length(len(ids))
    return Reference(ids, namespace, answer, *likeliest(model, full, answer, _GREEDY))


def observe(model: Model, evidence: Evidence, request: Request, tokens: int) -> None:
    """Count the tokens of a complete answer that blended KV has decided, and what became of its doubts."""
    done = request.late
    if done is None:
        return
    for is_deepened in (False, True):
        seen = [scaled(token, margin) for token, margin in done.seen[is_deepened]]
        judged = [
            (scaled(token, margin), changes and after >= DECIDED)
            for was_deepened, token, margin, changes, after in done.judged
            if was_deepened == is_deepened
        ]
        if seen:
            evidence.add(rung(_policy(model), done.start, is_deepened, request.is_encoded_alone), tally(seen, judged))
    is_open = done.deepened is not None and done.may_complete
    evidence.count(answers=1, tokens=tokens, deepened=is_open, completed=is_open and done.completed is not None)


def self_test(
    model: Model, prefill: Prefill, evidence: Evidence, prompts: Sequence[Sequence[int]], namespace: str
) -> Iterator[float]:
    """Measure all starts on prompts, token ids; yield once each measured prefill is done."""
    for ids in prompts:
        full = _refer(model, prefill, ids, namespace)
        evidence.count(answers=1, tokens=len(full.answer))
        yield 1.0
        yield from measure(model, prefill, evidence, full, STARTS)


class Checker(Listener):
    """Counts what answers tell of how much recompute the model needs, and checks some of them when idle."""

    name = "checked"

    def __init__(self, model: Model, planner: Planner, share: float, idle: Idle) -> None:
        """Start without answers.

        Args:
            share: Of the answers that can be checked, once a few are.
        """
        self._model, self._planner, self._share, self._idle = model, planner, share, idle
        self._random = random.Random(0)
        self._failed: Counter[str] = Counter()  # by namespace

    def answered(self, answer: Answered) -> None:
        """Count an answer, and perhaps check it later, unless it is sampled, or nothing is to be learned from it."""
        request, sampling = answer.request, answer.sampling
        if self._planner.learns(request.config):
            observe(self._model, self._planner.evidence[request.namespace], request, len(answer.tokens))
        self._planner.keep_now_and_then()
        is_changed = sampling.frequency_penalty or sampling.presence_penalty or sampling.logit_bias
        if answer.has_grammar or is_changed or not self._planner.learns(request.config) or not request.chunks:
            return
        if self._model.logits_processor(sampling, len(request.ids))[1]:
            return
        is_counted = request.late is not None
        few = self._planner.evidence[request.namespace].answers.answers < FEW + is_counted
        if self._share <= 0 or (self._random.random() >= self._share and not few):
            return
        tokens = [*answer.tokens, *[END] * answer.is_ended][:TOKENS]
        self._idle.add(request, partial(self._check, request, tokens, request.is_exact, is_counted, answer.prefill))

    def stats(self, namespace: str | None) -> CheckStats:
        """See `Listener`."""
        names = tuple({"": None, **self._planner.evidence}) if namespace is None else (namespace,)
        found = [self._planner.evidence[name].answers for name in names]
        failed = sum(self._failed[name] for name in names)
        compared, kept = sum(one.compared for one in found), sum(one.kept for one in found)
        verdict = self._planner.verdict(names[0]) if len(names) == 1 else ""
        return CheckStats(round(compared), round(kept), failed, verdict)

    def _check(
        self, request: Request, answer: Sequence[int], is_exact: bool, is_counted: bool, prefill: Prefill
    ) -> None:
        evidence = self._planner.evidence[request.namespace]
        try:
            full = _refer(self._model, prefill, request.ids.tolist(), request.namespace, answer)
            starts = {self._planner.plan(request.config, request.namespace).start, self._random.choice(STARTS)}
            for _ in measure(self._model, prefill, evidence, full, starts):
                pass
        except AbandonedError:
            raise
        except Exception:
            self._failed[request.namespace] += 1
            raise
        if not is_counted:  # by full prefill, but starts were measured
            evidence.count(answers=1, tokens=len(answer))
        if not is_exact:
            agrees = [one == other for one, other in zip(full.tokens, answer, strict=True)]
            evidence.count(compared=1, kept=is_kept(agrees, full.margins))
