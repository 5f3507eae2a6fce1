"""The memory, operations and communication of a traced step, by parts; and their extrapolation to
more layers.

Blocks are equal, so that every byte and operation of a step is linear in their number. A step is
cut where a block begins, forward and backward. The first blocks of a longer model do what those of
a shorter one do, operation for operation, and so do its last ones; the memory at blocks between
them lies between that at the former and the latter, and so never is the peak.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

KINDS = (
    "parameters",
    "gradients",
    "optimizer",
    "gathered",
    "activations",
    "loss",
    "backward",
    "other",
)
"""The uses of memory; attributes of `PeakMemory`."""
PARAMETERS, GRADIENTS, OPTIMIZER, GATHERED, ACTIVATIONS, LOSS, BACKWARD, OTHER = range(len(KINDS))
NOT_THERE = len(KINDS)
"""The kind of memory that the GPU's kernels would not allocate."""

Stage = Literal["start", "reference", "forward", "backward", "update"]
"""`reference` is the forward without gradients, of preferences."""
Work: TypeAlias = "Counter[tuple[int, int]]"
"""The number of operations, by their FLOPs and the bytes that they read and write."""
Rows: TypeAlias = npt.NDArray[np.int64]


class StepPlace(NamedTuple):
    """A part of a step: a block, or the part before the blocks (-1), or after them (None)."""

    stage: Stage
    micro_step: int = 0
    block: int | None = None


class Collective(NamedTuple):
    """A collective, and its dimension of the mesh."""

    operation: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
    dimension: str


@dataclass(frozen=True)
class Segment:
    """One part of a step: bytes held after each event, [events, kinds], its operations, and bytes
    sent."""

    place: StepPlace
    memory: Rows
    work: Work
    sent: Counter[Collective]


@dataclass(frozen=True)
class StepPhase:
    """A part of a step whose communication can overlap with its computation, `times` per step.
    `sent` has the bytes of the collectives' whole buffers."""

    stage: Stage
    times: int
    work: Work
    sent: Counter[Collective]


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of one rank at the peak of a step."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    """Whole parameters, gathered from their shards, or cast to the compute type."""
    activations: int
    """What the forward keeps for the backward."""
    loss: int
    """Logits, and intermediates of the loss."""
    backward: int
    """Gradients of activations, and recomputed activations."""
    other: int
    """Tokens, positions, masks, temporaries of the optimizer."""

    @property
    def total(self) -> int:
        return sum(getattr(self, kind) for kind in KINDS)


@dataclass(frozen=True)
class Trace:
    """A traced step. `state` is the bytes of all ranks' parameters and optimizer state, as in a
    checkpoint."""

    layers: int
    segments: Sequence[Segment]
    state: int


def peak(trace: Trace) -> PeakMemory:
    return _most([segment.memory for segment in trace.segments])


def phases(trace: Trace) -> dict[tuple[Stage, int], tuple[Work, Counter[Collective]]]:
    found: dict[tuple[Stage, int], tuple[Work, Counter[Collective]]] = {}
    for segment in trace.segments:
        stage, micro_step, _ = segment.place
        work, sent = found.setdefault((stage, micro_step), (Counter(), Counter()))
        work.update(segment.work)
        sent.update(segment.sent)
    return found


@dataclass(frozen=True)
class TracedStep:
    """A whole step of the model."""

    memory: PeakMemory
    phases: Sequence[StepPhase]
    state: int

    @property
    def flops(self) -> int:
        """FLOPs of one rank in the forwards and backwards of a step."""
        computing = [phase for phase in self.phases if phase.stage != "update"]
        return sum(p.times * flops * n for p in computing for (flops, _), n in p.work.items())

    @property
    def sent(self) -> Counter[Collective]:
        """Bytes of the buffers of one rank's collectives in a step."""
        total: Counter[Collective] = Counter()
        for phase in self.phases:
            total.update({kind: phase.times * size for kind, size in phase.sent.items()})
        return total


def whole(trace: Trace, micro_steps: int) -> TracedStep:
    """The traced step, with `micro_steps` micro steps."""
    return TracedStep(peak(trace), _repeated(phases(trace), micro_steps), trace.state)


def extrapolate(shorter: Trace, longer: Trace, layers: int, micro_steps: int) -> TracedStep:
    """The step with `layers` layers. With p more layers in `longer` than in `shorter`, `shorter`
    must have at least `3 + 2 p`, and `layers` a multiple of p more. Of `micro_steps` beyond those
    traced, all but the first and the last are equal."""
    period = longer.layers - shorter.layers
    times, over = divmod(layers - shorter.layers, period)
    assert over == 0
    front = 1 + period
    of_shorter, of_longer = _by_key(shorter, front), _by_key(longer, front)
    rows = []
    for key, segment in of_shorter.items():
        low, high = _alike(segment.memory, of_longer[key].memory)
        rows.append(low + times * (high - low))
    fewer, more = phases(shorter), phases(longer)
    grown = {
        key: (_line(work, more[key][0], times), _line(sent, more[key][1], times))
        for key, (work, sent) in fewer.items()
    }
    state = shorter.state + times * (longer.state - shorter.state)
    return TracedStep(_most(rows), _repeated(grown, micro_steps), state)


def _by_key(trace: Trace, front: int) -> dict[tuple[Any, ...], Segment]:
    """Segments by position, counted from the front or the back."""
    found: dict[tuple[Any, ...], Segment] = {}
    for segment in trace.segments:
        stage, micro_step, block = segment.place
        if block is None or block < front:
            key = (stage, micro_step, "front", block)
        else:
            key = (stage, micro_step, "back", trace.layers - block)
        assert key not in found
        found[key] = segment
    return found


def _alike(one: Rows, other: Rows) -> tuple[Rows, Rows]:
    """Both event by event; if their numbers differ, as in a loop over matrices, only the peaks."""
    if len(one) == len(other):
        return one, other
    return one[[one.sum(1).argmax()]], other[[other.sum(1).argmax()]]


def _line(one: Counter[Any], other: Counter[Any], times: int) -> Counter[Any]:
    """`one` plus `times` the difference to `other`, for each key."""
    keys = one.keys() | other.keys()
    return Counter({key: one[key] + times * (other[key] - one[key]) for key in keys})


def _most(rows: Sequence[Rows]) -> PeakMemory:
    best = max(
        (part[part.sum(1).argmax()] for part in rows if len(part)), key=lambda row: row.sum()
    )
    return PeakMemory(*(int(size) for size in best))


def _repeated(
    found: Mapping[tuple[Stage, int], tuple[Work, Counter[Collective]]], micro_steps: int
) -> list[StepPhase]:
    traced = 1 + max(micro_step for _, micro_step in found)
    between = 1 + micro_steps - traced
    return [
        StepPhase(stage, between if traced > 2 and micro_step == 1 else 1, work, sent)
        for (stage, micro_step), (work, sent) in found.items()
    ]
