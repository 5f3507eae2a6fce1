"""What the ranks of a rehearsal have written down, read again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Variable:
    """A variable of the program: its kind, a digest, and a few words for a person."""

    kind: str
    digest: str
    words: str


@dataclass(frozen=True)
class Began:
    """What was there as a step began."""

    variables: Mapping[str, Variable]
    generators: Mapping[str, str]
    iterators: tuple[str, ...]


@dataclass(frozen=True)
class Done:
    """What came of a step."""

    samples: tuple[str, ...]
    losses: tuple[float, ...]
    rates: Mapping[str, list[float]]
    gradients: Mapping[str, str]
    weights: Mapping[str, str]
    torch_generator: str
    batches: int


@dataclass
class Record:
    """What one rank has seen in one start of the program."""

    began: dict[int, Began] = field(default_factory=dict)
    done: dict[int, Done] = field(default_factory=dict)
    evaluations: dict[int, list[str]] = field(default_factory=dict)
    """Digests of what was evaluated, by the last step that had begun."""
    saved: list[int] = field(default_factory=list)
    sources: set[str] = field(default_factory=set)
    """The program's own files of Python."""
    wrote: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    called: tuple[str, ...] = ()

    @property
    def first(self) -> int:
        """The first step that began; 0 if none did."""
        return min(self.began, default=0)

    @property
    def last(self) -> int:
        """The last step that is done; 0 if none is."""
        return max(self.done, default=0)


def read_record(path: Path) -> Record:
    """The record of a rank; an empty one if it has written none."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return parse(lines)


def parse(lines: Iterable[str]) -> Record:
    """A record from its lines; what a killed rank has begun to write is left out."""
    record = Record()
    for text in lines:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        _take(record, line)
    return record


def _take(record: Record, line: dict[str, Any]) -> None:
    if "began" in line:
        variables = {name: Variable(*seen) for name, seen in line["variables"].items()}
        began = Began(variables, line["globals"], tuple(line["iterators"]))
        record.began[line["began"]] = began
        record.sources |= set(line["files"])
    elif "ended" in line:
        step = line["ended"]
        names = ("rates", "gradients", "weights", "torch_generator", "batches")
        same = {name: line[name] for name in names}
        record.done[step] = Done(tuple(line["samples"]), tuple(line["losses"]), **same)
        record.evaluations.setdefault(step, []).extend(line["evaluation"])
    elif "after" in line:
        record.evaluations.setdefault(line["after"], []).extend(line["evaluation"])
    elif "saved" in line:
        record.saved.append(line["saved"])
    elif "wrote" in line:
        record.wrote, record.read = tuple(line["wrote"]), tuple(line["read"])
        record.called = tuple(line["called"])
