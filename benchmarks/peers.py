"""Time to the first token of kvrag and of others that reuse KV on a CPU, with chunks in a new order every time.

    python -m benchmarks.peers --kvboost PYTHON --llama PYTHON --vllm PYTHON
    python -m benchmarks.peers --questions 100 --kvboost PYTHON --llama PYTHON --vllm PYTHON

Each option names the Python of an environment that has that peer; those not given are left out. How to set them up is
in benchmarks/notes/speed.md. All get the same weights (a random model of a real shape), the same token ids, and one
request at a time. They take turns, and the others are stopped meanwhile. Every peer has processed all chunks before,
and keeps its caches from prompt to prompt. A time runs from the call to the first token.

With `--questions`, the model is the bundled reader and prompts are questions about its world, and answers are compared.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, compress, islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple


class Answered(NamedTuple):
    """A greedy answer.

    `seconds` are those to the first token if one token was asked for. Of the prompt's tokens, `computed` were computed
    and `prefix` came from the peer's prefix cache; None = the peer does not report it.
    """

    seconds: float
    tokens: list[int]
    computed: int | None = None
    prefix: int | None = None


Answer = Callable[[list[int], int], Answered]
"""Function of a prompt's ids and a number of tokens."""

SHAPE = "qwen2.5-0.5b"
_WINDOW = 8192  # at most
_BLEND = {"controller": "off"}  # always blend


def kvrag(folder: Path, chunks: Sequence[list[int]]) -> Answer:
    """kvrag, which always blends, else with default settings. The RAM tier is off, so chunks are read from disk."""
    from kvrag import BlendConfig, BlendEngine

    config = BlendConfig(**_given(folder)["blend"])
    engine = BlendEngine.from_pretrained(folder, store=folder / "kv", config=config, ram_bytes=0)
    engine.warm([engine.model.tokenizer.decode(chunk) for chunk in chunks])

    def answer(ids: list[int], most: int) -> Answered:
        started = time.perf_counter()
        done = engine.generate(ids, max_new_tokens=most, temperature=0)
        taken = time.perf_counter() - started
        if done.report.fresh_tokens > 0.25 * len(ids):  # all but the question and what is between chunks
            raise SystemExit(f"{done.report.fresh_tokens} of {len(ids)} tokens were not stored")
        return Answered(taken, list(done.token_ids))

    return answer


def transformers(folder: Path, chunks: Sequence[list[int]], keep: bool = True) -> Answer:
    """`model.generate`, with the KV of the longest common prefix with the last prompt if `keep`."""
    from benchmarks.speed.first_token import PrefixCache
    from kvrag import Model

    model = Model.from_pretrained(str(folder), dtype="bfloat16")
    cache = PrefixCache(model, block=1)

    def answer(ids: list[int], most: int) -> Answered:
        started = time.perf_counter()
        kept, tokens = (cache if keep else PrefixCache(model)).generate(ids, most)
        return Answered(time.perf_counter() - started, tokens, len(ids) - kept, kept)

    return answer


def full(folder: Path, chunks: Sequence[list[int]]) -> Answer:
    """`model.generate` without any cache."""
    return transformers(folder, chunks, keep=False)


def kvboost(folder: Path, chunks: Sequence[list[int]], strategy: str = "selective") -> Answer:
    """KVBoost; the prompt and its chunks are aligned to its grid of 128 tokens."""
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

    def answer(ids: list[int], most: int) -> Answered:
        tokens: list[int] = []
        times: list[float] = []

        def add(token: int) -> None:
            tokens.append(token)
            times.append(time.perf_counter())

        started = time.perf_counter()
        engine.generate(ids, max_new_tokens=most, on_token=add)
        return Answered(times[0] - started, tokens)

    return answer


def kvboost_cacheblend(folder: Path, chunks: Sequence[list[int]]) -> Answer:
    """KVBoost with its CacheBlend, 15 %."""
    return kvboost(folder, chunks, "cacheblend")


def llama(folder: Path, chunks: Sequence[list[int]]) -> Answer:
    """llama.cpp through llama-cpp-python, which keeps the common prefix with the last prompt."""
    import llama_cpp

    threads = len(os.sched_getaffinity(0))
    model = llama_cpp.Llama(
        str(folder / "model.gguf"), n_ctx=_given(folder)["window"], n_batch=2048, n_threads=threads, verbose=False
    )

    def answer(ids: list[int], most: int) -> Answered:
        started = time.perf_counter()
        tokens = list(islice(model.generate(ids, temp=0.0), most))
        return Answered(time.perf_counter() - started, tokens)

    return answer


def vllm(folder: Path, chunks: Sequence[list[int]], keep: bool = True, **more: Any) -> Answer:
    """vLLM, with prefix caching if `keep`."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; by default nearly all memory, and there are several
    # by default one of two cores is left idle for the scheduler
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, sorted(os.sched_getaffinity(0)))))
    from vllm import LLM, SamplingParams

    same = {"dtype": "bfloat16", "max_model_len": _given(folder)["window"], "disable_log_stats": True}
    model = LLM(str(folder), enable_prefix_caching=keep, **same, **more)

    def answer(ids: list[int], most: int) -> Answered:
        started = time.perf_counter()
        report: dict[str, Any] = (
            {"extra_args": {"kv_transfer_params": {"kvrag": {}}}} if "kv_transfer_config" in more else {}
        )
        greedy = SamplingParams(temperature=0, max_tokens=most, **report)
        output = model.generate([{"prompt_token_ids": ids}], greedy, use_tqdm=False)[0]
        seconds = time.perf_counter() - started
        blended = (output.kv_transfer_params or {}).get("kvrag") or {}
        if "error" in blended:
            raise SystemExit(blended["error"])
        computed, prefix = len(ids) - output.num_cached_tokens, output.num_cached_tokens
        if blended.get("reused_tokens") or blended.get("recomputed_tokens"):  # else vLLM itself has answered
            computed = blended["fresh_tokens"] + blended["recomputed_tokens"]
            prefix = blended["conversation_tokens"]
        return Answered(seconds, list(output.outputs[0].token_ids), computed, prefix)

    for chunk in chunks if keep else ():
        answer(chunk, 1)
    return answer


def vllm_plain(folder: Path, chunks: Sequence[list[int]]) -> Answer:
    """vLLM without prefix caching."""
    return vllm(folder, chunks, keep=False)


def vllm_kvrag(folder: Path, chunks: Sequence[list[int]]) -> Answer:
    """vLLM with kvrag's connector, on the store in the folder, which the peer `kvrag` has filled."""
    transfer = {
        "kv_connector": "KvragConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": str(folder / "kv"), **_given(folder)["blend"]},
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


def _given(folder: Path) -> dict[str, Any]:
    """Return what `running` has written: `chunks`, `window` and `blend`."""
    return dict(json.loads((folder / "peers.json").read_text()))


def write_model(folder: Path, model: Any) -> None:
    """Write a model as a transformers folder and, if `gguf` is installed, as GGUF."""
    import torch

    model.hf.save_pretrained(folder)
    model.tokenizer.hf.save_pretrained(folder)
    try:
        import gguf
    except ImportError:
        return
    config = model.hf.config
    out: Any = gguf.GGUFWriter(folder / "model.gguf", config.model_type)
    out.add_block_count(config.num_hidden_layers)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(config.rope_parameters["rope_theta"])
    out.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    out.add_tokenizer_model("none")
    out.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.hf.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if config.model_type == "llama" and (count := heads.get(name.split(".")[-2])):  # pairs of RoPE side by side
            tensor = tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
        if tensor.dim() == 1:
            out.add_tensor(target, tensor.float().numpy())
        else:
            raw = tensor.contiguous().view(torch.uint8).numpy()
            out.add_tensor(target, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def serve(name: str, folder: Path) -> None:
    """Answer the prompts that come as lines, each with a line of seconds."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # peers and their processes print
    answer = PEERS[name][2](folder, _given(folder)["chunks"])
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(*json.loads(line))), file=out, flush=True)


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
    parser.add_argument("--questions", type=int, help="compare answers to so many questions instead of times")
    parser.add_argument("--peer", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        serve(args.peer[0], Path(args.peer[1]))
        return
    pool = max(6, *args.chunks)
    if len(args.chunks) * (args.rounds + 1) > pool * (pool - 1):
        parser.error(f"{pool} chunks have no new order for so many rounds: lower --rounds")
    settings = {k: v for k, v in vars(args).items() if v}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the paused peers are ended
    with tempfile.TemporaryDirectory() as name:
        given = {"": sys.executable, "kvboost": args.kvboost, "llama": args.llama, "vllm": args.vllm}
        pythons = {peer: python for peer, (option, *_) in PEERS.items() if (python := given[option])}
        result = (_answers if args.questions else _times)(Path(name), args, pythons)
    print(json.dumps({**result, "settings": settings}))


def _times(folder: Path, args: argparse.Namespace, pythons: Mapping[str, str]) -> dict[str, Any]:
    """Measure prompts of random chunks, and print tables."""
    from benchmarks.shapes import one_token_words, random_model

    rng = random.Random(0)
    model = random_model(SHAPE, args.layers)
    write_model(folder, model)
    words = [model.tokenizer.encode(word)[0] for word in one_token_words(model)]
    window = min(_WINDOW, model.context_window)
    del model
    chunks = [rng.choices(words, k=args.chunk_tokens) for _ in range(max(6, *args.chunks))]
    orders = _orders(len(chunks), rng)
    with running(folder, chunks, pythons, window) as processes:
        return {"lengths": [_measure(processes, chunks, count, orders, words, args, rng) for count in args.chunks]}


def _answers(folder: Path, args: argparse.Namespace, pythons: Mapping[str, str]) -> dict[str, Any]:
    """Ask the bundled reader about its world, passages in random order, and print how the answers compare."""
    from benchmarks.quality.grid import exact_match
    from benchmarks.quality.worlds import world_rows
    from kvrag.backend.transformers import Model

    model = Model.from_pretrained("reader", dtype="bfloat16")
    write_model(folder, model)
    tokenizer = model.tokenizer
    rng = random.Random(0)
    rows = world_rows(args.questions, seed=51)
    passages = dict.fromkeys(chain.from_iterable(row.passages for row in rows))
    window = min(_WINDOW, model.context_window)
    with running(folder, [tokenizer.encode(passage) for passage in passages], pythons, window) as processes:
        answers_of: dict[str, list[list[int]]] = {peer: [] for peer in ("full", *processes)}
        for number, row in enumerate(rows):
            print(f"question {number} of {len(rows)}", file=sys.stderr)
            text = "\n\n".join([*rng.sample(row.passages, len(row.passages)), f"Question: {row.question}"])
            ids = tokenizer.render(tokenizer.as_prompt(text))
            for peer, process in processes.items():
                tokens = ask(peer, process, ids, 16).tokens
                answers_of[peer].append(list(takewhile(lambda token: token not in model.eos_ids, tokens)))
    print(f"{len(rows)} questions\n\n{'':36}{'right':>8}{'as full prefill':>17}{'where that is right':>21}")
    result, is_right = {}, {}
    for peer, answers in answers_of.items():
        texts = [tokenizer.hf.decode(answer) for answer in answers]
        is_right[peer] = [bool(exact_match(text, row.answers)) for text, row in zip(texts, rows, strict=True)]
        is_equal = [own == full for own, full in zip(answers, answers_of["full"], strict=True)]
        where_right = list(compress(is_equal, is_right["full"])) or [False]
        shares = [statistics.mean(values) for values in (is_right[peer], is_equal, where_right)]
        print(f"{PEERS[peer][1]:36}{shares[0]:>8.3f}{shares[1]:>17.3f}{shares[2]:>21.3f}")
        result[peer] = dict(zip(("right", "equal", "equal_where_full_is_right"), shares, strict=True))
    print()
    return {"answers": result}


def _orders(num: int, rng: random.Random) -> Iterator[list[int]]:
    """Yield orders of `num` chunks: the first chunk is never that of the order before, the first two never come again.

    The prefix cache of a peer would have the whole prompt if its order came again.
    """
    for first, step in ((first, step) for step in range(1, num) for first in range(num)):
        second = (first + step) % num
        others = [number for number in range(num) if number not in (first, second)]
        yield [first, second, *rng.sample(others, len(others))]


@contextmanager
def running(
    folder: Path,
    chunks: list[list[int]],
    pythons: Mapping[str, str],
    window: int,
    blend: Mapping[str, Any] = _BLEND,
) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Start peers on the model in the folder, and let them process these chunks; stop them at the end.

    Args:
        pythons: The Python of each peer.
        window: The longest prompt with its answer, in tokens.
        blend: BlendConfig of the peers that blend.
    """
    (folder / "peers.json").write_text(json.dumps({"chunks": chunks, "window": window, "blend": dict(blend)}))
    processes: dict[str, subprocess.Popen[str]] = {}
    try:
        for peer, python in pythons.items():
            title = PEERS[peer][1]
            print(f"starting {title}", file=sys.stderr)
            command = [python, __file__, "--peer", peer, str(folder)]
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
            processes[peer] = process
            if _line(process) != "ready":
                raise SystemExit(f"{title} did not start")
            os.killpg(process.pid, signal.SIGSTOP)  # some poll while they wait for a prompt
        yield processes
    finally:
        for process in processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _measure(
    processes: dict[str, subprocess.Popen[str]],
    chunks: Sequence[list[int]],
    count: int,
    orders: Iterator[list[int]],
    words: list[int],
    args: argparse.Namespace,
    rng: random.Random,
) -> dict[str, Any]:
    """Measure prompts of the first `count` chunks of an order, and print a table."""
    times: dict[str, list[float]] = {peer: [] for peer in processes}
    for number in range(args.rounds + 1):
        print(f"{count} chunks, round {number} of {args.rounds}", file=sys.stderr)
        prompt = [
            *chain(*(chunks[number] for number in next(orders)[:count])),
            *rng.choices(words, k=args.question_tokens),
        ]
        for peer, process in processes.items():
            taken = ask(peer, process, prompt, 1).seconds
            print(f"{PEERS[peer][1]}: {taken:.2f} s", file=sys.stderr)
            if number:  # the first one includes start-up costs
                times[peer].append(taken)
    medians = {peer: statistics.median(taken) for peer, taken in times.items()}
    print(f"{SHAPE}, prompts of {len(prompt)} tokens, {count} chunks, medians of {args.rounds}\n")
    print(f"{'':36}{'first token':>12}{'kvrag faster':>14}")
    for peer, seconds in medians.items():
        print(f"{PEERS[peer][1]:36}{seconds:>10.2f} s{seconds / medians['kvrag']:>13.1f}x")
    print()
    return {"tokens": len(prompt), "medians": medians, "times": times}


def ask(peer: str, process: subprocess.Popen[str], ids: list[int], most: int) -> Answered:
    """Let only this peer run until it has answered."""
    os.killpg(process.pid, signal.SIGCONT)
    assert process.stdin is not None
    process.stdin.write(json.dumps([ids, most]) + "\n")
    process.stdin.flush()
    line = _line(process)
    if not line:
        raise SystemExit(f"{PEERS[peer][1]} ended")
    os.killpg(process.pid, signal.SIGSTOP)
    return Answered(*json.loads(line))


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


if __name__ == "__main__":
    main()
