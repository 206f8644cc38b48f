"""Three public workloads on vLLM with and without kvrag's connector, or on any server with OpenAI's API.

- `permutator`: `long-doc-permutator` of LMCache's `lmcache bench engine`. Every request is the same system prompt and
  the same contexts, in an order of its own; one request at a time.
- `document-qa`: vLLM's `benchmark_long_document_qa_throughput.py`. Every document is a prompt that comes several times
  (`--repeat-mode`); all requests are sent at once.
- `prefix`: the dataset `prefix_repetition` of `vllm bench serve`. A few prefixes with a new suffix each, shuffled; all
  requests are sent at once.

Options have the originals' names and defaults; `--scale` multiplies the numbers of tokens. Here, prompts are sent to
`/v1/completions` as texts, in which a word is a token of the random model, and the texts of `prefix` are words.

Three ways answer the same requests: stock vLLM with its prefix cache; the same with the connector, whose documents
(contexts, documents, prefixes) are warmed before, with `"mode": "off"`; and with blending. With `--base-url`, a server
that runs already answers them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks.settings import run_settings
from benchmarks.shapes import SHAPES, one_token_words, random_model
from benchmarks.speed.vllm import BLENDING, STOCK, connector, last_error, percentile, require_vllm, server, versions
from kvrag.cli.common import add_number, at_least
from kvrag.client.remote_engine import RemoteEngine
from kvrag.errors import KvragError

_SERVED = "served"  # name of the row with --base-url


@dataclass(frozen=True)
class Workload:
    """Prompts in the order in which they are sent, and the documents in them that can be stored before.

    Attributes:
        warm_up: Prompts without these documents, sent before, untimed.
        clients: Requests in flight at the same time.
    """

    documents: list[str]
    prompts: list[str]
    warm_up: list[str]
    output_tokens: int
    clients: int


Words = Sequence[str]
Options = Mapping[str, Any]


def permutator(options: Options, scale: float, words: Words, rng: random.Random) -> Workload:
    """Return distinct permutations of the same contexts, as LMCache's `long-doc-permutator`."""
    contexts = [
        _text(words[: options["vocab_size"]], options["context_length"] * scale, rng)
        for _ in range(options["num_contexts"])
    ]
    system = _text(words, options["system_prompt_length"] * scale, rng)
    count = min(options["num_permutations"], math.factorial(len(contexts)))
    orders: dict[tuple[str, ...], None] = {}
    while len(orders) < count:
        orders[tuple(rng.sample(contexts, len(contexts)))] = None
    prompts = ["\n\n".join(filter(None, [system, *order])) for order in orders]
    warm_up = [_text(words, 500 * scale, rng)]
    return Workload(contexts, prompts, warm_up, _tokens(128 * scale), options["num_inflight_requests"])


def document_qa(options: Options, scale: float, words: Words, rng: random.Random) -> Workload:
    """Return every document several times, as vLLM's `benchmark_long_document_qa_throughput.py`."""
    body = " ".join(["hi"] * _tokens(options["document_length"] * scale))
    documents = [f"{number}{body}" for number in range(options["num_documents"])]
    count, mode = options["repeat_count"], options["repeat_mode"]
    prompts = documents * count
    if mode == "random":
        rng.shuffle(prompts)
    elif mode == "interleave":
        prompts = [document for document in documents for _ in range(count)]
    warm_up = [f"This is warm up request {number}{body}" for number in range(len(documents))]
    return Workload(documents, prompts, warm_up, _tokens(10 * scale), len(prompts))


def prefix(options: Options, scale: float, words: Words, rng: random.Random) -> Workload:
    """Return prefixes with several suffixes each, shuffled, as `prefix_repetition` of `vllm bench serve`."""
    prefixes = [_text(words, options["prefix_len"] * scale, rng) for _ in range(options["num_prefixes"])]
    prompts = [
        start + _text(words, options["suffix_len"] * scale, rng)
        for start in prefixes
        for _ in range(options["num_prompts"] // len(prefixes))
    ]
    rng.shuffle(prompts)
    warm_up = [_text(words, 500 * scale, rng)]
    return Workload(prefixes, prompts, warm_up, _tokens(options["output_len"] * scale), len(prompts))


WORKLOADS: dict[str, Callable[[Options, float, Words, random.Random], Workload]] = {
    "permutator": permutator,
    "document-qa": document_qa,
    "prefix": prefix,
}

ORIGINAL: dict[str, tuple[int, str]] = {
    "num_contexts": (5, "permutator: documents"),
    "context_length": (5000, "permutator: tokens of a document"),
    "system_prompt_length": (1000, "permutator: tokens of the system prompt"),
    "num_permutations": (10, "permutator: requests"),
    "vocab_size": (8000, "permutator: words to choose from, at most"),
    "num_inflight_requests": (1, "permutator: requests at the same time"),
    "num_documents": (8, "document-qa: documents"),
    "document_length": (20000, "document-qa: tokens of a document"),
    "repeat_count": (2, "document-qa: times that each document comes"),
    "prefix_len": (256, "prefix: tokens of a prefix"),
    "suffix_len": (256, "prefix: tokens of a suffix"),
    "num_prefixes": (10, "prefix: prefixes"),
    "num_prompts": (1000, "prefix: requests"),
    "output_len": (128, "prefix: tokens of an answer"),
}
"""Options of the originals, except `repeat_mode`, with their defaults."""
SCALES = {"permutator": 0.1, "document-qa": 0.1, "prefix": 1.0}
"""Default scales, for CPUs: prompts of about 2,600, 2,000 and 512 tokens."""


@dataclass(frozen=True)
class Row:
    """How one way answered the requests of a workload.

    Attributes:
        total_s: From the first request to the end of the last answer.
        cpu_s: Processor time of the server meanwhile; None = not ours.
        warm_s: Encoding the documents before; None = not encoded.
        cached, computed: Sums over the prompts' tokens; computed = fresh and recomputed.
        ttft_ratio, total_ratio, cpu_ratio: Of the stock server / of this one; None = without it.
    """

    workload: str
    way: str
    requests: int
    prompt_tokens: int
    ttft_p50_s: float
    total_s: float
    cpu_s: float | None
    warm_s: float | None
    cached: int
    computed: int
    ttft_ratio: float | None = None
    total_ratio: float | None = None
    cpu_ratio: float | None = None


@dataclass(frozen=True)
class _Way:
    name: str
    url: str
    model: str
    body: dict[str, Any]  # fields of every request
    pid: int | None = None
    tagged: bool = False  # the report is fetched by its tag
    is_warm: bool = False  # this way's server stores the documents
    api_key: str | None = None


@dataclass(frozen=True)
class _Answer:
    ttft_s: float
    prompt_tokens: int
    cached: int
    computed: int


def measure(args: argparse.Namespace, progress: Callable[[str], None]) -> tuple[list[Row], dict[str, Any]]:
    """Measure all ways on all workloads; return the rows and the settings.

    Raises:
        KvragError: vLLM is missing, or a server failed.
    """
    options = {name: getattr(args, name) for name in (*ORIGINAL, "repeat_mode")}
    net = random_model(args.model, 1 if args.base_url else args.layers)
    words = one_token_words(net)
    work = {
        name: WORKLOADS[name](options, args.scale or SCALES[name], words, random.Random(args.seed))
        for name in args.workloads
    }
    scales = {f"scale of {name}": args.scale or SCALES[name] for name in work}
    if args.base_url:
        models = httpx.get(f"{args.base_url}/v1/models", headers=_headers(args.api_key)).raise_for_status().json()
        name = args.model_name or models["data"][0]["id"]
        way = _Way(_SERVED, args.base_url, name, args.body, is_warm=args.warm, api_key=args.api_key)
        return _run_all([way], work, progress), {"server": args.base_url, "model": name} | scales | options
    require_vllm()
    settings = run_settings(net) | versions() | scales | options
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        net.hf.save_pretrained(folder / "model")
        net.tokenizer.hf.save_pretrained(folder / "model")
        longest = max(
            len(net.tokenizer.encode(prompt)) + workload.output_tokens
            for workload in work.values()
            for prompt in workload.prompts + workload.warm_up
        )
        common = ["--max-model-len", str(longest + 16), "--enable-prompt-tokens-details", *args.vllm.split()]
        extra = {"ratio": args.ratio, "controller": "off", **args.extra}
        starts = ((STOCK, ()), (BLENDING, connector(str(folder / "kv"), extra)))
        progress("starting both servers")
        served = {
            start: stack.enter_context(server(folder, start, [*common, *more], args.pages)) for start, more in starts
        }
        (stock, stock_pid), (blending, pid) = served[STOCK], served[BLENDING]
        off = {"kv_transfer_params": {"kvrag": {"mode": "off"}}}
        ways = [
            _Way(STOCK, stock, "shape", {}, stock_pid),
            _Way(f"{BLENDING}, off", blending, "shape", off, pid),
            _Way(BLENDING, blending, "shape", {}, pid, tagged=True, is_warm=True),
        ]
        try:
            return _run_all(ways, work, progress), settings
        except httpx.HTTPError as error:
            reasons = [f"{start}: {last_error(folder / f'{start}.log')}" for start in served]
            raise KvragError(f"a server failed ({error}); {'; '.join(reasons)}") from error


def _run_all(ways: Sequence[_Way], work: dict[str, Workload], progress: Callable[[str], None]) -> list[Row]:
    rows = []
    for name, workload in work.items():
        first: Row | None = None
        for way in ways:
            warm_s = None
            if way.is_warm:
                progress(f"{name}, {way.name}: warming {len(workload.documents)} documents")
                warm_s = _warm(way, workload)
            progress(f"{name}, {way.name}: {len(workload.prompts)} requests")
            row = asyncio.run(_run(name, way, workload, warm_s))
            first = first or row
            rows.append(row if row is first else _compared(row, first))
    return rows


def _compared(row: Row, stock: Row) -> Row:
    cpu = stock.cpu_s / row.cpu_s if stock.cpu_s and row.cpu_s else None
    ttft, total = stock.ttft_p50_s / row.ttft_p50_s, stock.total_s / row.total_s
    return replace(row, ttft_ratio=ttft, total_ratio=total, cpu_ratio=cpu)


def _warm(way: _Way, workload: Workload) -> float:
    """Encode the documents on the server; return the seconds."""
    started = time.perf_counter()
    with RemoteEngine(way.url, way.model, api_key=way.api_key) as engine:
        engine.warm(workload.documents, document=[f"document {n}" for n in range(len(workload.documents))])
    return time.perf_counter() - started


async def _run(name: str, way: _Way, workload: Workload, warm_s: float | None) -> Row:
    """Send all requests, a number of them at a time."""
    limits = httpx.Limits(max_connections=None)
    headers = _headers(way.api_key)
    async with httpx.AsyncClient(base_url=way.url, headers=headers, timeout=None, limits=limits) as http:
        for prompt in workload.warm_up:
            await _ask(http, way, prompt, 1, "")
        waiting = iter(list(enumerate(workload.prompts)))
        answers: list[_Answer] = []

        async def client() -> None:
            for number, prompt in waiting:
                answers.append(await _ask(http, way, prompt, workload.output_tokens, f"{name} {number}"))

        cpu, started = _cpu_s(way.pid), time.perf_counter()
        await asyncio.gather(*(client() for _ in range(workload.clients)))
        total_s, cpu_after = time.perf_counter() - started, _cpu_s(way.pid)
    prompt_tokens, cached, computed = (
        sum(getattr(answer, field) for answer in answers) for field in ("prompt_tokens", "cached", "computed")
    )
    ttft_s = percentile([answer.ttft_s for answer in answers], 0.5)
    cpu_s = None if cpu is None or cpu_after is None else cpu_after - cpu
    return Row(name, way.name, len(answers), prompt_tokens, ttft_s, total_s, cpu_s, warm_s, cached, computed)


async def _ask(http: httpx.AsyncClient, way: _Way, prompt: str, max_tokens: int, tag: str) -> _Answer:
    body = {"model": way.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}, **way.body}
    if way.tagged and tag:
        body["kv_transfer_params"] = {"kvrag": {"tag": tag}}
    usage: dict[str, Any] = {}
    report: dict[str, Any] = {}
    sent, ttft_s = time.perf_counter(), math.nan
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise KvragError(f"status {response.status_code}: {(await response.aread()).decode()[:200]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise KvragError(str(event["error"]))
            usage, report = event.get("usage") or usage, event.get("kvrag") or report
            if event.get("choices") and math.isnan(ttft_s):
                ttft_s = time.perf_counter() - sent
    if not usage:
        raise KvragError(f"{way.url} sent no usage: the stream ended early")
    if way.tagged and tag:
        report = await _report(http, way, tag)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    computed = usage["prompt_tokens"] - cached
    if report:
        cached, computed = report["reused_tokens"], report["fresh_tokens"] + report["recomputed_tokens"]
    return _Answer(ttft_s, usage["prompt_tokens"], cached, computed)


async def _report(http: httpx.AsyncClient, way: _Way, tag: str) -> dict[str, Any]:
    """Return the report of a streamed answer, which vLLM sends only later."""
    params = {"kvrag": {"mode": "report", "tag": tag}}
    body = {"model": way.model, "prompt": "-", "max_tokens": 1, "kv_transfer_params": params}
    content = (await http.post("/v1/completions", json=body)).json()
    report = dict((content.get("kv_transfer_params") or {}).get("kvrag") or {})
    if "error" in report:
        raise KvragError(report["error"])
    return report


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _cpu_s(pid: int | None) -> float | None:
    """Return the processor time, user and system, of a process group so far; None = unknown."""
    if pid is None or not Path("/proc/self/stat").exists():
        return None
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended
            continue
        if int(fields[2]) == pid:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _text(words: Words, tokens: float, rng: random.Random) -> str:
    return "".join(rng.choices(words, k=_tokens(tokens))) if tokens else ""


def _tokens(number: float) -> int:
    return max(1, round(number))


# ---------------------------------------------------------------- command
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS, help="(default: all)")
    parser.add_argument("--model", default="qwen2.5-0.5b", choices=SHAPES, help="shape of the random model")
    parser.add_argument("--layers", type=at_least(1), metavar="N", help="use only the first N layers")
    scales = ", ".join(f"{name} {scale:g}" for name, scale in SCALES.items())
    about = f"multiplies the tokens of documents, prompts and answers; 1 = as the originals (default: {scales})"
    parser.add_argument("--scale", type=at_least(1e-6, float), metavar="X", help=about)
    for name, (default, what) in ORIGINAL.items():
        add_number(parser, f"--{name.replace('_', '-')}", default, what, least=0 if name.startswith("system") else 1)
    modes = ("random", "tile", "interleave")
    parser.add_argument("--repeat-mode", default="random", choices=modes, help="document-qa: order of the repetitions")
    add_number(parser, "--seed", 0, "seed of texts and orders")
    add_number(parser, "--ratio", 0.15, "recompute ratio", most=1)
    add_number(parser, "--pages", 2, "GiB of KV pages of each server, on a CPU", least=1)
    parser.add_argument("--vllm", default="--enforce-eager", metavar="ARGS", help="further arguments of both servers")
    about = "further kv_connector_extra_config of vllm-kvrag"
    parser.add_argument("--extra", default="{}", type=json.loads, metavar="JSON", help=about)
    parser.add_argument("--base-url", metavar="URL", help="measure the server at this URL, e.g. http://127.0.0.1:8000")
    parser.add_argument("--model-name", metavar="NAME", help="its model (default: the first)")
    parser.add_argument("--api-key", metavar="KEY", help="its key")
    parser.add_argument("--warm", action="store_true", help="let it store the documents before: kvrag serve, or vLLM")
    about = "further fields of its requests"
    parser.add_argument("--body", default="{}", type=json.loads, metavar="JSON", help=about)


def run(args: argparse.Namespace) -> int:
    """Measure and print the results."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are stopped
    rows, settings = measure(args, progress=lambda line: print(line, file=sys.stderr, flush=True))
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "settings": settings}))
        return 0
    print(", ".join(f"{name} {value}" for name, value in settings.items()))
    columns = f"{'requests':>9}{'TTFT p50':>10}{'total':>10}{'CPU':>9}{'warming':>9}{'cached':>9}{'computed':>9}"
    print(f"\n{'':29}{columns}{'TTFT':>8}{'total':>8}{'CPU':>8}")
    for row in rows:
        ratios = row.ttft_ratio, row.total_ratio, row.cpu_ratio
        compared = "".join("" if ratio is None else f"{ratio:>7.2f}x" for ratio in ratios)
        cpu, warm = ("" if value is None else f"{value:.1f} s" for value in (row.cpu_s, row.warm_s))
        times = f"{row.ttft_p50_s:>8.2f} s{row.total_s:>8.1f} s{cpu:>9}{warm:>9}"
        print(f"{row.workload:12}{row.way:17}{row.requests:>9}{times}{row.cached:>9}{row.computed:>9}{compared}")
    return 0
