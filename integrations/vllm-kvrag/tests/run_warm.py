"""Warm documents in vLLM without end, and print the name of each document that was reported as warmed."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from vllm_engines import started, text_of

if __name__ == "__main__":
    torch.set_num_threads(1)
    with started(Path(sys.argv[1]), Path(sys.argv[2]), enforce_eager=True) as engine:
        for number in range(10**6):
            texts = [text_of(100 * number + part) for part in range(3)]
            report = engine.warm(texts, document=f"d{number}")
            assert report["new"] == 3, report
            print(f"d{number}", flush=True)
