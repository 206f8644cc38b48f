"""The command: every campaign in a process of its own, then one report."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from torture.campaign import Campaign, Failure, Limits, Result

ROOT = Path(__file__).parents[2]
PAGE = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- last run -->", "<!-- end of last run -->"
_CRASHES = 20  # of one campaign, which then ends
_VLLM = ROOT / ".venv-vllm"

COUNTS = {
    "kill": 100,
    "damage": 2000,
    "records": 500,
    "faults": 500,
    "operations": 500,
    "machines": 2000,
    "abandoned": 300,
    "matching": 2000,
    "documents": 150,
    "fuzz": 5000,
    "vllm": 100,
    "decay": 6,
    "soak": 600,
}
"""Default number of cases of each campaign, in the order in which they run; of `soak`, seconds."""

UNITS = {
    "kill": "kills",
    "damage": "damaged stores",
    "records": "damaged records",
    "faults": "injected faults",
    "operations": "operations",
    "machines": "operations",
    "abandoned": "groups of streams",
    "matching": "prompts",
    "documents": "hostile documents",
    "fuzz": "requests",
    "decay": "runs",
    "soak": "requests",
    "vllm": "mixes of requests",
}


def main(argv: list[str] | None = None) -> int:
    """Run the campaigns; return 1 if a case failed."""
    args = _parser().parse_args(argv)
    if args.table:
        write_table(Path(args.table), Path(args.page))
        return 0
    if args.child:
        _run_one(args)
        return 0
    names = args.only.split(",") if args.only else [*COUNTS]
    if unknown := set(names) - COUNTS.keys():
        raise SystemExit(f"there is no campaign {', '.join(sorted(unknown))}: choose from {', '.join(COUNTS)}")
    out = Path(args.out or tempfile.mkdtemp(prefix="kvrag-torture-")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    print(f"seed {args.seed}, results in {out}", flush=True)
    began = time.strftime("%Y-%m-%d %H:%M")
    results = []
    for name in names:
        if name == "vllm" and not (_VLLM / ".done").exists():
            results.append(Result(name, args.seed, left_out="vLLM is not installed: run `make setup-vllm`"))
        else:
            results.append(_in_a_process(name, args, out, len(names)))
        _report(results, began, args.seed, out)
    print((out / "report.md").read_text())
    return 1 if any(result.failures for result in results) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python tests/torture", description=__doc__)
    parser.add_argument("--hours", type=float, help="run this long, shared among the campaigns, instead of the counts")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the default counts (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices (default: 0)")
    parser.add_argument("--only", default="", metavar="NAME,...", help=f"of {', '.join(COUNTS)}")
    parser.add_argument("--case", type=int, help="run this case only, of one campaign")
    parser.add_argument(
        "--store", choices=("folder", "s3"), default="folder", help="stores of `kill` (default: folder)"
    )
    parser.add_argument("--out", metavar="FOLDER", help="of the reports (default: a new temporary folder)")
    parser.add_argument("--table", metavar="REPORT.json", help="only write this report's table into the page")
    parser.add_argument("--page", metavar="FILE", default=str(PAGE), help="the page for --table")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    return parser


def _in_a_process(name: str, args: argparse.Namespace, out: Path, num_campaigns: int) -> Result:
    """Run a campaign; if its process dies, record that and continue with the next case in a new process."""
    # vLLM has an environment of its own
    python, folders = sys.executable, [ROOT, ROOT / "tests", ROOT / "tests" / "helpers"]
    if name == "vllm":
        python, vllm = str(_VLLM / "bin" / "python"), ROOT / "integrations" / "vllm-kvrag"
        folders += [vllm, vllm / "tests"]
    command = [python, str(Path(__file__).parent), "--child", name, "--out", str(out), "--seed", str(args.seed)]
    command += ["--scale", str(args.scale), "--store", args.store]
    if args.hours:
        command += ["--seconds", str(3600 * args.hours / num_campaigns)]
    if args.case is not None:
        command += ["--case", str(args.case)]
    settings = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    here = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    first, path = 0, out / f"{name}.json"
    path.unlink(missing_ok=True)
    (out / f"{name}.current").unlink(missing_ok=True)
    for _ in range(_CRASHES):
        done = subprocess.run(
            [*command, "--first", str(first)], env={**os.environ, **settings, "PYTHONPATH": here}, check=False
        )
        if done.returncode == 0:
            return Result.read(path)
        begun = (out / f"{name}.current").exists()
        case, complete = map(int, (out / f"{name}.current").read_text().split()) if begun else (0, 0)
        result = Result.read(path) if path.exists() else Result(name, args.seed)
        how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"status {done.returncode}"
        result.failures.append(Failure(case, args.seed, f"the process ended with {how} in this case"))
        result.cases = complete + 1
        result.write(path)
        print(f"{name}: case {case} of seed {args.seed} failed: the process ended with {how}", flush=True)
        if args.case is not None or not begun or case < first:
            break
        first = case + 1
    return Result.read(path)


def _run_one(args: argparse.Namespace) -> None:
    count = max(1, round(args.scale * COUNTS[args.child]))
    limits = Limits(args.seed, count, args.seconds, args.first, args.case)
    folder = Path(tempfile.mkdtemp(prefix=f"kvrag-torture-{args.child}-"))
    campaign = Campaign(args.child, limits, folder, Path(args.out), {"store": args.store, "scale": args.scale})
    try:
        importlib.import_module(f"torture.{args.child}").run(campaign)
        campaign.save()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# -------------------------------------------------------------------- the report


def _report(results: list[Result], began: str, seed: int, out: Path) -> None:
    """Write report.json and report.md."""
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    report = {
        "began": began,
        "seed": seed,
        "commit": head.stdout.strip(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}",
        "versions": {name: version(name) for name in ("torch", "transformers")} | {"python": platform.python_version()},
        "campaigns": [asdict(result) for result in results],
    }
    (out / "report.json").write_text(json.dumps(report, indent=1))
    (out / "report.md").write_text("# Torture report\n\n" + table(report) + _failures(results))


def table(report: dict[str, object]) -> str:
    """Return a report as a Markdown table with its circumstances below."""
    campaigns = report["campaigns"]
    assert isinstance(campaigns, list)
    lines = ["| campaign | cases | failures | seed | minutes | figures |", "|---|---|---|---|---|---|"]
    for each in campaigns:
        if each["left_out"]:
            lines.append(f"| `{each['name']}` | left out: {each['left_out']} | | | | |")
            continue
        figures = "; ".join(f"{name} {_shown(value)}" for name, value in each["figures"].items() if name != "kinds")
        lines.append(
            f"| `{each['name']}` | {each['cases']:,} {UNITS[each['name']]} | {len(each['failures'])} | {each['seed']} "
            f"| {each['seconds'] / 60:.1f} | {figures} |"
        )
    versions = ", ".join(f"{name} {number}" for name, number in dict(report["versions"]).items())  # type: ignore[call-overload]
    began, commit, machine = (report[name] for name in ("began", "commit", "machine"))
    return "\n".join([*lines, "", f"{began}, commit {commit}. {machine}. {versions}.", ""])


def _shown(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _failures(results: list[Result]) -> str:
    lines = []
    for result in results:
        for failure in result.failures:
            lines += ["", f"## `{result.name}`, case {failure.case}", "", failure.what, ""]
            lines += [f"    make torture ONLY={result.name} SEED={failure.seed} CASE={failure.case}", ""]
            lines += [f"    {line}" for line in failure.details.splitlines()]
    return "\n".join(["", *lines, ""]) if lines else "\nNo failures.\n"


def write_table(report: Path, page: Path) -> None:
    """Replace the table of the last run in the page."""
    text = page.read_text()
    between = f"{BEGIN}\n\n{table(json.loads(report.read_text()))}\n{END}"
    written, count = re.subn(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: between, text, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"{page} must have one pair of {BEGIN} and {END}")
    page.write_text(written)
