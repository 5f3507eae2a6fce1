"""Whether a run that was disturbed noted the same as the undisturbed one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Place = tuple[str, str]
"""What a fact is, and where."""

RELATIVE = 1e-5
"""By how much losses may differ on another number of ranks. It adds the same float32 numbers in
another order: 1e-7 in a sum of so few, and a dozen steps of an optimizer on top of that."""

ROUNDED = ("loss", "evaluation", "size")
"""What is a sum over samples or weights, so that another number of ranks rounds it otherwise."""

BY_RANK = ("samples", "loss")
"""Of which each rank has its share, of every step."""

OF_ONE_WORLD = "weights"
"""How the facts begin that rounding changes altogether; `size` stands for them."""


@dataclass
class Notes:
    """What a rank noted in one start or in all: each fact as often as it was noted."""

    noted: dict[Place, list[object]] = field(default_factory=dict)

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, object]]) -> Notes:
        notes = cls()
        for line in lines:
            place = (str(line["fact"]), str(line["place"]))
            notes.noted.setdefault(place, []).append(line["value"])
        return notes


def same_world(
    undisturbed: Sequence[Notes], disturbed: Sequence[Notes], once: bool
) -> Iterable[str]:
    """What differs, rank by rank; where the run was stopped and not killed, no step is made twice:
    `once`."""
    for rank, (expected, found) in enumerate(zip(undisturbed, disturbed, strict=True)):
        for name, place in sorted(expected.noted.keys() | found.noted.keys(), key=_in_order):
            wanted, seen = expected.noted.get((name, place)), found.noted.get((name, place))
            if wanted is None or seen is None:
                which = "is there, and should not be" if wanted is None else "is missing"
                yield f"rank {rank}: {name} {place} {which}"
            elif any(value != wanted[0] for value in seen):
                yield f"rank {rank}: {name} {place} is {_shown(seen)}, not {_shown(wanted[:1])}"
            elif once and name == "loss" and len(seen) > 1:
                yield f"rank {rank}: step {place} was made {len(seen)} times"


def another_world(undisturbed: Sequence[Notes], disturbed: Sequence[Notes]) -> Iterable[str]:
    """What differs where the number of ranks changed: over all ranks together, by the step."""
    expected, found = _whole(undisturbed), _whole(disturbed)
    for name, place in sorted(expected.keys() | found.keys(), key=_in_order):
        if (name, place) not in found:
            yield f"{name} {place} is missing"
            continue
        if (name, place) not in expected:
            yield f"{name} {place} is there, and should not be"
            continue
        wanted, seen = expected[name, place], found[name, place]
        if not (_near(wanted, seen) if name in ROUNDED else wanted == seen):
            yield f"{name} {place} is {seen}, not {wanted}"


def _whole(ranks: Sequence[Notes]) -> dict[Place, object]:
    """Of each step all samples, sorted, and the mean loss; of all else what rank 0 noted last."""
    shares: dict[Place, list[object]] = {}
    whole: dict[Place, object] = {}
    for number, notes in enumerate(ranks):
        for (name, place), values in notes.noted.items():
            if name.startswith(OF_ONE_WORLD):
                continue
            if name in BY_RANK:
                shares.setdefault((name, place.partition(".")[0]), []).append(values[-1])
            elif number == 0:
                whole[name, place.partition(".")[0]] = _number(values[-1])
    for (name, place), parts in shares.items():
        whole[name, place] = (
            sorted(sample for part in parts for sample in part)  # type: ignore[attr-defined]
            if name == "samples"
            else math.fsum(_number(part) for part in parts) / len(parts)  # type: ignore[misc]
        )
    return whole


def _number(value: object) -> object:
    """A number that was noted to the bit as one; all else as it is."""
    if isinstance(value, str) and value.lstrip("-").startswith(("0x", "inf", "nan")):
        return float.fromhex(value)
    return value


def _near(one: object, other: object) -> bool:
    assert isinstance(one, float), one
    assert isinstance(other, float), other
    return math.isclose(one, other, rel_tol=RELATIVE, abs_tol=RELATIVE)


def _in_order(place: Place) -> tuple[int, float, str]:
    """The earliest step first."""
    name, where = place
    return (0, float(where), name) if where[0].isdigit() else (1, 0.0, name)


def _shown(values: Iterable[object]) -> str:
    return " then ".join(dict.fromkeys(str(_number(value)) for value in values))
