"""The transformers backend: models, forward passes, rotary tables, the cache, and tokenisation of prompts.

No other folder imports transformers. No layer is re-implemented. Differences between architectures (where RoPE is
applied and to how many dimensions, which layers have a window, which have no RoPE) are read from the loaded model.
"""

import os

import kvrag.backend.llama.model  # noqa: F401  for GGUF files
from kvrag.backend.hub import READER
from kvrag.backend.transformers.model import Model
from kvrag.backend.transformers.rows import BlendCache
from kvrag.backend.transformers.tokenizer import Tokenizer

__all__ = ["READER", "BlendCache", "Model", "Tokenizer"]

# On the CPU, oneDNN caches compiled matrix products in half precision: 0.65 MiB for each shape, up to 1,024 shapes for
# the process and 1,024 for every thread. Each new prompt length adds some, so a server with 16 threads reaches several
# GiB. torch reads these settings at the first such product. 256 are enough for decoding.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
os.environ.setdefault("LRU_CACHE_CAPACITY", "16")
