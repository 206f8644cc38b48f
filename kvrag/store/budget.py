"""Byte budgets: whether a portion of chunks fits, and how much of what is stored has to go for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvrag.errors import SettingError, StoreFullError
from kvrag.store.chunkfile import estimate
from kvrag.store.protocol import ChunkRecord

_LOW_WATERMARK = 0.8  # evict down to this share of a budget, so that not every put evicts


def sizes(records: Sequence[ChunkRecord]) -> dict[str, int]:
    """Return the estimated bytes that chunks take, per namespace."""
    found: dict[str, int] = {}
    for record in records:
        found[record.namespace] = found.get(record.namespace, 0) + estimate(record)
    return found


def check_portion(needed: Mapping[str, int], budgets: Mapping[str, int]) -> None:
    """Raise StoreFullError if chunks exceed a namespace's budget by themselves."""
    for namespace, size in needed.items():
        if size > budgets.get(namespace, size):
            raise StoreFullError(
                f"{size} bytes exceed the budget of {budgets[namespace]} bytes of {named(namespace)}: "
                "raise it with `kvrag store budget`"
            )


def limit_for(needed: int, used: int, budget: int) -> int | None:
    """Return the bytes that may stay stored if `needed` more are to come; None = all."""
    return None if used + needed <= budget else max(0, int(budget * _LOW_WATERMARK) - needed)


def check_budget(max_bytes: int | None) -> None:
    """Raise SettingError unless this can be a budget."""
    if max_bytes is not None and not 0 < max_bytes < 1 << 63:
        raise SettingError(f"a budget must be positive, got {max_bytes} bytes")


def named(namespace: str) -> str:
    """Return what messages call a namespace."""
    return f"the namespace {namespace!r}" if namespace else "the default namespace"
