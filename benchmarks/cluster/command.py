"""Plan a cluster: GPUs for a time to first token, hit rates and costs, compared with prefix caching and full prefill.

The simulation is `replicas`. Speeds come from a profile: derived from the cost model of `simulate`, or measured with
--calibrate by the functions of `python -m benchmarks ttft` and `decode`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path

from benchmarks.cluster.plan import LOAD_SPEEDS, LOAD_UNITS, ROUTINGS, SHAPES, SPEEDS, Plan, Profile, profile_of
from benchmarks.cluster.replicas import BLEND, FULL, PREFIX, Outcome, outcome
from benchmarks.cluster.simulate import DEVICES
from kvrag.cli.common import add_number, at_least, existing_path
from kvrag.config import CODECS, DEFAULT_POLICY, POLICIES
from kvrag.errors import KvragError, SettingError


@dataclass(frozen=True)
class Case:
    """A change of the plan or of an assumption, and its outcomes."""

    name: str
    outcomes: dict[str, Outcome | None]


def variants(plan: Plan) -> dict[str, tuple[Plan, bool]]:
    """Return plans that differ in one decision, and whether it matters to the others, too."""
    stored = {f"{100 * share:g} % of the corpus stored": (replace(plan, stored=share), False) for share in _SHARES}
    routed = {f"{routing} routing": (replace(plan, routing=routing), True) for routing in ROUTINGS}
    others = {
        "controller off": (replace(plan, controller="off"), False),
        "no local disk": (replace(plan, disk_gib=0.0), False),
    }
    return stored | routed | others


_SHARES = (0.001, 0.01, 0.1, 1.0)

# the assumption, the fields of the profile or the plan, whether it matters to prefix caching, too
_ASSUMED: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    ("prefill tokens/s", ("prefill_tokens_per_s",), True),
    ("blending's share of full prefill", ("blend_share",), False),
    ("bandwidth RAM to model", ("ram_bytes_per_s",), False),
    ("bandwidth of the disk", ("disk_bytes_per_s",), False),
    ("bandwidth of the network", ("store_bytes_per_s", "store_total_bytes_per_s"), False),
    ("latency of the store", ("store_latency_s",), False),
    ("time of a decoding step", ("decode_step_s", "decode_answer_s"), True),
    ("Zipf's exponent", ("exponent",), True),
    ("requests/s", ("rate",), True),
    ("RAM for chunks", ("ram_gib",), False),
    ("disk for chunks", ("disk_gib",), False),
    ("price of a GPU", ("gpu_hour",), True),
    ("price of storage and reads", ("store_gb_month", "reads_thousand"), False),
)


def sensitivity(
    plan: Plan, profile: Profile, replicas: int | None, base: Outcome | None, progress: Callable[[str], None]
) -> Iterator[Case]:
    """Return the outcomes with each assumption halved and doubled.

    Args:
        base: Of prefix caching without a change.
    """
    for name, names, for_all in _ASSUMED:
        for factor in (0.5, 2.0):
            progress(f"{name} x {factor:g}")
            changes = {name: getattr(profile if name in SPEEDS else plan, name) * factor for name in names}
            speeds = {name: value for name, value in changes.items() if name in SPEEDS}
            sizes = {name: value for name, value in changes.items() if name not in SPEEDS}
            other_plan, other_profile = replace(plan, **sizes), replace(profile, **speeds)
            prefix = outcome(other_plan, other_profile, PREFIX, replicas) if for_all else base
            blend = outcome(other_plan, other_profile, BLEND, replicas)
            yield Case(f"{name} x {factor:g}", {BLEND: blend, PREFIX: prefix})


# -------------------------------------------------------------------- measured on this machine


def calibrate(plan: Plan, profile: Profile, model: str, args: argparse.Namespace) -> Profile:
    """Measure this machine with the functions of the other benchmarks; the rest stays assumed."""
    from benchmarks.settings import run_settings
    from benchmarks.shapes import random_model
    from benchmarks.speed import decode, ttft
    from benchmarks.speed.first_token import TtftSetup
    from kvrag.backend.transformers import Model

    progress = _say
    net = Model.from_pretrained("reader") if model == "reader" else random_model(model.lower())
    setup = TtftSetup(
        model.lower(),
        chunks=plan.chunks_per_prompt,
        chunk_tokens=plan.chunk_tokens,
        question_tokens=plan.question_tokens,
        policies=(args.policy,),
        ratio=args.ratio,
        repeats=args.repeats,
        ram_bytes=8 << 30,
    )
    size = plan.chunks_per_prompt * plan.chunk_tokens * net.bytes_per_token
    warm, limits = ttft.measure(setup, progress, net, with_prefix=False)
    _, cold_limits = ttft.measure(replace(setup, ram_bytes=0, cold=True), progress, net, with_prefix=False)
    full, blend = warm.rows
    load_s = limits[blend.name].load_alone_s, cold_limits[blend.name].load_alone_s
    answers = decode.measure(net, repeats=args.repeats, progress=progress)
    # tokens per second of one answer and of several: seconds of a step = a + b x answers
    rows = decode.ROWS
    one_s, rows_s = 1 / answers["alone"], rows / answers["together"]
    answer_s = min(max((rows_s - one_s) / (rows - 1), 0.0), one_s)
    measured = {
        "prefill_tokens_per_s": warm.prompt_tokens / full.ttft_s,
        "blend_share": max(blend.ttft_s - load_s[0], 1e-6) / full.ttft_s,  # the layout is counted by ram_bytes_per_s
        "ram_bytes_per_s": size / load_s[0],
        "disk_bytes_per_s": size / load_s[1],
        "decode_step_s": one_s - answer_s,
        "decode_answer_s": answer_s,
    }
    settings = ", ".join(f"{name} {value}" for name, value in run_settings(net).items())
    source = f"{warm.prompt_tokens} tokens, {args.policy} at {args.ratio:g}; {settings}; the rest: {profile.source}"
    return replace(profile, **measured, measured=tuple(measured), source=source)


# -------------------------------------------------------------------- the command

_PROFILED = ("device", "ratio", "policy")


def plan_of(args: argparse.Namespace) -> Plan:
    """Return the plan that the options describe."""
    import torch

    from kvrag.store.codec import share

    shape = SHAPES[args.model]
    given = {field.name: getattr(args, field.name) for field in fields(Plan) if hasattr(args, field.name)}
    packed = share(args.codec, args.chunk_tokens, shape.head_dim, torch.bfloat16)
    return Plan(**given, kv_bytes=shape.bytes_per_token, stored_bytes=shape.bytes_per_token * packed)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    default = Plan()
    parser.add_argument("--model", default="Llama-3.1-8B", choices=SHAPES, help="model (default: Llama-3.1-8B)")
    parser.add_argument("--device", default="H100", choices=DEVICES, metavar="DEVICE", help="GPU (default: H100)")
    parser.add_argument("--codec", default="int8", choices=CODECS, help="codec of stored chunks (default: int8)")
    add_number(parser, "--ratio", 0.15, "recompute ratio")
    parser.add_argument("--policy", default=DEFAULT_POLICY, choices=POLICIES, help="which tokens are recomputed")
    parser.add_argument("--profile", type=existing_path, metavar="FILE", help="speeds, as written by --calibrate")
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="measure this machine with --model, write the speeds to FILE and use them; what it cannot measure stays "
        "as assumed for --device; takes minutes",
    )
    parser.add_argument("--repeats", type=at_least(1), default=1, metavar="N", help="with --calibrate: rounds")
    parser.add_argument(
        "--replicas", type=at_least(1), metavar="N", help="copies of the model (default: as many as the target needs)"
    )
    parser.add_argument(
        "--controller",
        default=default.controller,
        choices=("auto", "off"),
        help="auto: full prefill where the engine would choose it; off: always blend (default: auto)",
    )
    parser.add_argument(
        "--routing",
        default=default.routing,
        choices=ROUTINGS,
        help="replica of a request: any, or the home of most of its chunks (default: random)",
    )
    for name, what, least in (
        ("chunks", "chunks of the corpus", 1),
        ("chunk_tokens", "tokens per chunk", 1),
        ("chunks_per_prompt", "chunks per prompt", 1),
        ("system_tokens", "tokens of the system prompt, in every cache", 0),
        ("question_tokens", "tokens of the question", 1),
        ("answer_tokens", "tokens of the answer", 1),
        ("exponent", "of Zipf's law, the popularity of chunks", 0),
        ("rate", "requests per second", 1e-6),
        ("target_s", "time to first token of 95 %% of the requests", 1e-6),
        ("gpus_per_replica", "GPUs that hold one copy of the model, by tensor parallelism", 1),
        ("device_gib", "GiB for chunks in a replica's GPU memory, `--device-gib` of `kvrag serve`", 0),
        ("ram_gib", "GiB for chunks in a replica's RAM", 0),
        ("disk_gib", "GiB for chunks on a replica's disk", 0),
        ("stored", "share of the corpus that is warmed, the most popular chunks", 0),
        ("prefix_gib", "GiB of a replica's GPU memory that prefix caching uses", 0),
        ("gpu_hour", "price of a GPU with its host per hour", 0),
        ("store_gb_month", "price of 10^9 stored bytes per month", 0),
        ("reads_thousand", "price of 1,000 reads of 4 MiB from the store", 0),
        ("requests", "requests to simulate", 100),
        ("seed", "of everything that is drawn", 0),
    ):
        add_number(parser, f"--{name.replace('_', '-')}", getattr(default, name), what, least)
    for option, name, what in (
        ("--disk-gb-s", "disk_bytes_per_s", "GB/s of a local disk"),
        ("--store-gb-s", "store_bytes_per_s", "GB/s from the shared store to one machine"),
        ("--store-total-gb-s", "store_total_bytes_per_s", "GB/s from the shared store to all machines"),
        ("--store-latency-ms", "store_latency_s", "milliseconds until the shared store sends the first byte"),
    ):
        parser.add_argument(
            option,
            type=at_least(0 if name == "store_latency_s" else 1e-6, float),
            dest=name,
            metavar="N",
            help=f"{what} (default: the profile's, else {LOAD_SPEEDS[name] / LOAD_UNITS[name]:g}, assumed)",
        )
    parser.add_argument("--brief", action="store_true", help="leave out other decisions and other assumptions")


def run(args: argparse.Namespace) -> int:
    """Simulate, and print the tables."""
    if find_spec("simpy") is None:
        raise KvragError("simpy is not installed: pip install simpy")
    if args.profile and args.calibrate:
        raise SettingError("--calibrate writes the profile that --profile reads: give one of them")
    if args.profile and any(getattr(args, name) != args.parser.get_default(name) for name in _PROFILED):
        raise SettingError("--device, --ratio and --policy are part of a profile: leave them out with --profile")
    plan = plan_of(args)
    loads = {name: getattr(args, name) * unit for name, unit in LOAD_UNITS.items() if getattr(args, name) is not None}
    if args.profile:
        profile = Profile.read(args.profile)
        measured = tuple(name for name in profile.measured if name not in loads)
        profile = replace(profile, **loads, measured=measured)
    else:
        profile = profile_of(args.device, args.model, plan, args.ratio, args.policy, loads)
    if args.calibrate:
        profile = calibrate(plan, profile, args.model, args)
        profile.write(args.calibrate)
    systems = {system: _simulated(plan, profile, system, args.replicas) for system in (BLEND, PREFIX, FULL)}
    others, assumed = [], []
    if not args.brief:
        for name, (other, for_all) in variants(plan).items():
            _say(name)
            prefix = outcome(other, profile, PREFIX, args.replicas) if for_all else systems[PREFIX]
            others.append(Case(name, {BLEND: outcome(other, profile, BLEND, args.replicas), PREFIX: prefix}))
        assumed = list(sensitivity(plan, profile, args.replicas, systems[PREFIX], _say))
    if args.json:
        result = {"plan": asdict(plan), "profile": asdict(profile)}
        result["systems"] = {
            name: forecast and asdict(forecast) | {"cost": forecast.cost} for name, forecast in systems.items()
        }
        for title, cases in (("variants", others), ("sensitivity", assumed)):
            result[title] = {
                case.name: {
                    name: forecast and asdict(forecast) | {"cost": forecast.cost}
                    for name, forecast in case.outcomes.items()
                }
                for case in cases
            }
        print(json.dumps(result))
        return 0
    print(_text(plan, profile, systems))
    for title, cases in (("Decisions", others), ("Each assumption halved and doubled", assumed)):
        if cases:
            print(f"\n### {title}\n\n{_table(cases)}")
    return 0


def _simulated(plan: Plan, profile: Profile, system: str, replicas: int | None) -> Outcome | None:
    _say(f"simulating {system}")
    return outcome(plan, profile, system, replicas)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _text(plan: Plan, profile: Profile, systems: dict[str, Outcome | None]) -> str:
    """Return the assumptions and the comparison."""
    lines = [f"Profile: {profile.source}\n", "| | per replica | |", "|---|---|---|"]
    for name in SPEEDS:
        origin = "measured" if name in profile.measured else "**assumed, unmeasured**"
        lines.append(f"| `{name}` | {getattr(profile, name):,.4g} | {origin} |")
    warmed_s = plan.stored * plan.chunks * plan.chunk_tokens / profile.prefill_tokens_per_s
    gpu_h = warmed_s * plan.gpus_per_replica / 3600
    lines += [
        f"\n{plan.rate:g} requests/s of {plan.prompt_tokens} tokens with {plan.chunks_per_prompt} of {plan.chunks:,} "
        f"chunks, Zipf {plan.exponent:g}, answers of {plan.answer_tokens} tokens, {plan.routing} routing.",
        f"Warmed: {plan.stored:.2%} of the chunks, the most popular ones: {plan.stored_bytes_total / 1e12:.1f} TB, "
        f"{gpu_h:,.0f} GPU hours (${gpu_h * plan.gpu_hour:,.0f}) once.\n",
    ]
    lines += [
        "| | GPUs | TTFT p50 | p95 | p99 | ms per token | reused | busy | per 1,000 requests | GPUs, storage, reads |",
        "|---" * 10 + "|",
    ]
    for system, forecast in systems.items():
        if forecast is None:
            lines.append(f"| {system} | p95 of {plan.target_s:g} s is out of reach" + " | " * 8 + " |")
            continue
        ttft = " | ".join(f"{value:.2f} s" for value in forecast.ttft_s)
        parts = f"${forecast.gpu_cost:.3f}, ${forecast.store_cost:.3f}, ${forecast.read_cost:.3f}"
        lines.append(
            f"| {system} | {forecast.gpus} | {ttft} | {forecast.token_s * 1000:.0f} | {forecast.reused:.0%} "
            f"| {forecast.busy:.0%} | ${forecast.cost:.3f} | {parts} |"
        )
    blend = systems[BLEND]
    if blend is not None:
        rates = ", ".join(f"{name} {share:.1%}" for name, share in blend.hits.items())
        lines.append(f"\nChunks came from: {rates}. Full prefill was chosen for {blend.full:.0%} of the prompts.")
    return "\n".join(lines)


def _table(cases: Sequence[Case]) -> str:
    """Return a Markdown table: kvrag's outcome, and its cost relative to prefix caching."""
    lines = [
        "| | GPUs | prefix caching | TTFT p95 | computed | per 1,000 requests | of prefix caching's |",
        "|---" * 7 + "|",
    ]
    for case in cases:
        blend, prefix = case.outcomes[BLEND], case.outcomes[PREFIX]
        cells = ["-"] * 6
        if prefix is not None:
            cells[1] = str(prefix.gpus)
        if blend is not None:
            computed = f"{blend.hits['computed']:.0%}"
            cells[0], cells[2:5] = str(blend.gpus), [f"{blend.ttft_s[1]:.2f} s", computed, f"${blend.cost:.3f}"]
        if blend is not None and prefix is not None:
            cells[5] = f"{blend.cost / prefix.cost:.2f}"
        lines.append(f"| {case.name} | {' | '.join(cells)} |")
    return "\n".join(lines)
