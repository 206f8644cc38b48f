"""The fixtures of LlamaIndex's packages; nodes are encoded for their LLM."""

from llama_index_fixtures import *  # noqa: F403
