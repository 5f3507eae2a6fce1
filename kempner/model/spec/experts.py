"""How much memory a mixture of experts needs on a rank, by how its experts are spread: arithmetic.

Tensor parallelism cuts a matrix; only expert parallelism (EP) takes whole experts from a rank. With
EP ranks that each hold another part of the experts, a rank has `experts / EP` of each layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from kempner.model.spec.communication_choice import USED

WEIGHT_BYTES = 2
"""Of a parameter in bfloat16."""

TRAINING_BYTES = 16
"""Of a parameter that AdamW trains: weight, gradient and two moments in float32. Weight and
gradient in bfloat16 beside float32 master weights and moments are as much."""

GATHERED_LAYERS = 2
"""Layers that are whole at a time where the state is sharded: one in use, one on its way."""


@dataclass(frozen=True)
class ExpertModel:
    """A mixture-of-experts model; `experts` is their number in a layer.

    `expert_parameters` are those of all experts in all layers together, `other_parameters` all
    others, shared experts included.
    """

    experts: int
    layers: int
    expert_parameters: int
    other_parameters: int

    @property
    def parameters(self) -> int:
        """The number of all parameters."""
        return self.expert_parameters + self.other_parameters


@dataclass(frozen=True)
class Division:
    """What a rank holds when `expert_parallel` ranks share the experts. Bytes, without activations
    and caches.

    Attributes:
        weights: in bfloat16, as to generate or to convert.
        sharded: to train, where ranks that would hold the same share it (FSDP, ZeRO-3).
        whole: to train, where each holds its own (DDP).
    """

    expert_parallel: int
    experts: int
    weights: int
    sharded: int
    whole: int


def divide_experts(model: ExpertModel, world: int) -> list[Division]:
    """All ways to spread the experts over `world` ranks, the fewest EP ranks first.

    EP divides the experts of a layer, and the ranks.
    """
    ways = [n for n in range(1, world + 1) if model.experts % n == world % n == 0]
    return [_division(model, world, ep) for ep in ways]


def fits(needed: int, memory: int) -> bool:
    """Whether `needed` bytes fit on a GPU with `memory` bytes."""
    return needed <= USED * memory


def _division(model: ExpertModel, world: int, ep: int) -> Division:
    own = -(-model.expert_parameters // ep) + model.other_parameters
    layer = -(-own // model.layers)
    return Division(
        expert_parallel=ep,
        experts=model.experts // ep,
        weights=WEIGHT_BYTES * own,
        sharded=TRAINING_BYTES * -(-model.parameters // world)
        + WEIGHT_BYTES * GATHERED_LAYERS * layer,
        whole=TRAINING_BYTES * own,
    )
