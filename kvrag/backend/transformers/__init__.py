"""The transformers backend, the only folder that imports transformers.

It loads, renders, tokenises, runs forward passes, makes rotary tables and keeps the cache.

Nothing here re-implements a layer. What differs between architectures (where RoPE is applied and to how many
dimensions, which layers have a window, which have no RoPE) is read off the loaded model.
"""

from kvrag.backend.transformers.cache import BlendCache
from kvrag.backend.transformers.loading import READER
from kvrag.backend.transformers.model import Model
from kvrag.backend.transformers.tokenizer import Tokenizer

__all__ = ["READER", "BlendCache", "Model", "Tokenizer"]
