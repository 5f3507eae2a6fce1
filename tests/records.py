"""Records of what was proved or measured: files of JSON lines that say where each row comes from.

    python tests/records.py [FILE.jsonl ...]

prints, for each record under docs/, the rows whose code has changed since: how many commits touched
the folders that a row proves, the most first, and in all.

A row is what its writer found, together with a header: commit (with a + where files differed from
it), date, machine, versions, command, and `proves`, the folders whose code it is about. A new row
replaces the old ones that agree with it in what identifies them.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

Row = Mapping[str, Any]

HEADER = ("commit", "date", "machine", "versions", "command", "proves")
MADE = (
    "docs/*.jsonl",
    "docs/goodput.md",
    "docs/measurements.md",
    "docs/performance.md",
    "docs/storage_faults.md",
    "docs/trainer.md",
    "docs/wrap.md",
)
"""Records, and the pages made from them: they are no change of what is recorded."""


# Writing


def header(proves: Sequence[str], command: str | None = None) -> dict[str, Any]:
    """Where a row comes from; the command is that of this process unless it is given."""
    return {
        "commit": commit(),
        "date": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
        "machine": machine(),
        "versions": versions(),
        "command": command or command_line(sys.argv),
        "proves": list(proves),
    }


@cache
def commit() -> str:
    """The commit that is checked out, with a + where files differ from it."""
    name = _git("rev-parse", "--short=12", "HEAD")
    left_out = (f":(exclude){path}" for path in MADE)
    return name + ("+" if _git("status", "--porcelain", "-uno", "--", ".", *left_out) else "")


@cache
def machine() -> str:
    """Its kind, without its name."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    facts = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(": ")[2] for line in facts if line.startswith("model name")]
    kind = (models or [platform.machine()])[0]
    return f"{os.cpu_count()} cores, {kind}, {memory:.0f} GiB"


@cache
def versions() -> str:
    """Of what every row depends on."""
    ours = ", ".join(f"{name} {version(name)}" for name in ("torch", "kempner"))
    return f"Python {platform.python_version()}, {ours}"


def command_line(argv: Sequence[str]) -> str:
    """As it is called in the project's folder, without the place of the record."""
    words, left = ["python", _in_project(argv[0])], list(argv[1:])
    while left:
        word = left.pop(0)
        if word in ("--record", "--folder"):
            left.pop(0)
        elif not word.startswith(("--record=", "--folder=")):
            words.append(word)
    return shlex.join(words)


def _in_project(path: str) -> str:
    there = Path(path).resolve()
    return str(there.relative_to(ROOT)) if there.is_relative_to(ROOT) else there.name


def write(
    file: Path,
    rows: Sequence[Row],
    by: Sequence[str],
    only: Mapping[str, Collection[str]] | None = None,
) -> None:
    """Add rows in the place of the old ones that have the same values of `by` as one of them.

    `only` says for some keys which values rows may have: others are dropped. Several processes may
    write to the same file.
    """
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        old = [
            row
            for row in (read(file) if file.exists() else [])
            if all(row[key] in values for key, values in (only or {}).items())
        ]
        whole = file.with_name(f".{file.name}.new")
        lines = (json.dumps(row) + "\n" for row in replaced(old, rows, by))
        whole.write_text("".join(lines))
        whole.replace(file)
    finally:
        os.close(folder)


def replaced(old: Sequence[Row], new: Sequence[Row], by: Sequence[str]) -> list[Row]:
    """The rows of both: the new ones stand where the first that they replace stood."""
    identity = lambda row: json.dumps([row.get(key) for key in by])  # noqa: E731
    names = set(map(identity, new))
    places = [place for place, row in enumerate(old) if identity(row) in names]
    first = places[0] if places else len(old)
    kept = [row for row in old if identity(row) not in names]
    return [*kept[:first], *new, *kept[first:]]


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def origin(rows: Iterable[Row]) -> str:
    """The days and the commits that rows are of."""
    known = list(rows)
    days = sorted({row["date"][:10] for row in known})
    commits = dict.fromkeys(row["commit"] for row in known)
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"{when}, at {', '.join(commits)}"


# What a benchmark has measured


def add_option(parser: ArgumentParser) -> None:
    told = "where to keep what was measured: docs/performance.jsonl"
    parser.add_argument("--record", type=Path, metavar="FILE.jsonl", help=told)


def result(
    file: Path | None, benchmark: str, proves: Sequence[str], rows: Iterable[Row], *by: str
) -> None:
    """Print what a benchmark measured; and if a file is given, write it in the place of what the
    benchmark had measured before: of all, or of the cases that agree in `by`."""
    found = [_rounded(row) for row in rows]
    print("\n".join(table(found)), flush=True)
    if file is not None:
        told = header(proves)
        assert not any(row.keys() & told.keys() for row in found), "a column of the header's name"
        ours = [{"benchmark": benchmark, **row, **told} for row in found]
        write(file, ours, ("benchmark", *by))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}") if abs(value) < 1000 else round(value)
    if isinstance(value, Mapping):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list | tuple) else value


def table(rows: Sequence[Row]) -> list[str]:
    """A table in Markdown, with a column for each key that a row has."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    body = [[cell(row.get(column)) for column in columns] for row in rows]
    return [f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *body)]


def cell(value: object) -> str:
    """As a table shows it: a list has the ends of a range."""
    if isinstance(value, list | tuple):
        return " to ".join(map(cell, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {cell(part)}" for key, part in value.items())
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else str(value)


# What has changed since


@dataclass(frozen=True)
class Age:
    """Rows of one commit, and how many commits of the code that they prove came after it; None:
    the commit is unknown."""

    commits: int | None
    commit: str
    date: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        much = "?" if self.commits is None else str(self.commits)
        more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        return f"{much:>5} commits since {self.commit} of {self.date}: {self.names[0]}{more}"


def ages(rows: Iterable[Row], count: Callable[[str, tuple[str, ...]], int | None]) -> list[Age]:
    """The rows by what `count` says of their commits and folders, the oldest first."""
    found: dict[tuple[int | None, str, str], list[str]] = {}
    for row in rows:
        commits = count(row["commit"].rstrip("+"), tuple(row["proves"]))
        name = str(next(iter(row.values())))  # what the row is about comes first
        found.setdefault((commits, row["commit"], row["date"][:10]), []).append(name)
    each = [Age(*key, tuple(names)) for key, names in found.items()]
    return sorted(each, key=lambda age: -sys.maxsize if age.commits is None else -age.commits)


@cache
def commits_since(commit: str, folders: tuple[str, ...]) -> int | None:
    """How many commits have changed these folders since; None: this clone has no such commit."""
    counted = _git("rev-list", "--count", "--no-merges", f"{commit}..HEAD", "--", *folders)
    return int(counted) if counted else None


def _git(*words: str) -> str:
    """What git prints; nothing where it fails."""
    command = ["git", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def report(name: str, found: Sequence[Age]) -> list[str]:
    """What is said of a record."""
    number = lambda wanted: sum(len(age.names) for age in found if wanted(age.commits))  # noqa: E731
    current, unknown = number(lambda n: n == 0), number(lambda n: n is None)
    head = (
        f"{name}: {number(lambda n: True)} rows, {current} of the code as it is, "
        f"{number(bool)} older, {unknown} of a commit that is not here"
    )
    return [head, *(f"{age}" for age in found if age.commits != 0)]


def main(*files: str) -> None:
    for file in map(Path, files) if files else sorted(DOCS.glob("*.jsonl")):
        print("\n".join(report(file.name, ages(read(file), commits_since))))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    main(*sys.argv[1:])
