"""Whether a rank still has its supervisor above it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from kempner.training.rank_link import rank_link

SUPERVISOR, WRAPPER = 500, 600
THERE = {SUPERVISOR: 1, WRAPPER: SUPERVISOR}


@pytest.mark.parametrize(
    ("parents", "there", "found"),
    [
        ([SUPERVISOR], THERE, True),
        ([WRAPPER], THERE, True),
        ([1], {}, False),
        ([WRAPPER, SUPERVISOR], {SUPERVISOR: 1}, True),  # the wrapper ends while one looks
        ([WRAPPER, 1], {}, False),  # and the supervisor, too
        ([WRAPPER], {}, False),  # of another user, and hidden
    ],
)
def test_the_supervisor_is_above_also_where_a_wrapper_ends_just_now(
    monkeypatch: pytest.MonkeyPatch, parents: list[int], there: dict[int, int], found: bool
) -> None:
    seen = iter(parents)
    last = parents[-1:]

    def process(pid: int) -> Any:
        if pid not in there:
            raise psutil.NoSuchProcess(pid)
        return SimpleNamespace(ppid=lambda: there[pid])

    monkeypatch.setattr(os, "getppid", lambda: next(seen, *last))
    monkeypatch.setattr(psutil, "Process", process)
    assert rank_link._descends_from(SUPERVISOR) is found
