"""Completes the `#SBATCH` lines of a batch script: a job that is warned, and comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kempner.cluster.slurm.directives import Directives, Option

WARNING = "B:SIGTERM@120"
"""`--signal` where the script has none: to the batch process, two minutes before the end."""


@dataclass(frozen=True)
class Change:
    """Bytes `start` to `end` of the script become `text`, because of `reason`."""

    start: int
    end: int
    text: str
    reason: str


def complete(directives: Directives) -> list[Change]:
    """What the head of a script lacks for its job to be warned and to come back."""
    changes, missing = list[Change](), list[tuple[str, str]]()
    told = "the job's log goes on where it was; it would be emptied at each start"
    wanted: Mapping[str, tuple[str, str]] = {
        "signal": (f"--signal={WARNING}", "Slurm warns the batch process before the job's time is "
                   "over"),
        "requeue": ("--requeue", "Slurm may put the job back into the queue"),
        "open-mode": ("--open-mode=append", told),
    }  # fmt: skip
    for name, (option, reason) in wanted.items():
        given = directives.last(name)
        against = directives.last("no-requeue") if name == "requeue" else None
        if against is not None and (given is None or given.start < against.start):
            changes.append(Change(against.start, against.end, option, reason))
        elif given is None:
            missing.append((option, reason))
        elif name == "open-mode" and given.value != "append":
            changes.append(Change(given.start, given.end, option, reason))
        elif name == "signal":
            changes += _to_batch(given)
    return [
        *(Change(directives.end, directives.end, f"#SBATCH {o}\n", why) for o, why in missing),
        *changes,
    ]


def _to_batch(given: Option) -> list[Change]:
    """Have a warning for the tasks reach the supervisor, which is the batch process."""
    flags, colon, rest = given.value.rpartition(":")
    if colon and "B" in flags:
        return []
    option = f"--signal={flags}B:{rest}"
    reason = "the warning goes to the batch process, and from there to the program"
    return [Change(given.start, given.end, option, reason)]


STOPS = ("TERM", "INT", "HUP", "USR1", "USR2")
"""Signals, without `SIG`, that ask kempner for a stop."""


def unknown_signal(directives: Directives) -> Option | None:
    """A `--signal` that would not ask kempner for a stop."""
    given = directives.last("signal")
    if given is None:
        return None
    name = given.value.rpartition(":")[2].partition("@")[0].removeprefix("SIG").upper()
    known = name in STOPS or name in ("15", "2", "1", "10", "12")
    return None if known else given
