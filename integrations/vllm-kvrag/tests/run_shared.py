"""Two processes per model on a shared store: print the results as JSON lines."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"

import torch
from vllm import LLM, SamplingParams
from vllm_engines import CHUNKS, _answer, prompt_of, settings_of


def main(model: Path, url: str, cache: str) -> None:
    """Answer prompts with and without reuse until all chunks are reused, then warm a text."""
    torch.set_num_threads(1)
    llm = LLM(**settings_of(model, url, {"store_cache": cache}, tensor_parallel_size=2))

    def ask(prompt: str, num_tokens: int = 8, **given: Any) -> Any:
        extra = {"kv_transfer_params": {"kvrag": given}}
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, extra_args=extra)
        (output,) = llm.generate([prompt], sampling, use_tqdm=False)
        return _answer(output, llm)

    until, reused, number = time.monotonic() + 200, 0, 0
    while reused < 150 and time.monotonic() < until:  # both get copies afterwards
        number += 1
        prompt = prompt_of(f"Round {number}.", *CHUNKS[3::-1])  # so that nothing is found in pages
        full, done = ask(prompt, mode="off"), ask(prompt, ratio=1.0, policy="query")
        reused = done.report["reused_tokens"]
        print(json.dumps({"reused": reused, "tokens": done.tokens, "full": full.tokens}))
        time.sleep(0.2)
    print(json.dumps(ask(CHUNKS[4], 1, mode="warm", document="b").report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
