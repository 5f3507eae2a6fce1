"""Which checkpoint a run resumes from: a pure choice, made by rank 0 for all."""

from __future__ import annotations

from collections.abc import Sequence


def choose(committed: Sequence[int], latest: int | None) -> int | None:
    """The step to try next, or None if nothing is committed.

    `latest` names the live branch: steps beyond it were left by a rollback, and are a last resort.
    """
    if latest is None:
        return max(committed, default=None)
    on_branch = [step for step in committed if step <= latest]
    return max(on_branch, default=max(committed, default=None))
