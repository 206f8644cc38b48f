"""CacheBlend inside stock vLLM: pre-encoded chunks are reused anywhere in a prompt.

    vllm serve MODEL --worker-cls vllm_kvrag.Worker --kv-transfer-config \\
        '{"kv_connector": "KvragConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"store": "kv/"}}'
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvragConnector", "Worker", "register"]
__version__ = "0.1.0"


def register() -> None:
    """Register the connector with vLLM, which calls this through its plugin entry point."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KvragConnector" not in KVConnectorFactory._registry:  # vLLM calls plugins several times per process
        KVConnectorFactory.register_connector("KvragConnector", "vllm_kvrag.connector", "KvragConnector")


def __getattr__(name: str) -> Any:
    """Import classes on first access: vLLM imports this package before its own modules can be imported."""
    if name == "KvragConnector":
        from vllm_kvrag.connector import KvragConnector

        return KvragConnector
    if name == "Worker":
        from vllm_kvrag.worker import Worker

        return Worker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
