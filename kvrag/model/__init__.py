"""The only folder that imports transformers: load, render, tokenise, forward, rotary tables, the cache.

Nothing here re-implements a layer. What differs between architectures (where RoPE is applied and to how many
dimensions, which layers have a window, which have no RoPE) is read off the loaded model.
"""

from kvrag.model.cache import BlendCache, LayerSource
from kvrag.model.loading import READER
from kvrag.model.model import Model
from kvrag.model.tokenizer import Tokenizer

__all__ = ["READER", "BlendCache", "LayerSource", "Model", "Tokenizer"]
