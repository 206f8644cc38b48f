"""Two processes per model: compare with kvrag's own engine, and print the results as JSON lines."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"

import torch
from vllm import LLM, SamplingParams
from vllm_engines import CHUNKS, _answer, blended, distance, prompt_of, reference, settings_of


def main(model: Path, store: Path) -> None:
    """Answer prompts with tensor parallelism, and by kvrag alone."""
    torch.set_num_threads(1)
    with reference(model, store) as own:
        own.warm(CHUNKS[:4], document="a")
        llm = LLM(**settings_of(model, store, tensor_parallel_size=2, max_num_batched_tokens=128))

        def ask(prompts: list[str], *given: dict[str, Any], num_tokens: int = 1) -> list[Any]:
            sampling = [
                SamplingParams(
                    max_tokens=num_tokens,
                    temperature=0.0,
                    ignore_eos=True,
                    logprobs=-1,
                    extra_args={"kv_transfer_params": {"kvrag": each}},
                )
                for each in given
            ]
            return [_answer(output, llm) for output in llm.generate(prompts, sampling, use_tqdm=False)]

        prompt = prompt_of(CHUNKS[2], CHUNKS[0], CHUNKS[3], CHUNKS[1])
        (full,) = ask([prompt], {"mode": "off"})
        for policy, ratio in (("query", 1.0), ("query", 0.15), ("hkvd", 0.15), ("none", 0.0)):
            (done,) = ask([prompt], {"policy": policy, "ratio": ratio})
            wanted = blended(own, done.ids, ratio, policy)
            difference = distance(done.logprobs, full.logprobs if ratio == 1.0 else wanted.logits[0].log_softmax(-1))
            counts = done.report["recomputed_tokens"] == wanted.report.recomputed_tokens
            print(json.dumps({"policy": policy, "ratio": ratio, "difference": difference, "same counts": counts}))

        # all at once: warm, blend, exact, forget
        mixed = [{"mode": "warm", "document": f"d{n}", "texts": [CHUNKS[4 + n]]} for n in range(3)]
        blends = [{"policy": "query", "ratio": 1.0}] * 3 + [{"mode": "off"}]
        answers = ask([*CHUNKS[4:7], *[prompt] * 4], *mixed, *blends)
        print(json.dumps({"new": [answer.report["new"] for answer in answers[:3]]}))
        print(json.dumps({"mixed": [distance(answer.logprobs, full.logprobs) for answer in answers[3:]]}))
        key = own.store.documents()["d0"][0]
        report = own.warm([CHUNKS[4]], document="d0")
        print(json.dumps({"same keys": report.new == 0 and key in own.store.documents()["d0"]}))

        # a chunk that is damaged while the engine runs
        file = max((store / "chunks").rglob("*.safetensors"), key=lambda path: path.stat().st_mtime)
        file.write_bytes(file.read_bytes()[:-5000] + bytes(5000))
        (plain,) = ask([prompt_of(*CHUNKS[4:7])], {"mode": "off"})
        (done,) = ask([prompt_of(*CHUNKS[4:7])], {"policy": "query", "ratio": 1.0})
        print(json.dumps({"damaged": distance(done.logprobs, plain.logprobs), "notes": done.report["notes"]}))
        (gone,) = ask(["x"], {"mode": "forget", "document": "d1"})
        print(json.dumps(gone.report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
