"""The memory that libraries keep is bounded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_MANY_LENGTHS = """
import threading
import torch
import kvrag.engine
torch.set_num_threads(1)
weight = torch.ones(384, 256, dtype=torch.bfloat16)
done = threading.Barrier(3)

@torch.inference_mode()
def multiply(first):
    for length in range(first, first + 600):
        torch.nn.functional.linear(torch.ones(length, 256, dtype=torch.bfloat16), weight)
    done.wait()  # the end of a thread would free its caches
    done.wait()

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4 >> 10

before = resident()
threads = [threading.Thread(target=multiply, args=(100 + 600 * number,)) for number in range(2)]
for thread in threads:
    thread.start()
done.wait()
print(resident() - before)
done.wait()
"""


def _grown(**environment: str) -> int:
    """Return by how many MiB a process grows."""
    command = [sys.executable, "-c", _MANY_LENGTHS]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_lengths_of_prompts_do_not_fill_memory() -> None:
    """oneDNN keeps a kernel for each length, unless their number is bounded; its default keeps all of these."""
    assert _grown() < 0.7 * _grown(ONEDNN_PRIMITIVE_CACHE_CAPACITY="1024")
