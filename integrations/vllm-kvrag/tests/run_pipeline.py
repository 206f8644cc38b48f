"""Start a pipeline of two processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"

from vllm import LLM
from vllm_engines import settings_of

if __name__ == "__main__":
    LLM(**settings_of(Path(sys.argv[1]), sys.argv[2], pipeline_parallel_size=2))
    print("started")
