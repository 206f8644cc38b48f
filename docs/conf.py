"""Settings of the documentation site: `make docs`."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import commands

import kvrag

project, author, copyright = "kvrag", "the kvrag authors", "the kvrag authors, Apache-2.0"
version = release = kvrag.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"kvrag {release}"
html_copy_source = False

myst_heading_anchors = 4  # links to headings, like GitHub

highlight_language = "none"  # indented blocks are shell commands
default_role = "code"  # docstrings write `name`, like Markdown
suppress_warnings = ["ref.python"]  # several packages have classes with the same name, which type hints do not qualify
napoleon_use_ivar = True  # attributes in one list; several may share a line
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
add_module_names = False


def _as_docutils_reads_it(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Convert `lines` in place: Markdown's fenced code, and attributes that share a description."""
    converted: list[str] = []
    fence: str | None = None
    for line in lines:
        opened = re.match(r"(\s*)```(\w*)$", line)
        if opened and fence is None:
            fence = opened[1]
            converted += [f"{fence}.. code-block:: {opened[2] or 'text'}", ""]
        elif opened:
            fence = None
            converted.append("")
        elif fence is not None:
            converted.append(f"   {line}")
        else:
            converted.append(re.sub(r"^\s+\w+(, \w+)+(?=: )", lambda names: names[0].replace(", ", ","), line))
    lines[:] = converted


def _write_commands(app: Any) -> None:
    """Write the command line reference, which is not committed."""
    page, text = Path(app.srcdir) / "commands.md", commands.reference()
    if not page.exists() or page.read_text() != text:
        page.write_text(text)


def setup(app: Any) -> None:
    """Connect the extensions; called by Sphinx."""
    app.connect("builder-inited", _write_commands)
    app.connect("autodoc-process-docstring", _as_docutils_reads_it, priority=400)  # before napoleon
