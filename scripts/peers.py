"""Time to the first token of kvrag and of others that reuse KV on a CPU, with chunks in a new order every time.

    python scripts/peers.py --kvboost PYTHON --llama PYTHON --vllm PYTHON

Each option names the Python of an environment that has that peer; those not given are left out. How to set them up is
in docs/benchmarks.md. All get the same weights (a random model of a real shape), the same token ids, and one request at
a time. They take turns, and the others are stopped meanwhile. Every peer has seen all chunks before, and keeps its
caches from prompt to prompt. A time runs from the call to the first token.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

Answer = Callable[[list[int]], float]
"""Function of a prompt's ids; returns the seconds to its first token."""

SHAPE = "qwen2.5-0.5b"


def kvrag(folder: Path, chunks: Sequence[list[int]]) -> Answer:
    """kvrag with its default settings. The RAM tier is off, so chunks are read from disk."""
    from kvrag import BlendEngine

    engine = BlendEngine.from_pretrained(folder, store=folder / "kv", ram_bytes=0)
    engine.warm([engine.model.tokenizer.decode(chunk) for chunk in chunks])

    def answer(ids: list[int]) -> float:
        started = time.perf_counter()
        report = engine.generate(ids, max_new_tokens=1, temperature=0).report
        taken = time.perf_counter() - started
        if report.reused_tokens < 0.85 * len(ids):  # all but the question
            raise SystemExit(f"only {report.reused_tokens} tokens were reused")
        return taken

    return answer


def transformers(folder: Path, chunks: Sequence[list[int]], keep: bool = True) -> Answer:
    """`model.generate`, with the KV of the longest common prefix with the last prompt if `keep`."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    last: list[int] = []
    cache: Any = None

    @torch.inference_mode()
    def answer(ids: list[int]) -> float:
        nonlocal last, cache
        started = time.perf_counter()
        common = next((i for i, (a, b) in enumerate(zip(ids[:-1], last, strict=False)) if a != b), 0) if keep else 0
        if common:
            cache.crop(common - cache.get_seq_length())
        tensor = torch.tensor([ids])
        output = model.generate(
            tensor,
            attention_mask=torch.ones_like(tensor),
            past_key_values=cache if common else None,
            max_new_tokens=1,
            do_sample=False,
            return_dict_in_generate=True,
        )
        last, cache = ids, output.past_key_values
        return time.perf_counter() - started

    return answer


def full(folder: Path, chunks: Sequence[list[int]]) -> Answer:
    """`model.generate` without any cache."""
    return transformers(folder, chunks, keep=False)


def kvboost(folder: Path, chunks: Sequence[list[int]], strategy: str = "selective") -> Answer:
    """KVBoost; the prompt and its chunks lie on its grid of 128 tokens."""
    import torch
    from kvboost import KVBoost, RecomputeStrategy
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    engine: Any = KVBoost(
        model,
        AutoTokenizer.from_pretrained(folder),
        max_cache_bytes=4 << 30,
        max_chunks=10_000,
        recompute_strategy=RecomputeStrategy(strategy),
        device="cpu",
    )
    engine._encode = lambda ids: ids
    for chunk in chunks:
        engine.warm(chunk)

    def answer(ids: list[int]) -> float:
        first: list[float] = []
        started = time.perf_counter()
        engine.generate(ids, max_new_tokens=1, on_token=lambda token: first.append(time.perf_counter()))
        return first[0] - started

    return answer


def kvboost_cacheblend(folder: Path, chunks: Sequence[list[int]]) -> Answer:
    """KVBoost with its CacheBlend, 15 %."""
    return kvboost(folder, chunks, "cacheblend")


def llama(folder: Path, chunks: Sequence[list[int]]) -> Answer:
    """llama.cpp through llama-cpp-python, which keeps the common prefix with the last prompt."""
    import llama_cpp

    model = llama_cpp.Llama(str(folder / "model.gguf"), n_ctx=8192, n_batch=2048, n_threads=2, verbose=False)

    def answer(ids: list[int]) -> float:
        started = time.perf_counter()
        next(model.generate(ids, temp=0.0))
        return time.perf_counter() - started

    return answer


def vllm(folder: Path, chunks: Sequence[list[int]], keep: bool = True, **more: Any) -> Answer:
    """vLLM, with prefix caching if `keep`."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; by default nearly all memory, and there are several
    from vllm import LLM, SamplingParams

    same = {"dtype": "bfloat16", "max_model_len": 8192, "disable_log_stats": True}
    model = LLM(str(folder), enable_prefix_caching=keep, **same, **more)
    one = SamplingParams(temperature=0, max_tokens=1)
    for chunk in chunks if keep else ():
        model.generate([{"prompt_token_ids": chunk}], one, use_tqdm=False)

    def answer(ids: list[int]) -> float:
        started = time.perf_counter()
        model.generate([{"prompt_token_ids": ids}], one, use_tqdm=False)
        return time.perf_counter() - started

    return answer


def vllm_plain(folder: Path, chunks: Sequence[list[int]]) -> Answer:
    """vLLM without prefix caching."""
    return vllm(folder, chunks, keep=False)


def vllm_kvrag(folder: Path, chunks: Sequence[list[int]]) -> Answer:
    """vLLM with kvrag's connector, on the store that the peer `kvrag` has filled."""
    transfer = {
        "kv_connector": "KvragConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": str(folder / "kv")},
    }
    return vllm(folder, (), worker_cls="vllm_kvrag.Worker", kv_transfer_config=transfer)


PEERS: dict[str, tuple[str, str, Callable[[Path, Sequence[list[int]]], Answer]]] = {
    "kvrag": ("", "kvrag", kvrag),
    "full": ("", "full prefill (transformers)", full),
    "transformers": ("", "transformers, common prefix kept", transformers),
    "vllm": ("vllm", "vLLM, prefix caching", vllm),
    "vllm_plain": ("vllm", "vLLM, no prefix caching", vllm_plain),
    "vllm_kvrag": ("vllm", "vLLM with kvrag's connector", vllm_kvrag),
    "llama": ("llama", "llama.cpp, common prefix kept", llama),
    "kvboost": ("kvboost", "KVBoost, its default", kvboost),
    "kvboost_cacheblend": ("kvboost", "KVBoost, CacheBlend 15 %", kvboost_cacheblend),
}
"""Name -> (option that names its Python, title, function)."""


def write_model(folder: Path, layers: int | None) -> list[int]:
    """Write a random model of the shape as a transformers folder and as GGUF; return ids of one-token words."""
    import torch

    from kvrag.backend.transformers.shapes import random_model
    from kvrag.bench.ttft import one_token_words

    model = random_model(SHAPE, layers)
    model.hf.save_pretrained(folder)
    model.tokenizer.hf.save_pretrained(folder)
    words = [model.tokenizer.encode(word)[0] for word in one_token_words(model)]
    try:
        import gguf
    except ImportError:
        return words
    config = model.hf.config
    out: Any = gguf.GGUFWriter(folder / "model.gguf", "qwen2")
    out.add_block_count(config.num_hidden_layers)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(10000.0)
    out.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    out.add_tokenizer_model("none")
    out.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, tensor in model.hf.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if tensor.dim() == 1:
            out.add_tensor(target, tensor.float().numpy())
        else:
            raw = tensor.contiguous().view(torch.uint8).numpy()
            out.add_tensor(target, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return words


def serve(name: str, folder: Path) -> None:
    """Answer the prompts that come as lines, each with a line of seconds."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # peers and their processes print
    chunks = json.loads((folder / "chunks.json").read_text())
    answer = PEERS[name][2](folder, chunks)
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        print(answer(json.loads(line)), file=out, flush=True)


def main() -> None:
    """Measure, and print a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in ("kvboost", "llama", "vllm"):
        parser.add_argument(f"--{option}", metavar="PYTHON")
    parser.add_argument("--layers", type=int, help="of the model (default: all)")
    parser.add_argument("--chunks", type=int, nargs="+", default=[6], help="chunks in a prompt; several lengths")
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--question-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        serve(args.peer[0], Path(args.peer[1]))
        return
    pythons = {"": sys.executable, "kvboost": args.kvboost, "llama": args.llama, "vllm": args.vllm}
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = write_model(folder, args.layers)
        chunks = [rng.choices(words, k=args.chunk_tokens) for _ in range(max(args.chunks))]
        (folder / "chunks.json").write_text(json.dumps(chunks))
        running: dict[str, subprocess.Popen[str]] = {}
        try:
            for peer, (option, title, _) in PEERS.items():
                if python := pythons[option]:
                    print(f"starting {title}", file=sys.stderr)
                    running[peer] = _start([python, __file__, "--peer", peer, name], title)
            results = [_measure(running, chunks[:count], words, args, rng) for count in args.chunks]
        finally:
            for process in running.values():
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    settings = {k: v for k, v in vars(args).items() if v}
    print(json.dumps({"lengths": results, "settings": settings}))


def _start(command: list[str], title: str) -> subprocess.Popen[str]:
    """Start a peer, wait until it is ready, and stop it: some poll while they wait for a prompt."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
    if _line(process) != "ready":
        raise SystemExit(f"{title} did not start")
    os.killpg(process.pid, signal.SIGSTOP)
    return process


def _measure(
    running: dict[str, subprocess.Popen[str]],
    chunks: list[list[int]],
    words: list[int],
    args: argparse.Namespace,
    rng: random.Random,
) -> dict[str, Any]:
    """Measure prompts of these chunks, and print a table. Only the peer that is asked runs."""
    times: dict[str, list[float]] = {peer: [] for peer in running}
    for number in range(args.rounds + 1):
        print(f"{len(chunks)} chunks, round {number} of {args.rounds}", file=sys.stderr)
        before = chunks[0]
        while len(chunks) > 1 and chunks[0] is before:  # two chunks often keep their order
            rng.shuffle(chunks)
        prompt = [*chain(*chunks), *rng.choices(words, k=args.question_tokens)]
        for peer, process in running.items():
            os.killpg(process.pid, signal.SIGCONT)
            assert process.stdin is not None
            process.stdin.write(json.dumps(prompt) + "\n")
            process.stdin.flush()
            line = _line(process)
            if not line:
                raise SystemExit(f"{PEERS[peer][1]} ended")
            taken = float(line)
            os.killpg(process.pid, signal.SIGSTOP)
            print(f"{PEERS[peer][1]}: {taken:.2f} s", file=sys.stderr)
            if number:  # the first one includes start-up costs
                times[peer].append(taken)
    medians = {peer: statistics.median(taken) for peer, taken in times.items()}
    order = f"{len(chunks)} chunks in a new order"
    print(f"{SHAPE}, prompts of {len(prompt)} tokens, {order}, medians of {args.rounds}\n")
    print(f"{'':36}{'first token':>12}{'kvrag sooner':>14}")
    for peer, seconds in medians.items():
        print(f"{PEERS[peer][1]:36}{seconds:>10.2f} s{seconds / medians['kvrag']:>13.1f}x")
    print()
    return {"tokens": len(prompt), "medians": medians, "times": times}


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


if __name__ == "__main__":
    main()
