"""vLLM's own worker, with access to the model for the connector."""

from __future__ import annotations

from typing import Any

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform

from vllm_kvrag.support import unsupported_layers, unsupported_setting

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


loaded: list[Any] = []
"""Models that were loaded in this process."""


class Worker(PlatformWorker):
    """The platform's worker. Connectors see the attention layers but not their model, so it is kept in `loaded`."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model as usual."""
        super().load_model(*args, **kwargs)
        loaded.append(self.model_runner.get_model())

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """Return the kinds of KV cache by layer.

        In a model with full and sliding attention that can be blended, vLLM must keep all pages of all layers. Other
        models keep vLLM's hybrid cache manager, which frees the pages before a window.
        """
        specs: dict[str, Any] = super().get_kv_cache_spec()
        transfer = self.vllm_config.kv_transfer_config
        if transfer is None or transfer.kv_connector != "KvragConnector" or unsupported_setting(self.vllm_config):
            return specs
        layers = list(get_layers_from_vllm_config(self.vllm_config, Attention).values())
        kinds = {type(spec).__name__ for spec in specs.values()}
        if kinds == {"FullAttentionSpec", "SlidingWindowSpec"} and not unsupported_layers(layers, specs):
            try:
                from vllm.v1.core.kv_cache_planning import unify_hybrid_kv_cache_specs
            except ImportError:  # before vLLM 0.33
                from vllm.v1.core.kv_cache_utils import unify_hybrid_kv_cache_specs

            unify_hybrid_kv_cache_specs(specs)
        return specs
