"""A run of a large job by events: training, saves, failures, and what each costs.

Time is only ever added to a category by `Run.spend`, so that the categories sum to the wall time.
Nothing here decides as kempner does: `decisions.py` runs kempner's own decisions, with constant
times.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from failures import DAY, Failure, FailureRates, Kind, failures
from phase_times import PhaseTimes

CATEGORIES = ("train", "stall", "detect", "start", "load", "recompute", "queue", "storage")


@dataclass(frozen=True)
class Measures:
    """What is done about failures.

    `interval`: seconds of steps between two saves to disk. `start`, `load`: which samples a start
    and a load draw from. `slots`: steps are kept in the memory of their host, so that a failure
    that leaves the host costs the step under way, and with the chance `slot_misses` one more.
    `buddy_steps`: every `buddy_steps`-th step is kept on another host, too; 0 is none.
    """

    interval: float
    start: str = "start"
    load: str = "load"
    slots: bool = False
    slot_misses: float = 0.5
    buddy_steps: int = 0


@dataclass(frozen=True)
class Cluster:
    """The machines. A failed node is back after `repair_seconds` in the mean, which is assumed.

    With no spare left the job is requeued, and gets its `spares` anew.
    """

    gpus: int
    spares: int = 4
    repair_seconds: float = DAY / 2


@dataclass
class Outcome:
    """Seconds by category, failures by kind, and how often the job went back into the queue."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0.0))
    failures: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))
    requeues: int = 0
    saves: int = 0

    @property
    def wall(self) -> float:
        """Seconds of the whole run."""
        return sum(self.seconds.values())

    def share(self, category: str) -> float:
        """Of the wall time."""
        return self.seconds[category] / self.wall


def young_interval(stall: float, failures_per_second: float) -> float:
    """sqrt(2 x stall / rate), in seconds (Young, "A first order approximation to the optimum
    checkpoint interval", 1974); a day where nothing fails."""
    return math.sqrt(2 * stall / failures_per_second) if failures_per_second > 0 else DAY


def simulate(
    cluster: Cluster,
    rates: FailureRates,
    times: PhaseTimes,
    measures: Measures,
    days: float,
    seed: int,
) -> Outcome:
    """`days` of wall time. The failures of a seed are the same whatever the measures are."""
    stream = failures(rates, cluster.gpus, random.Random(f"failures {seed}"))
    return Run(cluster, times, measures, stream, days * DAY, seed).until_the_end()


class Run:
    """One run while it goes on."""

    def __init__(
        self,
        cluster: Cluster,
        times: PhaseTimes,
        measures: Measures,
        stream: Iterator[Failure],
        end: float,
        seed: int,
    ) -> None:
        self.cluster, self.times, self.measures = cluster, times, measures
        self.rng = random.Random(f"times {seed}")
        self.stream, self.end = stream, end
        self.now = 0.0
        self.made = 0.0  # seconds of steps that are not lost
        self.durable = 0.0  # of these, those in a committed checkpoint
        self.in_flight: tuple[float, float] | None = None  # (committed at, seconds of steps)
        self.next = next(stream, None)
        self.repaired: list[float] = []  # when nodes that are away come back
        self.outcome = Outcome()

    def until_the_end(self) -> Outcome:
        """Train, save and fail until the wall time is used up."""
        while self.now < self.end:
            struck = self.train() or self.save()
            while struck is not None:
                struck = self.suffer(struck)
        return self.outcome

    def spend(self, category: str, seconds: float) -> Failure | None:
        """Let time pass; the failure that cuts it off, or None. Later ones are still to come."""
        until = min(self.now + seconds, self.end)
        struck = self.next if self.next is not None and self.next.at <= until else None
        if struck is not None:
            until = max(self.now, struck.at)
            self.next = next(self.stream, None)
        self.outcome.seconds[category] += until - self.now
        if category == "train":
            self.made += until - self.now
        self.now = until
        self.commit()
        return struck

    def commit(self) -> None:
        """A save whose time has come is durable."""
        if self.in_flight is not None and self.in_flight[0] <= self.now:
            self.durable, self.in_flight = self.in_flight[1], None

    def train(self) -> Failure | None:
        """Until the next save is due, at a multiple of the interval."""
        interval = self.measures.interval
        due = (math.floor(self.made / interval + 1e-6) + 1) * interval
        return self.spend("train", due - self.made)

    def save(self) -> Failure | None:
        """The save before must be durable first: there is one staging buffer."""
        if self.in_flight is not None:
            struck = self.spend("stall", self.in_flight[0] - self.now)
            if struck is not None:
                return struck
        durable_at = self.now + self.times.draw("durable", self.rng)
        struck = self.spend("stall", self.times.draw("stall", self.rng))
        if struck is None and self.now < self.end:
            self.outcome.saves += 1
            self.in_flight = (max(durable_at, self.now), self.made)
            self.commit()
        return struck

    def suffer(self, failure: Failure) -> Failure | None:
        """Notice, lose, start and load; the failure that comes meanwhile, or None."""
        self.outcome.failures[failure.kind] += 1
        if failure.kind is Kind.STORAGE:
            return self.spend("storage", self.times.draw("storage", self.rng))
        self.lose(failure.kind)
        hung = failure.kind is Kind.HANG
        phases = [("detect", self.times.draw("detect_hang" if hung else "detect", self.rng))]
        if (failure.kind is Kind.HOST or failure.left_out) and not self.spare():
            self.outcome.requeues += 1
            self.repaired.clear()
            phases.append(("queue", self.times.draw("queue", self.rng)))
        if self.measures.slots and failure.kind is not Kind.HOST:
            phases.append(("start", self.times.draw("salvage", self.rng)))
        phases.append(("start", self.times.draw(self.measures.start, self.rng)))
        phases.append(("load", self.times.draw(self.measures.load, self.rng)))
        for category, seconds in phases:
            if (struck := self.spend(category, seconds)) is not None:
                return struck
        return None

    def spare(self) -> bool:
        """Whether a node takes the place of the lost one."""
        self.repaired = [at for at in self.repaired if at > self.now]
        if len(self.repaired) >= self.cluster.spares:
            return False
        self.repaired.append(self.now + self.rng.expovariate(1 / self.cluster.repair_seconds))
        return True

    def lose(self, kind: Kind) -> None:
        """Steps since what can be loaded are made again; a save under way is lost."""
        kept = max(self.durable, self.made - self.in_memory(kind))
        lost = self.made - kept
        self.outcome.seconds["train"] -= lost
        self.outcome.seconds["recompute"] += lost
        self.made = self.durable = kept
        self.in_flight = None

    def in_memory(self, kind: Kind) -> float:
        """Seconds of steps that are lost where memory outlives the failure; else all of them."""
        step = self.times.draw("step", self.rng)
        under_way = self.rng.random() * step
        if kind is not Kind.HOST and self.measures.slots:
            return under_way + step * (self.rng.random() < self.measures.slot_misses)
        if kind is Kind.HOST and self.measures.buddy_steps > 0:
            return under_way + step * self.rng.randrange(self.measures.buddy_steps + 1)
        return math.inf
