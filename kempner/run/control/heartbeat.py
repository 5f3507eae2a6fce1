"""A rank's progress (step, phase): written by the loop, sent by another thread.

The loop only sets a few attributes: no lock, no message.

Progress watchdog: whether a process still completes steps or changes phase.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from kempner.run.control.protocol import Moves, Phase, Report
from kempner.run.link.messages import shorten
from kempner.run.process.collectives import CollectivesUnderWay, collectives_under_way
from kempner.run.process.retry import storage_waits
from kempner.run.process.threads import AwakeClock
from kempner.run.process.whereabouts import CodePlace, Whereabouts

Waiting: TypeAlias = Callable[[str], AbstractContextManager[None]]
"""Returns a context manager for code in which a rank waits for others; takes what it waits in."""


def untimed(what: str) -> AbstractContextManager[None]:
    """A `Waiting` that records no time."""
    return nullcontext()


def describe_places(reports: Mapping[int, Report]) -> str:
    """The newest report of each rank, in the format of `ranks.json`."""
    ranks = [
        {
            "rank": rank,
            "step": report.step,
            "phase": report.phase,
            "worked": report.worked,
            "waited": report.waited,
            "waiting": report.waiting,
            "storage": report.storage,
        }
        for rank, report in sorted(reports.items())
    ]
    return json.dumps(ranks)


@dataclass(frozen=True)
class StepDelays:
    """Seconds that steps were held up: by saves, by data, and by other ranks."""

    saves: float = 0.0
    data: float = 0.0
    ranks: float = 0.0


class Progress:
    """The last completed step, the current phase, and the time spent waiting for other ranks.

    In a user's own program (`own_program`) the stack of the thread that creates this object shows
    what the rank waits in, and whether it moves between two steps.
    """

    def __init__(self, own_program: bool = False) -> None:
        self.phase = Phase.START
        self.reached: dict[str, float] = {}
        """Seconds from the creation of this object to each phase that was entered."""
        self._started = time.monotonic()
        self._waited = self._elsewhere = 0.0
        self._held_up = {"saves": 0.0, "data": 0.0}
        self._waited_taken = 0.0
        self._waiting_for = ""
        self._whereabouts = Whereabouts() if own_program else None
        self._seen_moves = 0
        # Step, seconds worked, seconds waited, steps of the program's earlier loops. One value,
        # replaced as a whole: the thread that reads it must not see half of a step.
        self._done = (0, 0.0, 0.0, 0)

    @property
    def step(self) -> int:
        """The last completed step; steps of earlier loops count."""
        return self._done[0]

    def made(self, step: int, *, before: bool = False) -> None:
        """Note that `step` is done, either now or `before` this process began. The first step that
        is done now ends the compile phase."""
        worked = time.monotonic() - self._started - self._elsewhere - self._waited
        others = self._done[3]
        self._done = (others + step, worked, self._waited, others)
        if not before and self.phase is Phase.COMPILE:
            self.enter(Phase.STEP)

    def begin_another(self) -> None:
        """Note that another loop of the same program begins, with its step 1."""
        step, worked, waited, _ = self._done
        self._done = (step, worked, waited, step)

    def enter(self, phase: Phase) -> None:
        """Enter a phase, on the way to training."""
        self.phase = phase
        self.reached[phase] = round(time.monotonic() - self._started, 2)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Be in `phase` for the block, and then in the former one again, unless the block raises.
        The block is no part of a step: neither its work nor its waiting counts."""
        before, self.phase = self.phase, phase
        since, waited = time.monotonic(), self._waited
        yield
        self._waited = waited
        took = time.monotonic() - since
        self._elsewhere += took
        self._held_up["saves"] += took if phase is Phase.SAVE else 0.0
        self.phase = before

    def take_held_up(self) -> StepDelays:
        """What held up the steps since the last call, without evaluations."""
        held_up = StepDelays(**self._held_up, ranks=self._waited - self._waited_taken)
        self._held_up, self._waited_taken = {"saves": 0.0, "data": 0.0}, self._waited
        return held_up

    @contextmanager
    def held_up_by(self, what: str) -> Iterator[None]:
        """Count the block as waiting for `data`, or for a save to copy the state (`saves`)."""
        since = time.monotonic()
        yield
        self._held_up[what] += time.monotonic() - since

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Count the block as waiting for other ranks, in `what`."""
        since, self._waiting_for = time.monotonic(), what
        yield
        self._waited += time.monotonic() - since
        self._waiting_for = ""

    def report(self) -> Report:
        """A snapshot; may be called from any thread."""
        step, worked, waited, _ = self._done
        storage, place = storage_waits(), self.place()
        moves = 0 if self._whereabouts is None else self._whereabouts.moves
        stands, self._seen_moves = moves == self._seen_moves, moves
        begun = CollectivesUnderWay()
        if stands and (where := self._whereabouts) and (place.collective or where.in_backward):
            begun = collectives_under_way(where.thread if place.collective else None)
        return Report(
            step,
            self.phase,
            round(worked, 3),
            round(waited, 3),
            self._waiting_for or place.collective,
            shorten(storage.waiting_for),
            Moves(storage.tries, moves),
            place.line[-255:],
            begun,
        )

    def place(self) -> CodePlace:
        """Where a user's own program is in its code; may be called from any thread."""
        return CodePlace() if self._whereabouts is None else self._whereabouts.look()


LONGER_THAN_ANY = 10.0
"""How many times the longest step so far a step may take before it counts as a hang."""

Place = TypeVar("Place")


@dataclass(frozen=True)
class Standstill(Generic[Place]):
    """Since when (`since`, seconds of some clock) something has been in `place`."""

    place: Place
    since: float

    def seen(self, place: Place, now: float) -> Standstill[Place]:
        """The standstill after the next look, at `now`."""
        return self if place == self.place else Standstill(place, now)

    def seconds(self, now: float) -> float:

        return now - self.since


def patience(floor: float, ceiling: float, long: float | None) -> float:
    """Seconds without progress that are not yet a hang: `long`, the longest normal time measured so
    far, but at least `floor` and at most `ceiling`; `ceiling` where `long` is None."""
    return ceiling if long is None else min(ceiling, max(floor, long))


class ProgressWatchdog:
    """Counts the seconds without progress, except while the process was suspended. Up to `floor`
    seconds in a step, or `ceiling` seconds in another phase, are never too long."""

    def __init__(self, progress: Progress, floor: float, ceiling: float) -> None:
        self._progress, self._floor, self._ceiling = progress, floor, ceiling
        self._clock = AwakeClock()
        self._still = Standstill(self._place(), 0.0)
        self._longest = 0.0

    @property
    def seconds(self) -> float:
        """Seconds without progress, as of the last look."""
        return self._still.seconds(self._clock.now())

    def _place(self) -> tuple[int, Phase, int]:
        """Where the process is; a retry of failing storage counts as progress, too."""
        return self._progress.step, self._progress.phase, storage_waits().tries

    def too_long(self) -> bool:
        """Look again: whether the current step or phase takes too long."""
        now, before = self._clock.now(), self._still
        self._still = before.seen(self._place(), now)
        in_step = self._still.place[1] is Phase.STEP
        made = self._still.place[0] > before.place[0]
        if in_step and before.place[1] is Phase.STEP and made:
            self._longest = max(self._longest, before.seconds(now))
        long = LONGER_THAN_ANY * self._longest if in_step else None
        return self._still.seconds(now) > patience(self._floor, self._ceiling, long)
