"""Run a script like `python SCRIPT ...`, in a process that starts quickly because common imports are already loaded.

Processes are forked from one that has imported torch and transformers, but has not computed anything.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        *("transformers.models.llama.modeling_llama", "transformers.models.bert.modeling_bert"),
        *("kvrag.engine", "langchain_kvrag", "sentence_transformers"),
    ]
)


def start(script: Path, *arguments: str, folder: Path, stdin: Sequence[str] = ()) -> BaseProcess:
    """Run it in this folder, where its output goes into the files `stdout` and `stderr`."""
    process = CONTEXT.Process(target=_run, args=(script, arguments, folder, "".join(f"{line}\n" for line in stdin)))
    process.start()
    return process


def _run(script: Path, arguments: Sequence[str], folder: Path, stdin: str) -> None:
    import torch

    from kvrag.control import plan

    # as in conftest.py: nothing must depend on how busy the machine is, and threads would wait for each other
    plan.CPU_SHARE, plan.NOTICEABLE_S = 0.0, float("inf")
    torch.set_num_threads(1)
    os.chdir(folder)
    for number, name in enumerate(("stdout", "stderr"), 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdin = io.StringIO(stdin)
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")
