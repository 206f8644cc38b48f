"""The transformers backend; no other folder imports transformers.

It loads models, renders and tokenises prompts, runs forward passes, makes rotary tables and implements the cache.

No layer is re-implemented. Differences between architectures (where RoPE is applied and to how many dimensions, which
layers have a window, which have no RoPE) are read from the loaded model.
"""

from kvrag.backend.transformers.cache import BlendCache
from kvrag.backend.transformers.loading import READER
from kvrag.backend.transformers.model import LoadOptions, Model
from kvrag.backend.transformers.tokenizer import Tokenizer

__all__ = ["READER", "BlendCache", "LoadOptions", "Model", "Tokenizer"]
