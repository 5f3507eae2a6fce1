"""Finds where two runs part: the first step whose numbers differ, and by traces of it the first
operation.

A step follows in order from its samples, the forward, the backward, the sum of gradients, their
norm, the learning rate and the update. What differs first in this order is the cause of what
differs later, or lies between it and the last that is equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kempner.insight.replay import ReplayedStep

Line = Mapping[str, Any]


class Place(NamedTuple):
    """Where in a step a value is computed: the `operation`, in words; its `name`, if it has one;
    and of which micro batch."""

    operation: str
    name: str = ""
    micro_batch: int | None = None
    part: int | None = None

    def __str__(self) -> str:
        text = f"{self.operation} {self.name}" if self.name else self.operation
        return text if self.micro_batch is None else f"{text} in micro batch {self.micro_batch}"


SAMPLES = "the samples"
FORWARD = "the output of"
BACKWARD = "the gradient of the output of"
GRADIENT = "the gradient of the parameter"
LOSS = "the loss of all ranks"
NORM = "the gradient norm"
RATE = "the learning rate"
CLIPPING = "the clipping before the update of"
UPDATE = "the update of"
WEIGHT = "the weight"


@dataclass(frozen=True)
class FirstOperation:
    """The first value that differs between two traces of a step, None where only one has it, and
    the last one before it that is equal."""

    place: Place
    a: object
    b: object
    before: Place | None

    @property
    def sentence(self) -> str:
        shown = " and ".join(
            f"not computed in {run}" if value is None else f"{_shown(value)} in {run}"
            for run, value in (("A", self.a), ("B", self.b))
        )
        since = "" if self.before is None else f"; equal up to {self.before}"
        return f"operation: {self.place} differs: {shown}{since}"


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return f"norm {value['norm']} ({value['fingerprint']})"
    return str(value)


def first_step(
    compared: Sequence[ReplayedStep],
) -> tuple[ReplayedStep | None, ReplayedStep | None]:
    """The first step that differs, if any does, and the last one before it."""
    equal = None
    for step in compared:
        if step.differing:
            return step, equal
        equal = step
    return None, equal


def first_operation(
    a: Sequence[Line], b: Sequence[Line], clips: tuple[float, float] = (0.0, 0.0)
) -> FirstOperation | None:
    """The first operation that differs between the lines of a step in two traces, each beginning
    with that of the step; None if all are equal. `clips` are the largest gradient norms."""
    ours, theirs = list(_values(a)), list(_values(b))
    before = None
    for (place, value), (other, another) in zip(ours, theirs, strict=False):
        if place != other:
            known = {one for one, _ in theirs}
            if place in known:  # so A lacks what B has here
                return FirstOperation(other, None, another, before)
            return FirstOperation(place, value, None, before)
        if value != another:
            if place.operation == UPDATE and _scale(a[0], clips[0]) != _scale(b[0], clips[1]):
                place = place._replace(operation=CLIPPING)
            return FirstOperation(place, value, another, before)
        before = place
    at = min(len(ours), len(theirs))
    if at < len(ours):
        return FirstOperation(*ours[at], None, before)
    if at < len(theirs):
        return FirstOperation(theirs[at][0], None, theirs[at][1], before)
    return None


def first_parameter(a: Sequence[Line], b: Sequence[Line]) -> str | None:
    """A sentence on the parameters that differ between the lines of a step in two traces: by their
    gradients, or if those are equal by their updates or new values."""
    ours, theirs = (
        {line["parameter"]: line for line in lines if line["kind"] == "parameter"}
        for lines in (a, b)
    )
    both = [name for name in ours if name in theirs]
    for key in ("gradient", "update", "weight"):
        if differing := [n for n in both if ours[n][key] != theirs[n][key]]:
            difference = f"the {key} of {differing[0]} differs, the first of {len(differing)}"
            return f"parameter: {difference} among {len(both)}"
    return None


def _scale(step: Line, clip: float) -> float:
    """The factor of gradients."""
    norm = step.get("grad_norm")
    return 1.0 if not clip or norm is None else min(1.0, clip / (norm + 1e-6))


def _values(lines: Sequence[Line]) -> Iterator[tuple[Place, object]]:
    """The values of a step in the order in which they follow from each other; those of different
    micro batches side by side, since they follow from the same weights."""
    step, kinds = lines[0], {"batch": SAMPLES, "output": FORWARD, "gradient": BACKWARD}
    for kind, operation in kinds.items():
        seen = Counter[tuple[int, int | None]]()
        found = []
        for line in (line for line in lines if line["kind"] == kind):
            micro = line["micro_batch"], line.get("part")
            seen[micro] += 1
            place = Place(operation, line.get("module", ""), *micro)
            value = line["samples"] if kind == "batch" else _figures(line)
            found.append((seen[micro], line["micro_batch"], line.get("part") or 0, place, value))
        found.sort(key=lambda one: one[:3])
        yield from ((place, value) for *_, place, value in found)
    parameters = [line for line in lines if line["kind"] == "parameter"]
    yield from _of_parameters(parameters, GRADIENT, "gradient")
    yield from (
        (Place(operation), step.get(key))
        for operation, key in ((LOSS, "loss"), (NORM, "grad_norm"), (RATE, "lr"))
    )
    yield from _of_parameters(parameters, UPDATE, "update")
    yield from _of_parameters(parameters, WEIGHT, "weight")


def _of_parameters(
    lines: Sequence[Line], operation: str, key: str
) -> Iterator[tuple[Place, object]]:
    for line in lines:
        yield Place(operation, line["parameter"]), _figures(line[key])


def _figures(line: Line) -> dict[str, object]:
    return {key: line[key] for key in ("norm", "fingerprint")}
