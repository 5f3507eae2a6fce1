"""Threads that take turns: one runs at a time, and a seed says which is next, in virtual time.

A thread gives way where it would wait: in a collective, for a future, or for seconds to pass. The
next one is the one that is due first, of several at the same time one by lot. So a schedule is told
by its seed, and waits for nothing real. The threads are kept from one schedule to the next.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

MOST_TURNS = 60_000
"""Of one schedule: it takes some hundreds, so that many mean that it never ends."""


class Killed(BaseException):
    """Raised in a thread whose schedule is over."""


class Violation(BaseException):
    """What must never happen has happened: the schedule is over."""


class Task:
    """What one thread does for one rank. The schedule does not wait for the end of `idle` ones."""

    def __init__(self, work: Callable[[], None], rank: int, idle: bool) -> None:
        self.work, self.rank, self.idle = work, rank, idle
        self.done = False
        self.ticket = 0
        """What wakes it with an older one comes too late."""
        self.waits_for: object = ""
        """For a person who looks at a deadlock."""
        self.thread: _Thread | None = None


class _Thread:
    """A real thread, which does one task after the other."""

    def __init__(self, free: list[_Thread]) -> None:
        self.turn = threading.Lock()
        self.turn.acquire()
        self.serve: Callable[[], None] = lambda: None
        self._free = free
        threading.Thread(target=self._live, name="a rank's", daemon=True).start()

    def _live(self) -> None:
        while True:
            self.turn.acquire()
            self.serve()


class Scheduler:
    """Runs tasks to their end, or to a violation.

    `pause` is how many seconds pass between two calls: by the lot, the rank, and whether the task
    is `idle`.
    """

    _free: list[_Thread] = []  # noqa: RUF012 - kept from one schedule to the next

    def __init__(self, seed: int, pause: Callable[[random.Random, int, bool], float]) -> None:
        self.random = random.Random(seed)
        self.now = 100.0
        self.turns = 0
        self.violation: Violation | None = None
        self.error: BaseException | None = None
        """What ended a task that should not have ended so: a bug of the task."""
        self._pause = pause
        self._due: list[tuple[float, float, int, Task | Callable[[], None], int]] = []
        self._tasks: list[Task] = []
        self._awaited = self._order = 0
        self._over = False
        self._main = threading.Lock()
        self._main.acquire()
        self.current: Task = Task(lambda: None, -1, idle=True)

    @property
    def rank(self) -> int:
        """Whose turn it is."""
        return self.current.rank

    def start(self, work: Callable[[], None], rank: int, idle: bool = False) -> Task:
        """Have `work` done by a thread of `rank`."""
        task = Task(work, rank, idle)
        self._tasks.append(task)
        self._awaited += not idle
        self._push(self.now, task)
        return task

    def at(self, time: float, act: Callable[[], None]) -> None:
        """Have `act` called then, by whatever thread; it must not wait."""
        self._order += 1
        heappush(self._due, (time, self.random.random(), self._order, act, 0))

    def run(self) -> Violation | None:
        """Let all happen until every task that is not `idle` is done."""
        self._hand_over()
        self._main.acquire()
        self._over = True
        for task in self._tasks:
            if task.thread is not None and not task.done:
                self.current = task
                task.thread.turn.release()
                self._main.acquire()
        return self.violation

    def pause(self) -> None:
        """What may pass between any two calls."""
        task = self.current
        self.sleep(self._pause(self.random, task.rank, task.idle))

    def sleep(self, seconds: float) -> None:
        """Let seconds pass for the current task."""
        if self._awaited and self._due and self._due[0][0] > self.now + seconds and not self._over:
            self.now += seconds  # no other task is due before
            return
        self._push(self.now + seconds, self.current)
        self.wait("time to pass")

    def wait(self, what: object, timeout: float | None = None) -> None:
        """Give way until the current task is woken, or `timeout` seconds have passed."""
        task = self.current
        if self._over:
            raise Killed
        if timeout is not None:
            self._push(self.now + timeout, task)
        task.waits_for = what
        if self._hand_over(task):
            return
        assert task.thread is not None
        task.thread.turn.acquire()
        if self._over:
            raise Killed

    def wake(self, tasks: Iterable[Task]) -> None:
        """Let tasks go on that wait; in which order, says the lot."""
        for task in tasks:
            self._push(self.now, task)

    def violate(self, words: str) -> None:
        """End the schedule with a violation."""
        self.violation = self.violation or Violation(words)
        raise self.violation

    def _push(self, time: float, task: Task) -> None:
        self._order += 1
        heappush(self._due, (time, self.random.random(), self._order, task, task.ticket))

    def _hand_over(self, giver: Task | None = None) -> bool:
        """Give the turn to the next; True if that is the giver itself."""
        while self._due and self._awaited and self.violation is None:
            self.now, _, _, what, ticket = heappop(self._due)
            if not isinstance(what, Task):
                what()
                continue
            if what.done or what.ticket != ticket:
                continue
            self.turns += 1
            if self.turns > MOST_TURNS:
                self.violation = Violation(f"endless: {self._standing()}")
                break
            what.ticket += 1
            self.current = what
            if what is giver:
                return True
            self._thread_of(what).turn.release()
            return False
        if self._awaited and self.violation is None:
            self.violation = Violation(f"deadlock: {self._standing()}")
        self._main.release()
        return False

    def _thread_of(self, task: Task) -> _Thread:
        if task.thread is None:
            task.thread = self._free.pop() if self._free else _Thread(self._free)
            task.thread.serve = lambda: self._serve(task)
        return task.thread

    def _serve(self, task: Task) -> None:
        try:
            task.work()
        except Killed:
            pass
        except Violation as violation:
            self.violation = self.violation or violation
        except BaseException as error:  # noqa: BLE001 - `run` is told
            self.error = self.error or error
            self.violation = self.violation or Violation(f"a task died: {error!r}")
        task.done = True
        self._awaited -= not task.idle
        thread = task.thread
        assert thread is not None
        self._free.append(thread)
        if self._over:
            self._main.release()
        else:
            self._hand_over()

    def _standing(self) -> str:
        there = [f"rank {t.rank}: {t.waits_for}" for t in self._tasks if not t.done]
        return f"at {self.now - 100.0:.1f} s, {'; '.join(there)}"


@dataclass
class Clock:
    """In place of the module `time`."""

    scheduler: Scheduler | None = None

    def monotonic(self) -> float:
        return 0.0 if self.scheduler is None else self.scheduler.now

    def time(self) -> float:
        return 1e9 + self.monotonic()

    def sleep(self, seconds: float) -> None:
        assert self.scheduler is not None
        self.scheduler.sleep(seconds)
