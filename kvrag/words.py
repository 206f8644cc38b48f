"""Numbers in messages."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 chunk", "2 chunks"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def human_bytes(size: float) -> str:
    """Format a size with about three digits: 28.0 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
