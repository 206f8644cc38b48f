"""Counts for vLLM's log and its Prometheus metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

_COUNTERS = {
    "prompts": "Prompts that were blended.",
    "tokens_reused": "Prompt tokens whose KV was not computed for the answer.",
    "tokens_recomputed": "Prompt tokens with KV in the store or in blended pages that were computed all the same.",
    "tokens_fresh": "Tokens of blended prompts without KV in the store or in blended pages.",
    "bytes_loaded": "Bytes read from the store.",
    "blend_seconds": "Seconds of blending, including waiting for other requests.",
    "chunks_warmed": "Chunks that were encoded and stored.",
}


@dataclass
class KvragStats(KVConnectorStats):
    """Counts of one worker since the last report."""

    @classmethod
    def empty(cls) -> KvragStats:
        """Return zeros."""
        return cls(data=dict.fromkeys(_COUNTERS, 0))

    def observe(self, report: Mapping[str, Any]) -> None:
        """Count a finished task."""
        if "prompt_tokens" in report:
            self.data["prompts"] += 1
            self.data["tokens_reused"] += report["reused_tokens"]
            self.data["tokens_recomputed"] += report["recomputed_tokens"]
            self.data["tokens_fresh"] += report["fresh_tokens"]
            self.data["bytes_loaded"] += report["bytes_loaded"]
            self.data["blend_seconds"] += report["ttft_s"]
        elif "new" in report:
            self.data["chunks_warmed"] += report["new"]

    def reset(self) -> None:
        """Set all counts to zero."""
        self.data = dict.fromkeys(_COUNTERS, 0)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the counts of another interval."""
        for name in _COUNTERS:
            self.data[name] += other.data.get(name, 0)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts for the log."""
        return {name: round(value, 3) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        return not any(self.data.values())


class KvragPromMetrics(KVConnectorPromMetrics):
    """The counts as `vllm:kvrag_*_total`."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        from vllm.v1.metrics.utils import create_metric_per_engine

        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(name=f"vllm:kvrag_{name}", documentation=text, labelnames=labelnames),
                self.per_engine_labelvalues,
            )
            for name, text in _COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add counts."""
        for name, counters in self._counters.items():
            if transfer_stats_data.get(name):
                counters[engine_idx].inc(transfer_stats_data[name])
