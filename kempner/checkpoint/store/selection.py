"""Selects the checkpoint to resume from, and those to abandon: pure choices of rank 0."""

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


def choose_to_go_back(branch: Sequence[int], to: int) -> int | None:
    """The step to try next in a rollback to step `to`, or None if `branch` is empty.

    Where nothing up to `to` is whole, the oldest after it: the data that hurt is left out anyhow.
    """
    return max((step for step in branch if step <= to), default=min(branch, default=None))


def left_behind(committed: Sequence[int], latest: int | None, step: int) -> list[int]:
    """The steps that are to be set aside before `step` is committed, ascending.

    Those beyond `latest` are no part of the live branch, and would seem to be once it has passed
    them; `step` itself is made again.
    """
    return [s for s in committed if s == step or (s < step and (latest is None or s > latest))]
