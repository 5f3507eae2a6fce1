"""Compares what a disturbed run did with what the undisturbed one did in the same steps.

What the ranks of a rehearsal have written down, read again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
class StepStart:
    """What was there as a step began."""

    variables: Mapping[str, Variable]
    generators: Mapping[str, str]
    iterators: tuple[str, ...]


@dataclass(frozen=True)
class StepResult:
    """What came of a step."""

    samples: tuple[str, ...]
    losses: tuple[float, ...]
    rates: Mapping[str, list[float]]
    gradients: Mapping[str, str]
    weights: Mapping[str, str]
    torch_generator: str
    batches: int


@dataclass
class RankRecord:
    """What one rank has seen in one start of the program."""

    began: dict[int, StepStart] = field(default_factory=dict)
    done: dict[int, StepResult] = field(default_factory=dict)
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


def read_record(path: Path) -> RankRecord:
    """The record of a rank; an empty one if it has written none."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return parse(lines)


def parse(lines: Iterable[str]) -> RankRecord:
    """A record from its lines; what a killed rank has begun to write is left out."""
    record = RankRecord()
    for text in lines:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        _take(record, line)
    return record


def _take(record: RankRecord, line: dict[str, Any]) -> None:
    if "began" in line:
        variables = {name: Variable(*seen) for name, seen in line["variables"].items()}
        began = StepStart(variables, line["globals"], tuple(line["iterators"]))
        record.began[line["began"]] = began
        record.sources |= set(line["files"])
    elif "ended" in line:
        step = line["ended"]
        names = ("rates", "gradients", "weights", "torch_generator", "batches")
        same = {name: line[name] for name in names}
        record.done[step] = StepResult(tuple(line["samples"]), tuple(line["losses"]), **same)
        record.evaluations.setdefault(step, []).extend(line["evaluation"])
    elif "after" in line:
        record.evaluations.setdefault(line["after"], []).extend(line["evaluation"])
    elif "saved" in line:
        record.saved.append(line["saved"])
    elif "wrote" in line:
        record.wrote, record.read = tuple(line["wrote"]), tuple(line["read"])
        record.called = tuple(line["called"])


COMPARED: dict[str, Callable[[StepResult], object]] = {
    "samples": lambda done: done.samples,
    "generators": lambda done: done.torch_generator,
    "losses": lambda done: done.losses,
    "gradients": lambda done: done.gradients,
    "rate": lambda done: done.rates,
    "weights": lambda done: done.weights,
}
"""What of a step is compared, in the order in which one follows from the other."""


@dataclass(frozen=True)
class StepDifference:
    """In which step of which rank something was otherwise first."""

    field: str
    step: int
    rank: int


@dataclass(frozen=True)
class Changed:
    """A variable that is otherwise at the first step of a start than it was undisturbed."""

    name: str
    kind: str
    before: Variable
    now: Variable
    anew: bool
    """Whether it is what it was when the program was started for the first time."""


def differences(
    undisturbed: Sequence[RankRecord], other: Sequence[RankRecord]
) -> list[StepDifference]:
    """What differs in the steps that both have done, the earliest step first."""
    found = []
    for rank, (expected, seen) in enumerate(zip(undisturbed, other, strict=True)):
        for name, value in COMPARED.items():
            for step in sorted(expected.done.keys() & seen.done.keys()):
                if _differ(value(expected.done[step]), value(seen.done[step]), name):
                    found.append(StepDifference(name, step, rank))
                    break
    order = list(COMPARED)
    return sorted(found, key=lambda one: (one.step, order.index(one.field), one.rank))


def _differ(expected: object, seen: object, field: str) -> bool:
    """Weights are known of the optimizers that have stepped since the start."""
    if field == "weights" and isinstance(expected, Mapping) and isinstance(seen, Mapping):
        return any(expected[name] != seen[name] for name in expected.keys() & seen.keys())
    return expected != seen


def lost_evaluations(
    undisturbed: Sequence[RankRecord], parts: Sequence[Sequence[RankRecord]]
) -> list[StepDifference]:
    """Evaluations that no start made as the undisturbed run did."""
    found = []
    for rank, expected in enumerate(undisturbed):
        made: dict[int, list[list[str]]] = {}
        for part in parts:
            for step, digests in part[rank].evaluations.items():
                # What a resume makes up comes before its first step, and so after none.
                at = step or part[rank].first - 1
                made.setdefault(at, []).append(digests)
        for step, digests in sorted(expected.evaluations.items()):
            if digests and not any(_contains(seen, digests) for seen in made.get(step, [])):
                found.append(StepDifference("evaluation", step, rank))
                break
    return found


def _contains(seen: Sequence[str], digests: Sequence[str]) -> bool:
    """Whether an evaluation is among what was evaluated, as a resume may do more of it."""
    size = len(digests)
    return any(list(seen[n : n + size]) == list(digests) for n in range(len(seen) - size + 1))


def changed(undisturbed: RankRecord, other: RankRecord, step: int) -> list[Changed]:
    """The variables that are otherwise as `step` begins."""
    if step not in undisturbed.began or step not in other.began:
        return []
    start = undisturbed.began[undisturbed.first].variables
    before, now = undisturbed.began[step].variables, other.began[step].variables
    found = [
        Changed(name, seen.kind, seen, now[name], start.get(name) == now[name])
        for name, seen in before.items()
        if name in now and now[name].digest != seen.digest
    ]
    return found + _generators(undisturbed, other, step)


def _generators(undisturbed: RankRecord, other: RankRecord, step: int) -> list[Changed]:
    """The global generators that steps draw from, and that stand elsewhere."""
    names = {"numpy": "NumPy's global generator", "random": "Python's global generator"}
    found = []
    for key, name in names.items():
        expected = undisturbed.began[step].generators[key]
        seen = other.began[step].generators[key]
        if expected != seen and _drawn_from(undisturbed.began, key):
            before, now = (Variable("generator", digest, "") for digest in (expected, seen))
            found.append(Changed(name, "generator", before, now, anew=False))
    return found


def _drawn_from(began: Mapping[int, StepStart], key: str) -> bool:
    """Whether steps move a global generator."""
    return len({seen.generators[key] for seen in began.values()}) > 1


def samples_elsewhere(
    undisturbed: Sequence[RankRecord], other: Sequence[RankRecord], after: int
) -> bool | None:
    """Whether another number of ranks had the samples that were next, each once.

    None where that cannot be told: each rank draws its own, and there are no others to come.
    """
    expected = _rows(undisturbed, after)
    seen = _rows(other, after)
    if not set().union(*expected) & set().union(*seen):
        return None
    if _draws_its_own(undisturbed, other):
        return None
    wanted = [row for rows in expected for row in rows]
    got = [row for rows in seen for row in rows]
    size, total = 0, min(len(wanted), len(got))
    for rows in expected:
        if size + len(rows) > total:
            break
        size += len(rows)
    # Whole steps of the undisturbed run; of a smaller run, whatever is among what was next.
    if size == 0:
        return not Counter(got) - Counter(wanted[: len(expected[0])])
    return Counter(wanted[:size]) == Counter(got[:size])


def _draws_its_own(undisturbed: Sequence[RankRecord], other: Sequence[RankRecord]) -> bool:
    """Whether each rank had the same in each step as on more ranks, and no sample ever came twice:
    it is drawn by step and rank, and belongs to no data set.
    """
    same = all(
        done.samples == expected.done[step].samples
        for expected, seen in zip(undisturbed, other, strict=False)
        for step, done in seen.done.items()
        if step in expected.done
    )
    rows = [row for record in undisturbed for done in record.done.values() for row in done.samples]
    return same and len(set(rows)) == len(rows)


def _rows(records: Sequence[RankRecord], after: int) -> list[list[str]]:
    """The samples of all ranks for each step after one."""
    steps = sorted({step for record in records for step in record.done if step > after})
    return [
        [row for record in records if step in record.done for row in record.done[step].samples]
        for step in steps
    ]
