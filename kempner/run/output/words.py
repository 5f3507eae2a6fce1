"""Numbers with what they count."""

from __future__ import annotations


def counted(many: int, one: str, more: str = "") -> str:
    """`1 stop`, `2 stops`, or `2 batches` with `more` as the plural."""
    return f"{many:,} {one if many == 1 else more or one + 's'}"
