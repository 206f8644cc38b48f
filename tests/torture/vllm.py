"""vLLM with the connector: preemption, aborts, damaged chunks, restarts. Exact answers are vLLM's own without it.

A case warms a few documents of its own, may damage their files, and then runs several requests at once with so few
pages that vLLM preempts some of them. Requests with `ratio=1.0` and with `mode="off"` are compared; the others are
there to fill pages with KV that is not exact. Some requests are aborted, and now and then the engine is restarted in
between.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vllm_environment  # noqa: F401

from torture.campaign import Campaign
from torture.damage import damage_chunk

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"  # it warns about much at each start

TOKENS = 60
"""Length of the answers: so many pages that requests running together do not fit."""

SIZES: dict[str, Any] = {
    "block_size": 32,
    "max_model_len": 1024,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 36,
    "max_num_seqs": 8,
}
_TEXTS = 6
_PER_ENGINE = 25  # cases; then it is restarted, sometimes with requests in flight
_NEAR = 1e-4  # of log-probabilities: rounding


def run(campaign: Campaign) -> None:
    """Run the requests of one case after the other in one engine."""
    from vllm import __version__
    from vllm_engines import checkpoint

    folder = campaign.folder
    model = checkpoint("llama", folder)
    engines = _Engines(model, folder / "kv")
    counts = {"answers compared": 0, "tokens reused": 0, "preempted": 0, "aborted": 0, "engines": 0}
    with _alone(model) as alone, engines:
        for number in campaign.numbers():
            rng = campaign.random(number)
            ram_bytes = rng.choice([0, 0, 1 << 30])
            with campaign.case(number):
                if number % _PER_ENGINE == 0 or engines.engine is None:
                    engines.start(ram_bytes)
                    counts["engines"] += 1
                try:
                    _Case(rng, number, engines, alone, counts, campaign.kinds).run()
                except BaseException:
                    engines.stop()  # its leftovers would make other cases fail
                    raise
        campaign.result.figures |= counts | {"vLLM": __version__}


class _Engines:
    """One engine at a time, with the connector, in this process."""

    def __init__(self, model: Path, store: Path) -> None:
        self._model, self.store = model, store
        self.engine: Any = None
        self.preempted = 0

    def __enter__(self) -> _Engines:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, ram_bytes: int) -> None:
        from vllm_engines import started

        self.stop()
        self._stack = ExitStack()
        self.engine = self._stack.enter_context(started(self._model, self.store, {"ram_bytes": ram_bytes}, **SIZES))
        scheduler = self.engine.scheduler
        preempt = scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.preempted += 1
            return preempt(*args, **kwargs)

        scheduler._preempt_request = counted
        self.free_blocks = self.engine.free_blocks

    def stop(self) -> None:
        if self.engine is not None:
            self.engine = None
            self._stack.close()

    def check_nothing_is_left(self) -> None:
        """No request, no job, and all pages free."""
        engine = self.engine
        engine.drain()
        assert engine.free_blocks == self.free_blocks, f"{self.free_blocks - engine.free_blocks} pages are not free"
        assert not engine.jobs(), "jobs are left"
        assert not engine.connector._blocks, "pages of tasks are left"
        assert not engine.scheduler.connector._tracker._requests, "requests are left in the connector"


@dataclass
class _Request:
    given: dict[str, Any]
    steps: int  # until it is aborted; 0 = never


class _Case:
    """The requests of one case."""

    def __init__(
        self,
        rng: random.Random,
        number: int,
        engines: _Engines,
        alone: Callable[[list[list[int]]], list[Any]],
        counts: dict[str, int],
        kinds: Any,
    ) -> None:
        from vllm_engines import text_of

        self.rng, self.number, self.engines, self.alone = rng, number, engines, alone
        self.counts, self.kinds = counts, kinds
        self.texts = [text_of(1000 + _TEXTS * number + i, rng.randint(3, 9)) for i in range(_TEXTS)]
        self.document = f"d{number}"

    def run(self) -> None:
        rng, engines = self.rng, self.engines
        before = engines.preempted
        stored = self._warm()
        if rng.random() < 0.5:
            for path in rng.sample(sorted(stored), rng.randint(1, min(3, len(stored)))):
                self.kinds[damage_chunk(rng, path).split(" at ")[0]] += 1
        if rng.random() < 0.1:
            self._restart_amid_requests()
        flying = {self._submit(request): request for request in map(self._request, range(rng.randint(3, 8)))}
        self._wait(flying)
        engines.check_nothing_is_left()
        self._compare(flying)
        self.counts["preempted"] += engines.preempted - before
        if rng.random() < 0.3:
            engines.engine.ask("x", mode="forget", document=self.document)

    def _warm(self) -> set[Path]:
        """Warm the documents; return the added chunk files."""
        before = self._files()
        report = self.engines.engine.warm(self.texts[: self.rng.randint(3, _TEXTS)], document=self.document)
        assert report.get("new"), f"warming failed: {report}"
        return self._files() - before

    def _files(self) -> set[Path]:
        return {*self.engines.store.glob("chunks/*/*.safetensors")}

    def _request(self, number: int) -> _Request:
        rng = self.rng
        kind = rng.choice(["exact"] * 4 + ["off", "blend", "blend", "warm"])
        given: dict[str, dict[str, Any]] = {
            "exact": {"ratio": 1.0, "policy": rng.choice(["query", "hkvd", "first_k"])},
            "off": {"mode": "off"},
            "blend": {"ratio": rng.choice([0.0, 0.15, 0.5]), "policy": rng.choice(["query", "hkvd", "first_k"])},
            "warm": {"mode": "warm", "document": f"{self.document}.{number}", "texts": rng.sample(self.texts, 2)},
        }
        self.kinds[kind] += 1
        return _Request(given[kind], rng.choice([0, 0, 0, rng.randint(1, 60)]))

    def _submit(self, request: _Request) -> str:
        from vllm_engines import prompt_of

        rng = self.rng
        chunks = rng.sample(self.texts, rng.randint(1, 4))
        prompt = prompt_of(*chunks, question=f"Question {rng.randrange(3)}: who plays the harp?\nAnswer:")
        name: str = self.engines.engine.submit(prompt, TOKENS, {"kvrag": request.given}, logprobs=5)
        return name

    def _wait(self, flying: dict[str, _Request]) -> None:
        engine, steps, left = self.engines.engine, 0, set(flying)
        while left:
            engine.step()
            steps += 1
            assert steps < 20_000, f"{len(left)} requests do not end"
            for name in [*left]:
                if name in engine.answers:
                    left.remove(name)
                elif flying[name].steps == steps:
                    engine.abort(name)
                    self.counts["aborted"] += 1
                    left.remove(name)

    def _restart_amid_requests(self) -> None:
        """Stop the engine while it blends, encodes and decodes, and start another one on the same store."""
        for number in range(4):
            self._submit(self._request(number))
        for _ in range(self.rng.randrange(12)):
            self.engines.engine.step()
        self.engines.start(ram_bytes=0)
        self.counts["engines"] += 1

    def _compare(self, flying: dict[str, _Request]) -> None:
        answers = self.engines.engine.answers
        exact = [
            answers.pop(name)
            for name, request in flying.items()
            if name in answers and (request.given.get("ratio") == 1.0 or request.given.get("mode") == "off")
        ]
        answers.clear()
        for answer, wanted in zip(exact, self.alone([answer.ids for answer in exact]), strict=True):
            self.counts["answers compared"] += 1
            self.counts["tokens reused"] += (answer.report or {}).get("reused_tokens", 0)
            check_first(answer.logprobs, wanted[0])
            check_tokens(answer.tokens, wanted)


def check_first(logprobs: Any, wanted: list[tuple[int, float]]) -> None:
    """Raise AssertionError unless the first token's log-probabilities are as expected, up to rounding."""
    off = [abs(float(logprobs[token]) - logprob) for token, logprob in wanted]
    # the fifth may be another one
    assert max(off[:4]) < _NEAR, f"log-probabilities differ by {max(off[:4]):.2g} from vLLM's own"


def check_tokens(tokens: list[int], wanted: list[list[tuple[int, float]]]) -> None:
    """Raise AssertionError unless these are the best tokens of each step, or differ where rounding decides."""
    for place, (token, best) in enumerate(zip(tokens, wanted, strict=True)):
        if token == best[0][0]:
            continue
        behind = best[0][1] - dict(map(tuple, best)).get(token, float("-inf"))  # type: ignore[arg-type]
        assert behind < _NEAR, f"token {place} differs from vLLM's own, by {behind:.2g}"
        return  # after another token, everything may differ


@contextmanager
def _alone(model: Path) -> Iterator[Callable[[list[list[int]]], list[Any]]]:
    """vLLM without the connector, in a process of its own; yields the function that answers."""
    command = [sys.executable, "-m", "torture.vllm_alone", str(model)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def answer(prompts: list[list[int]]) -> list[Any]:
            stdin.write(json.dumps(prompts) + "\n")
            stdin.flush()
            line = stdout.readline()
            assert line, "vLLM without the connector has ended"
            return list(json.loads(line))

        try:
            assert stdout.readline() == "ready\n", "vLLM without the connector does not start"
            yield answer
        finally:
            stdin.close()
            process.terminate()
