"""Suites that the torch backend passes, on a GGUF file in llama.cpp."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")
pytest.importorskip("transformers", minversion="5.24")

from families import build
from gguf_files import needs_library, write_gguf
from processes import GGUF

pytestmark = needs_library
ROOT = Path(__file__).parents[2]

# file -> the tests that can run there; others look into torch's modules, use no model, or compare tokens of answers
# alone with those of shared steps, which round otherwise
SUITES = {
    "tests/slow/test_two_processes.py": "not third_reads",
    "tests/integration/test_forget.py": "",
    "tests/integration/test_forget_bytes.py": "not sqlite",
    "tests/integration/test_security.py": "pickle",
    "tests/unit/generate/test_batch.py": "may_send or in_order or closed_ends or may_be_closed or last_token",
}


@pytest.mark.parametrize("suite", SUITES)
def test_suite(suite: str, tokenizer: Any, tmp_path: Path) -> None:
    hf = build("llama", max_position_embeddings=2048)
    path = write_gguf(tmp_path / "tiny.gguf", "llama", hf, tokenizer, "F16")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", ""]
    command += [f"--basetemp={tmp_path / 'suite'}", suite, "-k", SUITES[suite]]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, GGUF: str(path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
