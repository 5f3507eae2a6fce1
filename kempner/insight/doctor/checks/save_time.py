"""How long a save will take, and whether the warnings that a job gets leave time for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kempner.insight.doctor.facts.node import NodeAnswer
from kempner.insight.doctor.facts.plan import Plan
from kempner.insight.doctor.facts.slurm import SlurmFacts
from kempner.insight.doctor.finding import Outcome, fail, passed, skipped, warn
from kempner.run.output.units import size_text

Lead = Callable[[float], float]
"""Seconds before a job's end at which a stop must begin, by the seconds that a save takes."""

_GRAIN = 30
"""Seconds to which a warning is rounded up: Slurm looks at its clock as rarely."""

_MOST_OF_JOB = 0.5
"""Share of a job's time that kempner keeps free for its end at most."""


@dataclass(frozen=True)
class SaveTime:
    """`seconds` of a save, None where that cannot be predicted, of which `sentence` says more."""

    seconds: float | None
    sentence: str


def predict_save(
    size: int | None, answers: Sequence[NodeAnswer], nodes: int, measured_on_all: bool
) -> SaveTime:
    """A checkpoint of `size` bytes at the rate of the write tests.

    `measured_on_all` says that all `nodes` have written at once; if not, this host's rate is taken
    for that of each of them.
    """
    tests = [answer.folders.write for answer in answers if answer.folders.write is not None]
    rates = [test.rate for test in tests if test.rate is not None]
    if size is None:
        return SaveTime(None, "the size of a checkpoint is not known")
    if not rates:
        return SaveTime(None, "the write test was left out")
    together = sum(rates) if measured_on_all else rates[0] * nodes
    seconds = size / together
    how = f"{_rate(together)} measured on {len(rates)} nodes at once"
    if not measured_on_all or len(rates) == 1:
        how = f"{_rate(rates[0])} measured here"
        if nodes > 1:
            how += f", if storage takes as much from each of {nodes} nodes (--allocation measures)"
    return SaveTime(seconds, f"a checkpoint of {size_text(size)} takes about {_s(seconds)} ({how})")


def check_write(answers: Sequence[NodeAnswer], save: SaveTime) -> Outcome:
    """Whether the checkpoints' folder takes data at all, and how fast."""
    for answer in answers:
        test = answer.folders.write
        if test is not None and test.trouble:
            return fail(
                f"the checkpoints' folder cannot be written on {answer.node}: {test.trouble}; free "
                "space there, or set checkpoint.dir"
            )
    if save.seconds is None:
        return skipped(save.sentence)
    return passed(save.sentence)


def check_window(plan: Plan | None, limit: float | None, save: SaveTime, lead: Lead) -> Outcome:
    """Whether a stop and its save fit between Slurm's warning and the job's end.

    `limit` is the job's whole time in seconds, None without one.
    """
    if plan is None:
        return skipped("no batch script is known: name it with --script")
    if save.seconds is None:
        return skipped(f"not compared: {save.sentence}")
    needed = lead(save.seconds)
    advised = _GRAIN * math.ceil(max(needed, 4 * _GRAIN) / _GRAIN)
    line = f"#SBATCH --signal=B:SIGTERM@{advised}"
    if limit is not None and needed > _MOST_OF_JOB * limit:
        return fail(
            f"a stop with its saves takes {_s(needed)}, and the job has {_s(limit)}: ask for more "
            "time (--time), or write to faster storage (checkpoint.dir)"
        )
    warning = plan.warning
    if warning is None:
        return warn(f"{plan.source} asks for no warning before the time limit: add `{line}`")
    if limit is not None and warning.seconds >= limit:
        return fail(
            f"the warning comes {_s(warning.seconds)} before the end, and the job has {_s(limit)}: "
            f"it would stop as it begins; write `{line}`, or ask for more time"
        )
    if not warning.to_script:
        return warn(
            f"--signal={warning.signal}@{warning.seconds:.0f} of {plan.source} does not reach the "
            f"batch script, where the supervisor is: write `{line}`"
        )
    if warning.seconds < needed:
        return warn(
            f"the warning comes {_s(warning.seconds)} before the end, and a stop with its saves "
            f"takes {_s(needed)}: write `{line}`"
        )
    return passed(f"a warning of {_s(warning.seconds)}, of which a stop takes about {_s(needed)}")


def check_grace(slurm: SlurmFacts, save: SaveTime) -> Outcome:
    """Whether a save fits into what a preemption leaves."""
    partition = slurm.partition
    if partition is None:
        return skipped(slurm.no_partition or "no partition is known")
    if partition.grace is None:
        return passed(f"jobs of partition {partition.name} are not preempted")
    if save.seconds is None:
        return skipped(f"not compared: {save.sentence}")
    left = partition.grace + slurm.kill_wait
    numbers = f"a preemption in partition {partition.name} leaves {_s(left)}"
    if save.seconds > left:
        return warn(
            f"{numbers}, and a save takes {_s(save.seconds)}: what was trained since the last "
            "checkpoint would be lost; lower checkpoint.interval, or use a partition with a longer "
            "GraceTime"
        )
    return passed(f"{numbers}, a save takes {_s(save.seconds)}")


def _rate(rate: float) -> str:
    return f"{rate / 1e6:,.1f} MB/s"


def _s(seconds: float) -> str:
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
