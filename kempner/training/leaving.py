"""Finds how a program leaves the loop over its steps: by `break` or `return`, or by an exception.

Python closes a generator in the same way in either case. So the iterator, when it is dropped, looks
at the current instruction of the frame that drops it. `break` and `return` compile to an
instruction that drops the loop's iterator; an exception drops it in the instruction that has
raised, to which a traceback refers. An iterator that is dropped elsewhere was kept in a variable:
the loop was left earlier, and the model may have changed since, so that nothing must be committed.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  (registers its end before `_abandon_open`)
import dis
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from inspect import CO_GENERATOR
from types import FrameType, TracebackType

_DROPPING = {
    *("POP_TOP", "POP_ITER", "END_FOR", "FOR_ITER"),
    *("DELETE_FAST", "DELETE_NAME", "DELETE_GLOBAL", "STORE_FAST", "STORE_NAME", "STORE_GLOBAL"),
}
"""Instructions of CPython 3.11 to 3.14 that drop an iterator, unless they raise."""


@dataclass
class StepsEnd:
    """How the steps were closed before their end."""

    by_hand: bool = False
    """Whether by `break` or `return`, without any code run since."""


class Steps:
    """An iterator over the steps of `make` that closes them as soon as it is dropped."""

    def __init__(self, make: Callable[[StepsEnd], Generator[object, None, None]]) -> None:
        self._leaving, self._process = StepsEnd(), os.getpid()
        self._steps = make(self._leaving)
        self._users: frozenset[int] = frozenset()
        self._abandoned = False
        _OPEN.add(self)

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        self._users = _users(sys._getframe(1))
        return next(self._steps)

    def abandon(self) -> None:
        """Leave the loop without a commit, unless it was left already."""
        self._abandoned = True
        if os.getpid() == self._process:  # else: a worker forked in the loop
            self._steps.close()

    def __del__(self) -> None:
        if self._abandoned or os.getpid() != self._process:  # Python may be shutting down
            return
        self._leaving.by_hand = _is_left_by_hand(sys._getframe().f_back, self._users)
        self._steps.close()


def describe_uncommitted(step: int, steps: int) -> str:
    """A sentence about a loop that was left after `step` of `steps`, but not by hand."""
    return (
        f"the loop was left after step {step} of {steps} by an exception, or with its iterator "
        "kept in a variable; the steps since the newest checkpoint are made again at the next start"
    )


_OPEN: weakref.WeakSet[Steps] = weakref.WeakSet()


def _abandon_open() -> None:
    for steps in list(_OPEN):
        steps.abandon()


# Runs while threads can still be started; from Python 3.12 on, `atexit` is too late for that.
threading._register_atexit(_abandon_open)  # type: ignore[attr-defined]


def _users(frame: FrameType | None) -> frozenset[int]:
    """The frames that a step passes through: those of generators and iterators around the steps,
    such as a progress bar, and the one with the loop."""
    users = set()
    while frame is not None:
        users.add(id(frame))
        if not _is_generator(frame) and frame.f_code.co_name != "__next__":
            break
        frame = frame.f_back
    return frozenset(users)


def _is_left_by_hand(frame: FrameType | None, users: frozenset[int]) -> bool:
    """Whether `frame` drops the iterator of a loop in one of `users` by `break` or `return`. If the
    loop is in a generator that is being closed, the frame that drops the generator counts."""
    while frame is not None:
        instruction = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        if instruction in _DROPPING and id(frame) in users and not _raises(frame):
            return True
        if not _is_generator(frame):
            return False
        frame = frame.f_back
    return False


def _raises(frame: FrameType) -> bool:
    """Whether the current instruction of `frame` has raised."""
    references = gc.get_referrers(frame)
    return any(isinstance(o, TracebackType) and o.tb_lasti == frame.f_lasti for o in references)


def _is_generator(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & CO_GENERATOR)
