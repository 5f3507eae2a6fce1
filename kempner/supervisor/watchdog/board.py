"""What supervisor, keeper and watchdog of a job tell each other: by memory that they share.

Nothing here touches a file, waits, or can fail: it works while all storage hangs. Each number is
written by one process alone, and is eight bytes long, which are read and written at once.

Nothing but the standard library is imported: the process is split before anything else."""

from __future__ import annotations

import math
import mmap
from enum import IntEnum

_SIZE = 8192
_TEXT = 4096
"""Where texts begin: the reason of the watchdog, and the ledger of the run."""

_LONGEST = 2000


class SupervisorStage(IntEnum):
    """How far a supervisor has come. Its job may go back into the queue without it as long as it
    has not settled what becomes of it."""

    STARTING = 0
    FOLLOWS = 1
    SETTLED = 2


class WatchdogVerdict(IntEnum):
    """What the watchdog has done about the job."""

    NONE = 0
    REQUEUED = 1
    LEFT = 2


class JobBoard:
    """The memory that they share. `alone` says that this process has no watchdog."""

    def __init__(self, alone: bool = False) -> None:
        self._memory = bytearray(_SIZE) if alone else mmap.mmap(-1, _SIZE)
        self._numbers = memoryview(self._memory)[:_TEXT].cast("d")
        self.alone = alone
        self._numbers[_ENDS_AT] = self._numbers[_END] = math.inf
        self._numbers[_STATUS] = self._numbers[_STEP] = math.nan

    # The supervisor writes

    def settle(self) -> None:
        """What becomes of the job is decided: it is completed, given up, stopped for good, or in
        the queue again."""
        self._numbers[_STAGE] = SupervisorStage.SETTLED

    def tell_margin(self, seconds: float) -> None:
        self._numbers[_MARGIN] = seconds

    def tell_end(self, at: float | None, end: float | None) -> None:
        """When the job ends: `at` by `time.monotonic`, which is `end` by the controller's clock in
        seconds since the epoch; None without an end."""
        self._numbers[_END] = math.inf if end is None else end
        self._numbers[_ENDS_AT] = math.inf if at is None else at

    def tell_launch(self, killed: int, step: int | None, ledger: str) -> None:
        """A launch of a run begins whose newest commit is of `step`; `killed` is how many launches
        before it, in a row, were killed as they started."""
        self._write(_LEDGER, ledger)
        self._numbers[_FRUITLESS] = killed
        if step is not None:
            self.tell_step(step, new=False)

    def tell_attempt(self, number: int, fruitless: int, ledger: str) -> None:
        """An attempt begins in a job that may go back into the queue; `fruitless` is how often it
        came back without a new step."""
        self._write(_LEDGER, ledger)
        self._numbers[_FRUITLESS], self._numbers[_ATTEMPT] = fruitless, number
        self._numbers[_STAGE] = SupervisorStage.FOLLOWS

    def tell_step(self, step: int, new: bool) -> None:
        """A step is saved, `new` if it was made in this launch of the job."""
        self._numbers[_STEP] = step
        if new:
            self._numbers[_ADVANCED] = 1

    # The keeper and the watchdog write

    def tell_status(self, status: int) -> None:
        """The supervisor has ended, with a status of wait(2)."""
        self._numbers[_STATUS] = status

    def tell_verdict(self, verdict: WatchdogVerdict, reason: str) -> None:
        self._write(_REASON, reason)
        self._numbers[_VERDICT] = verdict

    # All read

    @property
    def stage(self) -> SupervisorStage:
        return SupervisorStage(int(self._numbers[_STAGE]))

    @property
    def verdict(self) -> WatchdogVerdict:
        return WatchdogVerdict(int(self._numbers[_VERDICT]))

    @property
    def status(self) -> int | None:
        status = self._numbers[_STATUS]
        return None if math.isnan(status) else int(status)

    @property
    def ends_at(self) -> float:
        return self._numbers[_ENDS_AT]

    @property
    def end(self) -> float:
        return self._numbers[_END]

    @property
    def margin(self) -> float:
        return self._numbers[_MARGIN]

    @property
    def fruitless(self) -> int:
        """Launches in a row that were killed as they started; once this one follows ranks, returns
        of the job in a row without a new step."""
        return int(self._numbers[_FRUITLESS])

    @property
    def advanced(self) -> bool:
        return self._numbers[_ADVANCED] > 0

    @property
    def attempt(self) -> int:
        return int(self._numbers[_ATTEMPT])

    @property
    def step(self) -> int | None:
        step = self._numbers[_STEP]
        return None if math.isnan(step) else int(step)

    @property
    def reason(self) -> str:
        return self._read(_REASON)

    @property
    def ledger(self) -> str:
        return self._read(_LEDGER)

    def _write(self, place: int, text: str) -> None:
        begin, data = _TEXT + place * (_LONGEST + 8), text.encode("utf-8", "surrogateescape")
        data = data[:_LONGEST]
        self._memory[begin : begin + _LONGEST] = data.ljust(_LONGEST, b"\0")

    def _read(self, place: int) -> str:
        begin = _TEXT + place * (_LONGEST + 8)
        data = bytes(self._memory[begin : begin + _LONGEST])
        return data.rstrip(b"\0").decode("utf-8", "surrogateescape")


(
    _STAGE, _ENDS_AT, _END, _MARGIN, _FRUITLESS, _ADVANCED, _ATTEMPT, _STEP, _STATUS, _VERDICT,
) = range(10)  # fmt: skip
_REASON, _LEDGER = range(2)

_board = JobBoard(alone=True)


def board() -> JobBoard:
    """The board of this process; one that no other process sees where there is no watchdog."""
    return _board


def share(shared: JobBoard) -> None:
    global _board
    _board = shared
