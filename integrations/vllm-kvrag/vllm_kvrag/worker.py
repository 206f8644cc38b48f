"""vLLM's own worker, with access to the model for the connector."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

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
