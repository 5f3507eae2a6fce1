"""What happens in one schedule: drawn from its seed, before anything runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from kempner.config.integrity import IntegritySection
from kempner.config.resilience import FailPoint, ResilienceSection
from kempner.config.sections import CheckpointSection, Config, EvalSection, TrainSection
from kempner.run.process.exit_codes import StopReason

BATCH = 4
"""Samples of a step."""

LONGEST_PAUSE = 2.0
"""Seconds between any two calls of a rank."""

Pause = Callable[[random.Random, int, bool], float]
"""By the lot, the rank, and whether it is a thread beside training."""


@dataclass(frozen=True)
class Stop:
    """At `time` rank `rank` is asked to stop, by a signal or by an order that knows why."""

    time: float
    rank: int
    reason: StopReason
    seconds_left: float | None
    by_signal: bool


@dataclass(frozen=True)
class Stuck:
    """From step `step` on rank `rank` gets no data for `seconds`."""

    rank: int
    step: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """All that is drawn. Saves are counted from 1, times are seconds from the start."""

    seed: int
    world: int
    own_loop: bool
    """Whether it is a loop of the user's, under `survive`."""
    pace: str
    save_pace: str
    """Of the threads beside training."""
    config: Config
    found: tuple[int, ...]
    """Steps of the checkpoints that are there at the start."""
    step_seconds: float
    """What a step takes when no rank is late."""
    save_seconds: float
    """The longest that a part of a save takes, as a rule."""
    failing: Mapping[int, tuple[int, FailPoint]]
    """Of the saves that fail: on which rank, and where."""
    damaged: Mapping[int, tuple[int, str]]
    """Of the checkpoints that do not load: on which rank, and at which part of the load."""
    stops: tuple[Stop, ...]
    stuck: tuple[Stuck, ...]
    bad: frozenset[int]
    """Numbers of the batches on which the loss is not finite."""
    superseded_at: float | None
    late_numbers: bool
    """Whether a step's numbers come one step late, as on a GPU."""

    @property
    def in_memory(self) -> bool:
        """Whether steps are kept in memory: in a loop of our own, of every other seed."""
        return self.seed % 2 == 0 and not self.own_loop

    @property
    def pause(self) -> Pause:
        """Seconds between two calls of a rank."""
        slow = self.seed % self.world
        paces = {False: self.pace, True: self.save_pace}

        def pause(rng: random.Random, rank: int, beside: bool) -> float:
            match paces[beside]:
                case "at once":
                    return 0.0
                case "one is slow" if rank != slow:
                    return 0.0
                case "now and then" if rng.random() > 0.2:
                    return 0.0
            return LONGEST_PAUSE * rng.random()

        return pause


PACES = ("at once", "at once", "one is slow", "now and then", "always")
SECONDS_PER_STEP = {"at once": 0.3, "one is slow": 14.0, "now and then": 7.5, "always": 20.0}
"""About this many, so that what happens at a time happens while there are steps."""


def draw(seed: int) -> Plan:
    """The plan of this seed."""
    rng = random.Random(seed)
    world, steps, pace = rng.randint(2, 4), rng.randint(3, 9), rng.choice(PACES)
    interval = rng.choice((1, 1, 2, 3))
    config = configuration(
        steps=steps,
        interval=interval,
        background=rng.random() < 0.9,
        failures=rng.choice((1, 3, 6, 6)),
        evaluate_every=rng.choice((None, None, 2, 3)),
        evaluation=rng.randint(1, 3),
        rollback_after=rng.randint(1, 3),
        rollbacks=rng.randint(0, 2),
        patience=rng.choice((0.0, 0.0, 20.0, 600.0)),
        in_memory=seed % 2 == 0,
    )
    found = tuple(range(1, rng.randint(1, steps))) if rng.random() < 0.2 else ()
    step_seconds = rng.choice((0.1, 1.0, 4.0))
    duration = (steps - max(found, default=0)) * (SECONDS_PER_STEP[pace] + step_seconds)

    def sometimes(chance: float) -> bool:
        return rng.random() < chance

    failing = {}
    if sometimes(0.75):
        points = (FailPoint.STAGE, FailPoint.WRITE, FailPoint.COMMIT)
        chance = rng.choice((0.3, 0.6, 0.9))
        failing = {
            number: (rng.randrange(world), rng.choice(points))
            for number in range(1, 2 * steps)
            if sometimes(chance)
        }
    parts = ("manifest", "contents", "fill")
    return Plan(
        seed=seed,
        world=world,
        own_loop=sometimes(0.2),
        pace=pace,
        save_pace=rng.choice(PACES),
        config=config,
        found=found,
        step_seconds=step_seconds,
        save_seconds=rng.choice((0.0, 2.0, duration / 10, duration / 3)),
        failing=failing,
        damaged={
            step: (rng.randrange(world), rng.choice(parts))
            for step in range(1, steps)
            if sometimes(0.1)
        },
        stops=_stops(rng, world, duration) if sometimes(0.6) else (),
        stuck=tuple(
            Stuck(rng.randrange(world), rng.randint(1, steps), rng.uniform(0, 2 * duration))
            for _ in range(rng.choice((0, 0, 0, 1, 2)))
        ),
        bad=frozenset(_bad(rng, steps)) if sometimes(0.3) else frozenset(),
        superseded_at=rng.uniform(0, duration) if sometimes(0.1) else None,
        late_numbers=sometimes(0.3),
    )


def _stops(rng: random.Random, world: int, duration: float) -> tuple[Stop, ...]:
    """A signal to one rank, an order to all, or both; and perhaps again, when more is known."""
    first = rng.uniform(0, 1.2 * duration)
    reasons = [reason for reason in StopReason if reason]
    stops = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        left = rng.choice((None, rng.uniform(0, 20), rng.uniform(0, 200)))
        time = first + rng.uniform(0, 5)
        if rng.random() < 0.5:
            rank = rng.randrange(world)
            stops.append(Stop(time, rank, StopReason.SIGNAL, None, by_signal=True))
            continue
        reason = rng.choice(reasons)
        stops += [
            Stop(time + rng.uniform(0, LONGEST_PAUSE), rank, reason, left, by_signal=False)
            for rank in range(world)
        ]
    return tuple(stops)


def _bad(rng: random.Random, steps: int) -> list[int]:
    first = rng.randint(1, steps)
    return [first + n for n in range(rng.randint(1, 6)) if rng.random() < 0.9]


@cache
def configuration(
    *,
    steps: int,
    interval: int,
    background: bool,
    failures: int,
    evaluate_every: int | None,
    evaluation: int,
    rollback_after: int,
    rollbacks: int,
    patience: float,
    in_memory: bool,
) -> Config:
    """What a user would have written."""
    return Config(
        train=TrainSection(max_steps=steps, global_batch_size=BATCH, seq_len=8),
        checkpoint=CheckpointSection(
            interval=interval,
            async_save=background,
            in_memory=in_memory,
            max_failures=failures,
            keep_last=2,
        ),
        eval=EvalSection(
            interval=evaluate_every,
            dataset_path=None if evaluate_every is None else "held-out",
            max_batches=evaluation,
        ),
        resilience=ResilienceSection(
            rollback_after=rollback_after, max_rollbacks=rollbacks, patience=patience
        ),
        integrity=IntegritySection(fingerprints=False),
    )
