"""A policy is one file: settings, command line, engine and controller find it there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kvrag

POLICY = '''
"""The last tokens of every run."""

import torch

from kvrag.reuse.policies import Passes, Policy


class LastK(Policy):
    def score(self, backend, request, budget):
        scores = torch.full((len(request.ids),), -torch.inf)
        for run in request.runs:
            scores[run.start : run.stop] = torch.arange(len(run), dtype=torch.float32)
        return scores

    def passes(self, num_layers):
        return Passes(detection=0.5)
'''

USES = """
from pathlib import Path

import kvrag
from kvrag import POLICIES, BlendConfig, BlendEngine, FileStore, Model
from kvrag.cli.main import main
from kvrag.control.cost import Speed, Workload, blend_seconds
from kvrag.reuse.policies import Passes
from kvrag.reuse.blend import selecting

assert "last_k" in POLICIES
assert BlendConfig(policy="last_k").policy == "last_k"

model = Model.from_pretrained(str(Path(kvrag.__file__).parent / "reader"))
chunks = [f"In {year} the harbour was enlarged by {year % 9} rooms, and {year} people came to see it." for year in
          (1701, 1805, 1912)]
with BlendEngine(model, FileStore("store", min_free_bytes=0), BlendConfig(context_tokens=0)) as engine:
    engine.warm(chunks)
    prompt = [{"role": "user", "content": "\\n\\n".join(chunks) + "\\n\\nWhen?"}]
    report = engine.generate(prompt, policy="last_k", ratio=0.1, max_new_tokens=1).report
    done = engine.prefill(engine.tokenize(prompt), BlendConfig(policy="last_k", ratio=0.1))
assert (report.policy, report.recomputed_tokens) == ("last_k", len(done.selected))
ends = [run.stop for run in report.runs]
recomputed = [(min(end - at for end in ends if end > at), at) for at in done.selected.tolist()]
assert len(recomputed) > 3 and max(recomputed)[0] <= 5, (recomputed, report.runs)

speed, shares = Speed(0.01, 1e-3, 1e-7, 1e-6, 1e9), selecting(BlendConfig(policy="last_k"), 6)
times = [blend_seconds(speed, Workload(2000, 1800, 1700, 0, passes), 0.15) for passes in (shares, Passes())]
assert times[0] > times[1] + 0.5

for command in (["ask", "When?", "--policy", "last_k", "--help"], ["ask", "When?", "--policy", "lost_k"]):
    try:
        main(command)
    except SystemExit as end:
        print(end.code)
"""


def _link(folder: Path, source: Path, but: str) -> Path:
    """Make a folder with links to everything in another one, except for one entry, which is returned."""
    folder.mkdir()
    for path in source.iterdir():
        if path.name not in (but, "__pycache__"):
            (folder / path.name).symlink_to(path)
    return folder / but


def test_a_new_file_adds_a_policy_everywhere(tmp_path: Path) -> None:
    source = Path(kvrag.__file__).parent
    reuse = _link(tmp_path / "kvrag", source, "reuse")
    policies = _link(reuse, source / "reuse", "policies")
    _link(policies, source / "reuse" / "policies", "last_k.py").write_text(POLICY)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", USES], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "2"
    assert (
        "'lost_k' (choose from 'none', 'full', 'first_k', 'hkvd', 'last_k', 'query', 'random', 'tail')" in done.stderr
    )
    assert "last_k" in done.stdout, "it is among the choices of the command line"
