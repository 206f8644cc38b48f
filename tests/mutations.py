"""Break the core one line at a time and report which tests notice: `python tests/mutations.py`.

Works on a copy of the checkout. For each mutation it first runs the nearest files of the fast suite, and the whole
fast suite if these pass; with --all, also the slow tests. Exits with 1 if a mutation is not caught.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FAST = ["-m", "not slow", "tests/unit", "tests/integration", "integrations"]
INTEGRATIONS = ROOT / "integrations"


class Mutation(NamedTuple):
    """Replace `old`, which occurs once in the files of a glob below kvrag/, by `new`.

    `tests` are the nearest files, below tests/unit.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


LANGCHAIN, LLAMA = "../../integrations/langchain-kvrag/tests", "../../integrations/llama-index-llms-kvrag/tests"

MUTATIONS = [
    Mutation("ratio rounded down", "reuse/blend.py", "budget = round(", "budget = int(", "reuse/test_select.py"),
    Mutation(
        "lowest scores first", "reuse/blend.py", "config.margin)), len(inexact)))",
        "config.margin)), len(inexact)), largest=False)", "reuse/test_select.py",
    ),
    Mutation(
        "deviation of values ignored", "reuse/policies/hkvd.py", " + _distances(fresh_values, values[:, :, at])",
        "", "reuse/test_select.py",
    ),
    Mutation("rotation sign", "backend/positions.py", "addcmul_(second, s, value=-1)", "addcmul_(second, s)",
             "backend/test_positions.py"),
    Mutation("scaled tables", "backend/positions.py", "-sin / scale, pairs)", "-sin, pairs)",
             "backend/test_positions.py"),
    Mutation("mask", "backend/positions.py", "hidden = keys > rows", "hidden = keys >= rows",
             "backend/test_rows.py"),
    Mutation("window", "backend/positions.py", "hidden |= keys < first_key(", "hidden |= keys <= first_key(",
             "backend/test_rows.py ../integration/test_families.py"),
    Mutation("chunk key without context", "store/values.py", "_tokens(context), _tokens(ids))", "_tokens(ids))",
             "ingest/test_ingest.py"),
    Mutation("text key without namespace", "store/values.py", "return _hash(namespace.encode(), _tokens(ids))",
             "return _hash(_tokens(ids))", "store/test_store_protocol.py test_engine.py"),
    Mutation("fingerprint without RoPE", "fingerprint.py", 'if name != "model"}', 'if name not in ("model", "rope")}',
             "backend/test_model.py"),
    Mutation("digest of a layer", "store/chunkfile.py", "if _digest(content.numpy().data) != self._digests[number]:",
             "if not self._digests[number]:", "store/test_store.py"),
    Mutation("key of a file", "store/chunkfile.py", "if actual != self.key:", "if not actual:", "store/test_store.py"),
    Mutation("budget", "store/base.py", "if self._manifest.num_bytes(namespace) + needed > max_bytes:",
             "if self._manifest.num_bytes(namespace) > max_bytes:", "store/test_eviction.py"),
    Mutation("exact flag", "reuse/blend.py", "_preamble and not reader.context_tokens and",
             "_preamble and", "reuse/test_blend.py"),
    Mutation("exact in the middle", "reuse/blend.py", "run.offset == 0 and tuple(ids[: run.start].tolist())",
             "tuple(ids[: run.start].tolist())", "test_engine.py reuse"),
    Mutation("last position reused", "reuse/blend.py", "reused[-1] = False", "reused[-1] = reused[-1]",
             "reuse/test_blend.py"),
    Mutation("namespace check", "memory/conversation.py", "self._roots.get(namespace)\n        path",
             "next(iter(self._roots.values()), None)\n        path",
             "memory/test_conversations.py test_engine.py"),
    Mutation("variant rule", "store/values.py", "if context_tokens == 0), None)", "if context_tokens >= 0), None)",
             "ingest/test_ingest.py"),
    Mutation("alone only", "store/values.py", "if len(state.sources) == 1 and not alone_only:",
             "if len(state.sources) == 1:", "ingest/test_ingest.py"),
    Mutation("codec scale", "store/values.py", "(high / levels - low / levels)", "(high - low) / (levels + 1)",
             "store/test_codec.py"),
    Mutation("order of nibbles", "store/values.py", "[codes & 15, codes >> 4]", "[codes >> 4, codes & 15]",
             "store/test_codec.py"),
    Mutation("no WAL", "store/*.py", "PRAGMA journal_mode=WAL", "PRAGMA journal_mode=DELETE",
             "store/test_store.py"),
    Mutation("a partial file stays", "store/files.py",
             "    finally:\n        tmp.unlink(missing_ok=True)\n", "    finally:\n        pass\n",
             "store/test_store.py"),
    Mutation("no flush to disk", "store/files.py", "os.fsync(file.fileno())", "file.flush()", "store/test_store.py"),
    Mutation("stop strings", "generate/decode.py", "text[: min(starts)] if starts", "text[: max(starts)] if starts",
             "generate/test_decode.py"),
    Mutation("beginning of a stop string", "generate/decode.py", "n in range(1, len(stop))", "n in range(2, len(stop))",
             "generate/test_decode.py"),
    Mutation("context window", "backend/transformers/model.py", "over = num_tokens + 1 -", "over = num_tokens -",
             "backend/test_model.py test_engine.py"),
    Mutation("controller", "control/plan.py", "if speed and full_s + noticeable_s <= blend_s:",
             "if full_s + noticeable_s >= blend_s:", "control/test_controller.py"),
    Mutation("doubts during answers", "control/plan.py", "blend_s + doubts_s) / full_s", "blend_s) / full_s",
             "control/test_plan.py"),
    Mutation("the first token's doubt", "reuse/blend.py", "self.deepened.token == token == 0", "False",
             "../integration/test_adaptive.py"),
    Mutation("nested shares", "reuse/blend.py", "ranked[budget:].sort()", "ranked[:budget].sort()",
             "../integration/test_adaptive.py"),
    Mutation("states behind a gap", "backend/transformers/rows.py", "known.get(start, {})", "self._now[1]",
             "../integration/test_states.py"),
    Mutation("evidence of two processes", "control/evidence.py", "table - added.get(name, 0.0)",
             "table", "control/test_evidence.py"),
    Mutation("starts of which nothing is known", "control/plan.py", "one.seen >= ENOUGH", "True",
             "control/test_plan.py"),
    Mutation("conversation with a lower ratio", "memory/conversation.py", "self.config.ratio >= config.ratio",
             "self.config.ratio <= config.ratio", "memory/test_conversations.py"),
    Mutation("LangChain's usage", "../integrations/langchain-kvrag/langchain_kvrag/settings.py",
             "cache_read=report.reused_tokens", "cache_read=report.prompt_tokens - report.fresh_tokens",
             LANGCHAIN),
    Mutation("LlamaIndex's usage", "types.py", '"completion_tokens": answered', '"completion_tokens": prompt', LLAMA),
    Mutation("exit code", "cli/main.py", "return _fail(str(error), 1)", "return _fail(str(error), 0)",
             "cli/test_cli.py"),
]  # fmt: skip


def main() -> int:
    """Run the mutations; print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], help="names that contain one of these")
    parser.add_argument("--all", action="store_true", help="run the slow tests for what the fast ones do not catch")
    parser.add_argument("--nearest", action="store_true", help="run only the nearest files")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    mutations = [mutation for mutation in MUTATIONS if any(part in mutation.name for part in args.only)]
    missed = 0
    with tempfile.TemporaryDirectory(prefix="mutations") as folder:
        copy = _copy(Path(folder) / "kvrag")
        for mutation in mutations:
            _path(copy, mutation)  # all patterns are checked before any test is run
        for mutation in mutations:
            start, path = time.monotonic(), _path(copy, mutation)
            sound = path.read_text()
            path.write_text(sound.replace(mutation.old, mutation.new))
            try:
                caught = _caught(copy, mutation, args)
            finally:
                path.write_text(sound)
            missed += not caught
            file, seconds = path.relative_to(copy.resolve()), time.monotonic() - start
            print(f"| {mutation.name} | {file} | {caught or 'NOT CAUGHT'} | {seconds:.0f} s |", flush=True)
    print(f"{len(mutations) - missed} of {len(mutations)} caught")
    return int(missed > 0)


def _copy(folder: Path) -> Path:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def _path(copy: Path, mutation: Mutation) -> Path:
    """Return the file that the pattern occurs in."""
    folder = copy / "kvrag"
    paths = [path for path in folder.glob(mutation.file) for _ in range(path.read_text().count(mutation.old))]
    if len(paths) != 1:
        sys.exit(f"{mutation.name}: {mutation.old!r} occurs {len(paths)} times in {mutation.file}")
    return paths[0].resolve()


def _caught(copy: Path, mutation: Mutation, args: argparse.Namespace) -> str:
    """Return the first test that fails, with the suite it is in; "" = none does."""
    nearest = [os.path.normpath(f"tests/unit/{name}") for name in mutation.tests.split()]
    if found := _failing(copy, ["-m", "not slow", *nearest]):
        return found
    spread = ["-n", str(args.jobs), "--dist", "loadfile"]
    if not args.nearest and (found := _failing(copy, [*spread, *FAST])):
        return f"{found} (fast suite)"
    if args.all and (found := _failing(copy, [*spread, "-m", "slow"])):
        return f"{found} (slow)"
    return ""


def _failing(copy: Path, arguments: Sequence[str]) -> str:
    """Return the first test that fails."""
    folders = [copy, *(copy / "integrations" / path.name for path in INTEGRATIONS.iterdir())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        sys.exit(f"the tests did not run:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+?)(?:\[.*)?(?: - .*)?$", done.stdout, re.MULTILINE)
    return f"{failed[1]}" if failed else ""


if __name__ == "__main__":
    sys.exit(main())
