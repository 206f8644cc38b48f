"""Speculative decoding by ngrams: compare with full prefill and kvrag's own engine, and print the results as JSON.

In a process of its own, because vLLM's code for it keeps further engines in the process from starting.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["NUMBA_DISABLE_JIT"] = "1"  # compiling the search for ngrams takes longer than all searches here

import vllm_environment  # noqa: F401
from vllm_engines import CHUNKS, blended, distance, prompt_of, reference, started

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


def main(model: Path, store: Path) -> None:
    """Answer prompts."""
    prompt = prompt_of(*reversed(CHUNKS[:3]))
    with started(model, store, speculative_config=NGRAM) as engine, reference(model, store) as own:
        own.warm(CHUNKS[:3], document="a")
        full = engine.full(prompt, 40)
        exact = engine.ask(prompt, 40, policy="query", ratio=1.0)
        inexact = engine.ask(prompt, 40, policy="query", ratio=0.15)
        wanted = blended(own, inexact.ids, 0.15, "query").logits[0].log_softmax(-1)
        assert exact.report is not None
        result = {
            "reused": exact.report["reused_tokens"] + exact.report["recomputed_tokens"],
            "same tokens": exact.tokens == full.tokens,
            "differences": [distance(exact.logprobs, full.logprobs), distance(inexact.logprobs, wanted)],
        }
        print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
