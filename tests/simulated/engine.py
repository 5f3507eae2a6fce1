"""Time that passes from event to event: a heap of what happens next, and nothing else.

A process is a generator that yields how many seconds it waits, or None to wait until it is woken.
Whatever is taken off the heap counts as one event.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from heapq import heappop, heappush
from typing import TypeAlias

Steps: TypeAlias = Generator[float | None, None, None]
"""The life of a process: seconds to wait, or None to wait for `Process.wake`."""


class Life:
    """What processes share that live and die together. Frozen ones stand still until thawed."""

    def __init__(self) -> None:
        self.alive = True
        self.frozen = False
        self.late: list[tuple[Process, int]] = []
        """What came due while frozen."""

    def end(self) -> None:
        """Kill: nothing of it runs any more."""
        self.alive, self.late = False, []

    def freeze(self) -> None:
        """Stop all of it, as SIGSTOP does."""
        self.frozen = True

    def thaw(self) -> None:
        """Let it go on, as SIGCONT does; what came due meanwhile happens now."""
        self.frozen = False
        late, self.late = self.late, []
        for process, ticket in late:
            process.resume(ticket)


class Engine:
    """The clock, in seconds, and what is to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[[int], None], int]] = []
        self._order = 0

    def after(self, seconds: float, act: Callable[[int], None], ticket: int = 0) -> None:
        """Have `act(ticket)` called in `seconds`; of two at the same time the earlier asked."""
        self._order += 1
        heappush(self._heap, (self.now + seconds, self._order, act, ticket))

    def call(self, seconds: float, act: Callable[[], None]) -> None:
        """Have `act()` called in `seconds`."""
        self.after(seconds, lambda _: act())

    def run(self, until: float, over: Callable[[], bool]) -> None:
        """Let happen what happens until `over()`, or up to the time `until`."""
        heap = self._heap
        while heap and heap[0][0] <= until and not over():
            self.now, _, act, ticket = heappop(heap)
            self.events += 1
            act(ticket)


class Process:
    """Runs `steps` as part of `life`, beginning at once."""

    __slots__ = ("_engine", "_life", "_steps", "_ticket", "done")

    def __init__(self, engine: Engine, life: Life, steps: Steps) -> None:
        self._engine, self._life, self._steps = engine, life, steps
        self._ticket = 0
        self.done = False
        engine.after(0.0, self.resume, 0)

    def resume(self, ticket: int) -> None:
        """Go on, if that is still what the process waits for."""
        if ticket != self._ticket or self.done:
            return
        life = self._life
        if not life.alive:
            self.end()
        elif life.frozen:
            life.late.append((self, ticket))
        else:
            self._ticket = ticket = ticket + 1
            try:
                seconds = next(self._steps)
            except StopIteration:
                self.done = True
                return
            if seconds is not None and not self.done:
                self._engine.after(seconds, self.resume, ticket)

    def wake(self) -> None:
        """End its wait, however long that was to be."""
        if not self.done:
            self._ticket += 1
            self._engine.after(0.0, self.resume, self._ticket)

    def end(self) -> None:
        """Never resume it again."""
        self.done = True
