"""Trial of decision 32: recompute until the model is sure, inside vLLM's worker. Not part of kvrag.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 PYTHONPATH=.:integrations/vllm-kvrag .venv-vllm/bin/python \\
        -m benchmarks.speed.vllm_unsure [--way discard] [--asynchronous] [--at 3] [--model FOLDER]

A blended request counts as unsure at one token of its answer. Its prompt is then completed in one of two ways:

- `replace`: a logits processor recomputes the inexact rows before the token is drawn, and replaces the row of logits.
- `discard`: the worker reports the request's pages as failed loads. vLLM drops the token and prefills them again.

Printed are whether the rest of the answer is full prefill's, and CPU seconds of the step beside others of the same run.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.sample.logits_processor import LogitsProcessor, process_dict_updates
from vllm_kvrag.connector import KvragConnector, StepMetadata
from vllm_kvrag.tasks import Pipeline
from vllm_kvrag.worker import Worker

from kvrag.backend.transformers.loading import reader_path

_HERE = "benchmarks.speed.vllm_unsure"  # as vLLM imports it: this module is also __main__
_WORDS = ("Mira", "Brel", "lives", "plays", "harp", "company", "sells", "chairs", "goat", "studied", "banjo", "river")


@dataclass
class _Blended:
    """A blended prompt in the worker: its ids, its pages, and the first position with inexact KV."""

    ids: list[int]
    blocks: list[int]
    first: int
    is_complete: bool = False


_blended: dict[str, _Blended] = {}
_unsure: list[str] = []


@dataclass
class TrialMetadata(StepMetadata):  # type: ignore[misc]
    """`drawn`: requests of which a token is drawn in this step; `grown`: pages that requests got."""

    drawn: set[str] = field(default_factory=set)
    grown: dict[str, list[int]] = field(default_factory=dict)


class TrialConnector(KvragConnector):  # type: ignore[misc]
    """Tells the logits processor whose row it sees, and whether a token is drawn from it."""

    step = TrialMetadata()

    def on_new_request(self, request: Any) -> None:
        """Put the request's name into its sampling parameters: logits processors are told nothing else of it."""
        super().on_new_request(request)
        self._ours: dict[str, Any] = getattr(self, "_ours", {})
        entry = self._tracker._requests.get(request.request_id)
        if entry is not None and entry.matches:
            self._ours[request.request_id] = request
            params = request.sampling_params
            params.extra_args = {**(params.extra_args or {}), "kvrag_name": request.request_id}

    def build_connector_meta(self, scheduler_output: Any) -> TrialMetadata:
        """Add to the step what the logits processor needs."""
        step = super().build_connector_meta(scheduler_output)
        both = TrialMetadata(step.tasks, step.cancelled, step.rows, step.is_idle)
        for name, count in scheduler_output.num_scheduled_tokens.items():
            request = self._ours.get(name) if hasattr(self, "_ours") else None
            if request is not None and request.num_computed_tokens + count >= request.num_tokens_with_spec:
                both.drawn.add(name)
        cached = scheduler_output.scheduled_cached_reqs
        grown = zip(cached.req_ids, cached.new_block_ids, strict=True)
        both.grown = {name: list(blocks[0]) for name, blocks in grown if blocks is not None}
        return both

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Keep the step for the logits processor, which runs after vLLM has cleared it."""
        TrialConnector.step = step = self._get_connector_metadata()
        for name, blocks in step.grown.items():
            if name in _blended:
                _blended[name].blocks += blocks
        super().start_load_kv(forward_context, **kwargs)


def _keep_blended(prefill: Any) -> Any:
    def kept(self: Any, request: Any, *args: Any) -> None:
        prefill(self, request, *args)
        if not request.report.exact:
            first, blocks = request.num_exact(request.selected[:0]), self.backend._blocks.tolist()
            _blended[self.backend._job.name] = _Blended(list(request.token_ids), blocks, first)

    return kept


class Complete(LogitsProcessor):  # type: ignore[misc]
    """Completes a request that is unsure: at its token number TRIAL_AT."""

    def __init__(self, *args: Any) -> None:
        """Begin without rows."""
        self._rows: dict[int, tuple[str, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        """Return False."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow the rows of the batch."""

        def ours(params: Any, _: Any, answer: list[int]) -> Any:
            name = (params.extra_args or {}).get("kvrag_name")
            return (name, answer) if name else None

        process_dict_updates(self._rows, batch_update, ours)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Replace rows of logits, or have their tokens dropped."""
        for row, (name, answer) in self._rows.items():
            blended, tokens = _blended.get(name), [token for token in answer if token >= 0]
            if blended is None or blended.is_complete or name not in TrialConnector.step.drawn:
                continue
            top = logits[row].float().log_softmax(-1).topk(2).values
            margin = float(top[0] - top[1])  # waits for the device, in every step of a blended answer
            if len(tokens) != int(os.environ["TRIAL_AT"]):
                continue
            blended.is_complete = True
            if os.environ["TRIAL_WAY"] == "discard":
                _unsure.append(name)
                continue
            ids = torch.tensor([*blended.ids, *tokens])
            backend = get_kv_transfer_group()._handler._backend.on(blended.blocks, None)
            backend.with_logits = True
            rows = torch.arange(blended.first, len(ids))
            exact = backend.forward(ids[rows][None], backend.new_cache(len(ids)), rows)
            logits[row] = torch.where(logits[row].isinf(), logits[row], exact[0])  # what a grammar forbids stays so
            print(f"  margin {margin:.2f}: {len(rows)} rows at once; the step has {len(logits)} requests", flush=True)
        return logits


class TrialWorker(Worker):  # type: ignore[misc]
    """Reports failed loads with the tokens that were drawn: hooks of connectors run before there are logits."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and keep blended prompts."""
        Pipeline.prefill = _keep_blended(Pipeline.prefill)
        super().load_model(*args, **kwargs)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Draw tokens; drop those of unsure requests."""
        output = super().sample_tokens(grammar_output)
        size, failed = get_kv_transfer_group()._handler._backend.block_size, set()
        for name in _unsure:
            failed |= set(_blended[name].blocks[_blended[name].first // size :])
        _unsure.clear()
        if not failed:
            return output

        def dropped(each: Any) -> Any:
            each.kv_connector_output.invalid_block_ids |= failed
            return each

        if hasattr(output, "get_output"):
            get = output.get_output
            output.get_output = lambda: dropped(get())
            return output
        return dropped(output)


def _schedule_asynchronously() -> None:
    """As on a GPU: vLLM switches it off on a CPU."""
    check = CpuPlatform.check_and_update_config

    def checked(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(checked)


def main() -> None:
    """Ask prompts: by full prefill, and blended with one unsure token."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=reader_path())
    parser.add_argument("--way", choices=("replace", "discard"), default="replace")
    parser.add_argument("--at", type=int, default=0, help="token of the answer that is unsure")
    parser.add_argument("--asynchronous", action="store_true", help="as on a GPU")
    parser.add_argument("--speculative", action="store_true", help="n-grams")
    parser.add_argument("--batched-tokens", type=int, default=2048)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    args = parser.parse_args()
    os.environ.update(TRIAL_WAY=args.way, TRIAL_AT=str(args.at))
    if args.asynchronous:
        _schedule_asynchronously()
    more: dict[str, Any] = {}
    if args.speculative:
        more["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    with TemporaryDirectory() as store:
        transfer = KVTransferConfig(
            kv_connector="TrialConnector",
            kv_connector_module_path=_HERE,
            kv_role="kv_both",
            kv_connector_extra_config={"store": store},
        )
        llm = LLM(
            str(args.model),
            dtype="float32",
            max_model_len=2048,
            enforce_eager=True,
            max_num_batched_tokens=args.batched_tokens,
            tensor_parallel_size=args.tensor_parallel,
            num_gpu_blocks_override=200,
            kv_transfer_config=transfer,
            worker_cls=f"{_HERE}.TrialWorker",
            logits_processors=[f"{_HERE}:Complete"],
            logprobs_mode="processed_logprobs",
            max_logprobs=-1,
            **more,
        )
        _ask_all(llm, args.at)


def _ask_all(llm: LLM, at: int) -> None:
    rng = random.Random(0)
    texts = [". ".join(" ".join(rng.choices(_WORDS, k=7)) + f" {n}" for n in range(6)) for _ in range(6)]
    sampling: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "logprobs": -1}

    def ask(prompt: Any, num_tokens: int, **given: Any) -> Any:
        extra = {"kv_transfer_params": {"kvrag": given}}
        params = SamplingParams(max_tokens=num_tokens, extra_args=extra, **sampling)
        return llm.generate(prompt, params, use_tqdm=False)[0]

    for number, text in enumerate(texts):
        ask(text, 1, mode="warm", texts=[text], document=str(number))
    for round_number in range(4):
        prompt = "\n\n".join([*rng.sample(texts, 5), "Question: who plays the harp?\nAnswer:"])
        ratio = 0.15 + round_number / 1000  # shares no pages with earlier ones
        done = ask(prompt, at + 8, policy="query", ratio=ratio)
        ids, ours = list(done.prompt_token_ids), list(done.outputs[0].token_ids)
        full = ask({"prompt_token_ids": ids + ours[:at]}, 8, mode="off")
        left, right = (each.outputs[0].logprobs[number] for each, number in ((done, at), (full, 0)))
        error = max(abs(left[token].logprob - right[token].logprob) for token in right if right[token].logprob > -50)
        same = ours[at:] == list(full.outputs[0].token_ids)
        print(f"{len(ids)} tokens: from token {at} on as full prefill: {same}; log probabilities differ by {error:.1e}")
    _time_one_among_others(llm, texts, sampling)


def _time_one_among_others(llm: LLM, texts: list[str], sampling: dict[str, Any]) -> None:
    """Print CPU seconds of the steps in which three other requests get a token."""
    engine = llm.llm_engine
    for number in range(3):
        off = {"kv_transfer_params": {"kvrag": {"mode": "off"}}}
        params = SamplingParams(max_tokens=100, ignore_eos=True, extra_args=off)
        engine.add_request(f"other {number}", f"Story {number}:", params)
    for _ in range(10):
        engine.step()
    blend = {"kv_transfer_params": {"kvrag": {"policy": "query", "ratio": 0.2}}}
    engine.add_request("unsure", "\n\n".join(texts), SamplingParams(max_tokens=20, extra_args=blend, **sampling))
    steps = list[float]()
    while len(steps) < 40:
        began = time.process_time()
        if any(output.request_id.startswith("other") for output in engine.step()):
            steps.append(time.process_time() - began)
    print(f"CPU seconds per step of the others: median {sorted(steps)[20]:.4f}, worst {max(steps):.4f}")


if __name__ == "__main__":
    main()
