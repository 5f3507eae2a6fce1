"""How long a training step takes at least, and what holds it up: arithmetic on peak figures.

The model is a roofline (Williams et al., "Roofline", 2009): an operation takes as long as what it
computes, or what it reads and writes, whichever is longer. What ranks send each other goes on
beside it, where FSDP's prefetch lets it; what a tensor group exchanges is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kempner.model.spec.hardware import Assumptions, Gpu

Bound = Literal["compute", "memory", "within_node", "between_nodes"]
"""What a step waits for: products of matrices, a GPU's own memory, other GPUs of its node, or
other nodes."""


@dataclass(frozen=True)
class Load:
    """What one rank does in a part of a step, and its node, `times` in the step.

    Attributes:
        operations: FLOPs, bytes read and written, and how many operations are so.
        within: bytes that one rank sends to others of its node, beside computing.
        between: bytes that a node sends to others, beside computing.
        waited: bytes that one rank sends within its tensor group, which computing waits for.
    """

    times: int
    operations: Sequence[tuple[int, int, int]]
    within: float
    between: float
    waited: float


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by what they are spent on; those of the network are not hidden by others.

    Attributes:
        compute: products of matrices.
        memory: operations that read and write more than they compute.
        within_node: waiting for GPUs of the same node.
        between_nodes: waiting for other nodes.
    """

    compute: float
    memory: float
    within_node: float
    between_nodes: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.compute + self.memory + self.within_node + self.between_nodes

    @property
    def bound(self) -> Bound:
        """What most of the step is spent on."""
        parts: Mapping[Bound, float] = {
            "compute": self.compute,
            "memory": self.memory,
            "within_node": self.within_node,
            "between_nodes": self.between_nodes,
        }
        return max(parts, key=lambda part: parts[part])


def step_time(loads: Sequence[Load], gpu: Gpu, given: Assumptions) -> StepTime:
    """How long a step takes. Within a load everything overlaps but `waited`; between them nothing.

    Within a node and between nodes things are sent at the same time, as a ring over both does.
    """
    compute = memory = within = between = 0.0
    for load in loads:
        computing, moving = _own_time(load, gpu, given)
        waited = load.waited / (gpu.link_rate * given.network_share)
        inside = load.within / (gpu.link_rate * given.network_share)
        outside = load.between / (given.network * given.network_share)
        hidden = computing + moving + waited
        exposed = max(inside, outside) - hidden
        compute += load.times * computing
        memory += load.times * moving
        within += load.times * (waited + (max(exposed, 0) if inside >= outside else 0))
        between += load.times * (max(exposed, 0) if outside > inside else 0)
    return StepTime(compute, memory, within, between)


def _own_time(load: Load, gpu: Gpu, given: Assumptions) -> tuple[float, float]:
    """Seconds of operations that compute longer than they read and write, and of the others."""
    computing = moving = 0.0
    for flops, size, number in load.operations:
        multiplying = flops / (gpu.flops * given.compute_share)
        streaming = size / (gpu.memory_rate * given.memory_share)
        if multiplying >= streaming:
            computing += number * multiplying
        else:
            moving += number * streaming
    return computing, moving
