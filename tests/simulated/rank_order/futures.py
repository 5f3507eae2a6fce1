"""`concurrent.futures` in virtual time: executors whose threads are tasks of a scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from simulated.rank_order.scheduler import Scheduler, Task


class VirtualFuture:
    """As much of a `Future` as kempner uses."""

    def __init__(self) -> None:
        self._done = False
        self._begun = False
        self._value: Any = None
        self._error: Exception | None = None
        self.waiting: list[Task] = []

    def done(self) -> bool:
        return self._done

    def running(self) -> bool:
        return self._begun and not self._done

    def exception(self) -> Exception | None:
        assert self._done, "kempner waits for a future before it looks into it"
        return self._error

    def result(self) -> Any:
        assert self._done, "kempner waits for a future before it looks into it"
        if self._error is not None:
            raise self._error
        return self._value

    def work(self, call: Callable[[], Any]) -> list[Task]:
        """Do it; the tasks that have waited for it."""
        self._begun = True
        try:
            self._value = call()
        except Exception as error:  # noqa: BLE001 - as a real future does
            self._error = error
        self._done = True
        waiting, self.waiting = self.waiting, []
        return waiting


class Futures:
    """What stands in place of `ThreadPoolExecutor` and `wait`, for one scheduler after another."""

    def __init__(self) -> None:
        self.scheduler: Scheduler | None = None

    def executor(self, threads: int, name: str = "", **options: Any) -> VirtualExecutor:
        assert threads == 1
        assert self.scheduler is not None
        return VirtualExecutor(self.scheduler, self)

    def wait(self, futures: Sequence[VirtualFuture], timeout: float | None = None) -> Any:
        scheduler = self.scheduler
        assert scheduler is not None
        scheduler.pause()
        (future,) = futures
        end = None if timeout is None else scheduler.now + timeout
        while not future.done():
            left = None if end is None else end - scheduler.now
            if left is not None and left <= 0:
                break
            future.waiting.append(scheduler.current)
            scheduler.wait("a future", left)
        return SimpleNamespace(not_done=set() if future.done() else {future})


class VirtualExecutor:
    """One thread, which does one call after the other. No thread waits for its last one."""

    def __init__(self, scheduler: Scheduler, futures: Futures) -> None:
        self._scheduler, self._futures = scheduler, futures
        self._last: VirtualFuture | None = None

    def submit(self, call: Callable[..., Any], *arguments: Any) -> VirtualFuture:
        scheduler, before, future = self._scheduler, self._last, VirtualFuture()

        def work() -> None:
            if before is not None and not before.done():
                self._futures.wait([before])
            scheduler.wake(future.work(lambda: call(*arguments)))

        self._last = future
        scheduler.start(work, scheduler.rank, idle=True)
        return future

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        if wait and self._last is not None:
            self._futures.wait([self._last])
