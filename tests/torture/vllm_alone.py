"""`python -m torture.vllm_alone MODEL`: vLLM without the connector answers lists of token ids, one JSON line each.

A line has as many lists of `[[token, log-probability], ...]` as the answers have tokens: the most likely tokens, best
first. The first one is the answer's token.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import vllm_environment  # noqa: F401
from vllm_engines import settings_of

from torture.vllm import SIZES, TOKENS


def _best_first(step: dict[int, Any]) -> list[tuple[int, float]]:
    return sorted(((token, each.logprob) for token, each in step.items()), key=lambda pair: -pair[1])


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # for vLLM's own messages
    from vllm import LLM, SamplingParams

    llm = LLM(**settings_of(Path(sys.argv[1]), Path(), kv_transfer_config=None, worker_cls=None, **SIZES))
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, logprobs=5)
    answers.write("ready\n")
    for line in sys.stdin:
        prompts = [{"prompt_token_ids": ids} for ids in json.loads(line)]
        made = llm.generate(prompts, sampling, use_tqdm=False)
        tops = [[_best_first(step) for step in each.outputs[0].logprobs] for each in made]
        answers.write(json.dumps(tops) + "\n")
