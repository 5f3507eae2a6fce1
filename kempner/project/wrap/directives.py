"""Reads and completes the `#SBATCH` lines of a batch script, as sbatch does."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_SHORT = {
    **{"A": "account", "a": "array", "b": "begin", "C": "constraint", "c": "cpus-per-task"},
    **{"d": "dependency", "D": "chdir", "e": "error", "F": "nodefile", "G": "gpus", "i": "input"},
    **{"J": "job-name", "L": "licenses", "M": "clusters", "m": "distribution", "N": "nodes"},
    **{"n": "ntasks", "o": "output", "p": "partition", "q": "qos", "S": "core-spec", "t": "time"},
    **{"w": "nodelist", "x": "exclude", "B": "extra-node-info"},
}
"""Options of one letter that have a value."""

_FLAGS = frozenset(
    (
        *("requeue", "no-requeue", "hold", "contiguous", "overcommit", "oversubscribe", "no-kill"),
        *("exclusive", "spread-job", "wait", "quiet", "verbose", "parsable", "test-only", "reboot"),
        *("use-min-nodes", "get-user-env", "ignore-pbs", "kill-on-invalid-dep", "stepmgr"),
    )
)
"""Long options without a value, or with one that only `=` gives."""

WARNING = "B:SIGTERM@120"
"""`--signal` where the script has none: to the batch process, two minutes before the end."""


@dataclass(frozen=True)
class Option:
    """An option of sbatch in line `line`, from byte `start` to `end` of the script; `value` is
    empty for one that has none."""

    name: str
    value: str
    line: int
    start: int
    end: int


@dataclass(frozen=True)
class Directives:
    """What a script asks of Slurm; `end` is the byte after its last line that sbatch reads so."""

    options: tuple[Option, ...]
    end: int
    late: int = 0
    """The first line that looks like one and comes after the first command; 0 if none does."""

    def last(self, name: str) -> Option | None:
        """The option that counts: the last one of this name."""
        found = [option for option in self.options if option.name == name]
        return found[-1] if found else None

    def value(self, *names: str) -> str:
        """The value of the first of these that is given; empty if none is."""
        return next((o.value for name in names if (o := self.last(name)) is not None), "")

    def number(self, *names: str) -> int | None:
        """The same as a number; None if it is not given, or is a range."""
        value = self.value(*names)
        return int(value) if value.isdecimal() else None

    @property
    def gpus_per_node(self) -> int | None:
        """GPUs of each node; 0 if none are asked for, None if that cannot be said."""
        nodes = self.number("nodes") or 1
        if given := self.value("gpus-per-node"):
            return count_of(given)
        if counts := [_gres(part) for part in self.value("gres").split(",") if _gres(part)]:
            return sum(counts)
        if given := self.value("gpus"):
            count = count_of(given)
            return count // nodes if count is not None and count % nodes == 0 else None
        if given := self.value("gpus-per-task"):
            each, tasks = count_of(given), self.number("ntasks-per-node")
            tasks = tasks or (self.number("ntasks") or 1) // nodes
            return each * tasks if each is not None else None
        return 0


def count_of(text: str) -> int | None:
    """The number in `4` or `a100:4`."""
    found = re.fullmatch(r"(?:[^:,]+:)?(\d+)", text)
    return int(found[1]) if found else None


def _gres(part: str) -> int:
    """GPUs in a part of `--gres`, such as `gpu:a100:4`, `gpu=2` or `shard:8`."""
    name, *kind = re.split("[:=]", part.partition("(")[0])
    if name != "gpu":
        return 0
    return int(kind[-1]) if kind and kind[-1].isdecimal() else 1


def read(text: bytes) -> Directives:
    """The options in the head of a script. Raises `ValueError` with a sentence for a line that
    cannot be split into words."""
    options: list[Option] = []
    at, end, over, late = 0, 0, False, 0
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if line.startswith(b"#SBATCH"):
            if over:
                late = late or number
            else:
                options += _read_line(line.decode(errors="surrogateescape"), number, at)
                end = at + len(line)
        over = over or not (line.startswith(b"#") or not line.strip())
        at += len(line)
        end = end or at
    return Directives(tuple(options), end, late)


def _read_line(line: str, number: int, offset: int) -> Iterator[Option]:
    words = list(_words(line, number, offset))
    while words:
        word, start, end = words.pop(0)
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name[2:]
            takes = not equals and name not in _FLAGS
        elif name.startswith("-") and name[1:2] in _SHORT:
            name, value = _SHORT[word[1]], word[2:]
            takes = not value
        else:
            name, takes = name.lstrip("-"), False
        if takes and words:
            value, _, end = words.pop(0)
        yield Option(name, value, number, start, end)


def _words(line: str, number: int, offset: int) -> Iterator[tuple[str, int, int]]:
    """The words after `#SBATCH` with their places, up to a comment."""
    at = len("#SBATCH")
    for found in re.finditer(r"""(?:"[^"\n]*"|'[^'\n]*'|\\.|[^\s"'\\])+""", line[at:]):
        if found[0].startswith("#"):
            return
        start, end = (len(line[: at + i].encode(errors="surrogateescape")) for i in found.span())
        try:
            yield "".join(shlex.split(found[0])), offset + start, offset + end
        except ValueError as error:
            raise ValueError(f"line {number} cannot be read: {error}") from error


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
