"""The sample articles, and the demo's questions about them with their answers."""

from __future__ import annotations

import runpy
from pathlib import Path

_EXAMPLES = Path(__file__).parents[1] / "examples"

FOLDER = _EXAMPLES / "corpus"
QUESTIONS: dict[str, str] = runpy.run_path(str(_EXAMPLES / "demo.py"))["QUESTIONS"]
