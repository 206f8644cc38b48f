"""examples/vllm_rag.py, which starts vLLM with the bundled model."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_example_answers_and_reuses(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join(map(str, (ROOT, ROOT / "integrations" / "vllm-kvrag")))
    ran = subprocess.run(
        [sys.executable, ROOT / "examples" / "vllm_rag.py", "--serve", str(port)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr + (tmp_path / "vllm.log").read_text()[-2000:]
    assert "30 documents: 30 chunks encoded now\n" in ran.stdout
    assert "in Danvik? Wilmax\n  sources: wilmax.txt, " in ran.stdout
    assert "harbour? Harfield\n  sources: harfield.txt, " in ran.stdout
    counts = re.findall(r"(\d+) of (\d+) prompt tokens reused, (\d+) recomputed", ran.stdout)
    assert len(counts) == 2
    for reused, tokens, recomputed in counts:
        assert int(tokens) / 2 < int(reused) < int(tokens)
        assert 0 < int(recomputed) < int(tokens)
