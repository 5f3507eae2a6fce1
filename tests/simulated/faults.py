"""What goes wrong in a simulated run, and when: plain data, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum


class Kind(Enum):
    """A fault. `who`, `amount` and `phase` of a `Fault` mean what is said here."""

    KILL = "SIGKILL to rank `who`: at once, or when it next enters `phase`"
    HANG = "rank `who` loops for ever, at once or in `phase`; its threads still run"
    STOP = "SIGSTOP to rank `who`, for `amount` seconds"
    SLOW = "steps take `amount` times as long, for ten minutes"
    CRASH = "an exception at the step that is `amount` steps ahead, every time, until it is mended"
    KILLER = "rank `who` is killed at the step that is `amount` steps ahead, every time, until then"
    NODE_LOST = "node `who` crashes: its connections break"
    NODE_SILENT = "node `who` loses power: its connections stay open"
    ORPHANS = "node `who` is cut off: its ranks go on, and write for `amount` seconds more"
    BATCH_HOST_LOST = "the node of the supervisor crashes"
    SUPERVISOR_KILLED = "SIGKILL to the supervisor"
    SUPERVISOR_STUCK = "the supervisor waits for its storage, for `amount` seconds"
    STUCK_BEFORE_REQUEUE = "the same, once its ranks have left the next time"
    WATCHDOG = "SIGKILL to the watchdog, or SIGSTOP, by `who`"
    KEEPER_KILLED = "SIGKILL to the batch process"
    NO_ROOM = "on the batch host no process can be made for `amount` seconds"
    SECOND = "the run gets a second supervisor, `amount` seconds later, although it has a lease"
    SECOND_IN_COMMIT = "the same, before the change number `amount` of the next commit"
    PREEMPT = "a job of higher priority comes; `amount` seconds of grace"
    LIMIT = "the job's time is over in `amount` seconds; without a warning"
    WARNING = "`--signal=B:` comes while all is well"
    TOLD = "rank `who` alone gets SIGTERM"
    CANCEL = "scancel"
    OPERATOR = "an operator puts the job back into the queue"
    SUSPEND = "Slurm suspends the job for `amount` seconds"
    REFUSE = "Slurm refuses to requeue, for `amount` seconds"
    MUTE = "Slurm does not answer, for `amount` seconds"
    SAVE_FAILS = "the next save cannot be written"
    SAVE_SLOW = "the next save takes `amount` times as long"
    TORN = "rank 0 is killed before change number `amount` of the next commit"
    FULL = "no space left on the disk, for `amount` seconds"
    DAMAGE = "flipped bits in the newest checkpoint, or with `amount` above 0.5 in the one before"
    NAN = "the loss is not finite for `amount` steps"
    SPIKES = "the loss is far too high for `amount` steps"
    BAD_DATA = "the loss is far too high on the samples of the next `amount` steps, whenever read"


PHASES = ("", "", "start", "load", "step", "stage", "write", "eval")
"""Where a rank can be told to fail; nowhere in particular is likelier."""

AMOUNTS: dict[Kind, tuple[float, float]] = {
    Kind.STOP: (1.0, 900.0),
    Kind.SLOW: (1.5, 4.0),
    Kind.CRASH: (1, 20),
    Kind.KILLER: (1, 20),
    Kind.ORPHANS: (1.0, 300.0),
    Kind.SUPERVISOR_STUCK: (5.0, 2000.0),
    Kind.STUCK_BEFORE_REQUEUE: (5.0, 2000.0),
    Kind.NO_ROOM: (5.0, 60.0),
    Kind.SECOND: (0.0, 60.0),
    Kind.SECOND_IN_COMMIT: (1, 6),
    Kind.PREEMPT: (0.0, 90.0),
    Kind.LIMIT: (5.0, 200.0),
    Kind.SUSPEND: (1.0, 900.0),
    Kind.REFUSE: (30.0, 300.0),
    Kind.MUTE: (10.0, 120.0),
    Kind.SAVE_SLOW: (2.0, 20.0),
    Kind.TORN: (1, 7),
    Kind.FULL: (10.0, 200.0),
    Kind.DAMAGE: (0.0, 1.0),
    Kind.NAN: (1, 9),
    Kind.SPIKES: (1, 9),
    Kind.BAD_DATA: (1, 8),
}
"""The least and the most of an `amount`."""


@dataclass(frozen=True)
class Fault:
    """`kind` happens, `at` seconds after the first submission."""

    at: float
    kind: Kind
    who: int = 0
    amount: float = 0.0
    phase: str = ""


@dataclass(frozen=True)
class Setting:
    """The run and its cluster; seconds, steps, nodes. What is no fault.

    `looks` is the time between two looks of the supervisor, `begin` the wait of a requeued job,
    `stall` how long training stops for a save, `stage` and `write` what the save then takes.
    """

    nodes: int = 3
    per_node: int = 2
    spare: int = 0
    least: int | None = None
    pool: int = 8
    no_kill: bool = True
    may_requeue: bool = True
    time_limit: float | None = None
    warn_before: float | None = None
    max_steps: int = 1500
    interval: int = 20
    eval_interval: int = 150
    keep_last: int = 2
    step: float = 2.0
    start: float = 10.0
    load: float = 4.0
    stall: float = 0.0
    stage: float = 1.0
    write: float = 8.0
    evaluate: float = 20.0
    looks: float = 2.0
    kill_wait: float = 30.0
    begin: float = 20.0
    budget: int = 3

    @property
    def hopeless(self) -> bool:
        """Whether a job is over before its ranks have started."""
        return self.time_limit is not None and self.time_limit < self.start


@dataclass(frozen=True)
class Schedule:
    """A run and what happens to it. `seed` fixes the rest, such as each batch's loss."""

    seed: int
    setting: Setting = field(default_factory=Setting)
    faults: tuple[Fault, ...] = ()


def draw(seed: int, least: int = 30, kinds: Sequence[Kind] = ()) -> Schedule:
    """A random schedule of at least `least` faults, over the time that the run takes anyway.

    They are of these `kinds`; when left out, of about half of all.
    """
    rng = random.Random(seed)
    setting = _setting(rng)
    kinds = kinds or [kind for kind in Kind if rng.random() < 0.6] or list(Kind)
    number = least + rng.randrange(12)
    during = setting.max_steps * setting.step
    times = sorted(rng.uniform(0.0, during) for _ in range(number))
    return Schedule(seed, setting, tuple(one_fault(rng, at, rng.choice(kinds)) for at in times))


def one_fault(rng: random.Random, at: float, kind: Kind) -> Fault:
    """A fault of a kind with the rest drawn."""
    least, most = AMOUNTS.get(kind, (0.0, 0.0))
    whole = isinstance(least, int)
    amount = rng.randint(int(least), int(most)) if whole else rng.uniform(least, most)
    phase = rng.choice(PHASES) if kind in (Kind.KILL, Kind.HANG) else ""
    return Fault(at, kind, rng.randrange(64), float(amount), phase)


def _setting(rng: random.Random) -> Setting:
    if rng.random() < 0.02:
        return Setting(time_limit=30.0, start=40.0, looks=4.0)
    nodes = rng.choice((1, 2, 3, 4))
    step, write = rng.choice((1.0, 2.0, 4.0)), rng.choice((1.0, 5.0, 15.0, 40.0))
    return Setting(
        nodes=nodes,
        per_node=rng.choice((1, 2)),
        spare=rng.choice((0, 0, 1)),
        least=rng.choice((None, None, 1)),
        no_kill=rng.random() < 0.7,
        may_requeue=rng.random() < 0.9,
        time_limit=rng.choice((None, 900.0, 1800.0)),
        warn_before=rng.choice((None, None, 60.0)),
        max_steps=round(3000.0 / step),
        interval=rng.choice((10, 20, 40)),
        keep_last=rng.choice((2, 3)),
        step=step,
        write=write,
        looks=2 * step,
        begin=rng.choice((5.0, 20.0, 120.0)),
        budget=rng.choice((1, 3)),
    )
