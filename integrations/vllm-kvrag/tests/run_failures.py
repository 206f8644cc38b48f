"""Two processes per model, of which one fails in a forward pass: print the answers as JSON lines."""

from __future__ import annotations

import json
import os
import sys
from itertools import permutations
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"

import torch
from vllm import LLM, SamplingParams
from vllm_engines import CHUNKS, _answer, distance, prompt_of, reference, settings_of
from vllm_kvrag import Worker
from vllm_kvrag.backend import PagedCache, VllmBackend

POINTS = {"stitch": (PagedCache, "lay_out"), "prepare": (VllmBackend, "_metadata"), "pack": (VllmBackend, "gather")}


class FailingWorker(Worker):
    """The second process fails once at the point that is named in the file `KVRAG_FAIL`."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and change kvrag in the second process."""
        super().load_model(*args, **kwargs)
        if self.rank == 1:
            for point, (owner, name) in POINTS.items():
                setattr(owner, name, failing(point, getattr(owner, name)))


def failing(point: str, work: Any) -> Any:
    """Return `work`, which fails once if the file names the point."""
    file = Path(os.environ["KVRAG_FAIL"])

    def work_or_fail(self: Any, value: Any, *args: Any) -> Any:
        is_inside = point != "stitch" or value == 1  # a layer that the pass reaches after a collective
        if is_inside and file.read_text() == point:
            file.write_text("")
            if point == "pack":
                value = (lambda: None,)  # cannot be pickled
            else:
                raise MemoryError("in one process")
        return work(self, value, *args)

    return work_or_fail


def main(model: Path, store: Path) -> None:
    """Answer prompts, some of which fail in the second process."""
    torch.set_num_threads(1)
    Path(os.environ["KVRAG_FAIL"]).touch()
    with reference(model, store) as own:
        own.warm(CHUNKS[:4], document="a")
    llm = LLM(**settings_of(model, store, tensor_parallel_size=2, worker_cls="run_failures.FailingWorker"))

    def ask(prompt: str, **given: Any) -> Any:
        extra = {"kv_transfer_params": {"kvrag": given}}
        sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, logprobs=-1, extra_args=extra)
        return _answer(llm.generate([prompt], sampling, use_tqdm=False)[0], llm)

    orders = permutations(CHUNKS[:4])  # a prompt with a known beginning needs no pass
    for point in [*POINTS, ""]:
        for policy in ("query", "hkvd"):
            Path(os.environ["KVRAG_FAIL"]).write_text(point)
            prompt = prompt_of(*next(orders)[::-1])
            done, full = ask(prompt, policy=policy, ratio=1.0), ask(prompt, mode="off")
            outcome = {"difference": distance(done.logprobs, full.logprobs), "report": done.report}
            print(json.dumps({"point": point, **outcome}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
