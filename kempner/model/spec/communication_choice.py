"""Chooses when ranks communicate: what sends least between nodes, of what fits the memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kempner.config.sections import Config
from kempner.model.spec.communication import (
    Choice,
    Traffic,
    node_traffic,
    step_buffers,
    tensor_buffers,
    tensor_traffic,
)
from kempner.model.spec.memory import Estimate, estimate_memory
from kempner.model.spec.mesh import MeshDegrees
from kempner.model.spec.shape import Shape
from kempner.run.output.units import size_text

USUAL_GPU = 80 * 10**9
"""Bytes of a GPU where none is configured: of an A100 or H100, the most common in training."""
USED = 0.9
"""Share of a GPU's memory that may be filled by count; the rest is for the CUDA context, NCCL's
buffers and the allocator's fragments."""
_GRAIN = 8 * 10**9


@dataclass(frozen=True)
class Situation:
    """What a choice depends on, besides the configuration. It is the same on all ranks.

    `shape` is None for a model of the user's own. `gpu_memory` is in bytes, None on CPUs.
    `micro_batches` is the number in a step.
    """

    shape: Shape | None
    mesh: MeshDegrees
    ranks_per_node: int
    micro_batches: int
    compute_bytes: int
    gpu_memory: int | None


@dataclass(frozen=True)
class _Option:
    choice: Choice
    traffic: Traffic
    memory: int


def usable_memory(total: int) -> int:
    """Bytes of a GPU of `total` bytes to count on: a multiple of 8 GB, if it has as much.

    Another driver leaves a little more or less of the same GPU, and must not change a choice that
    the last bits of a result depend on.
    """
    return total // _GRAIN * _GRAIN or total


def choose(config: Config, situation: Situation) -> Choice:
    """What the configuration says; where it says auto, what is best in this situation.

    That is what makes the nodes send each other least, then their ranks among themselves, then
    takes least memory, of what fits 0.9 of the GPU by `estimate_memory`. Where nothing does, and
    where memory or model is not known, what takes least memory. The same arguments give the same
    choice: a run that starts again in the same world computes the same bits.
    """
    section = config.parallelism
    options = list(_allowed(config, situation))
    least = options[0]
    if situation.mesh.data_world == 1:
        return Choice(reason="there is one copy of each part, and nothing to send")
    if "auto" not in (section.reduce_gradients, section.reshard_after_forward):
        return _because(least, "the configuration says so")
    if situation.gpu_memory is None:
        return _because(least, "it takes least memory, which the CPU ranks of a node share")
    if situation.shape is None:
        return _because(least, "it takes least memory; how large the model is, only its code knows")
    limit = int(USED * situation.gpu_memory)
    counted = [_counted(config, situation, situation.shape, choice) for choice in options]
    fitting = [option for option in counted if option.memory <= limit]
    if not fitting:
        need = f"needs {size_text(counted[0].memory)} of {size_text(limit)} (0.9 of the GPU)"
        return _because(least, f"it takes least memory, and even so {need}")
    best = min(fitting, key=_cost)
    fits = f"fits {size_text(limit)} (0.9 of the GPU) with {size_text(best.memory)}"
    return _because(best.choice, f"of what fits it sends least; it {fits}")


def needed_memory(config: Config, situation: Situation, shape: Shape, choice: Choice) -> Estimate:
    """What one rank needs, with this choice."""
    return estimate_memory(
        shape,
        world=situation.mesh.world,
        replicate=situation.mesh.replicate,
        tensor=situation.mesh.tensor,
        micro_batch_size=config.train.micro_batch_size,
        seq_len=config.train.seq_len,
        compute_bytes=situation.compute_bytes,
        optimizer=config.optimizer,
        choice=choice,
        loss_chunk=config.train.loss_chunk,
        checkpointing=config.train.activation_checkpointing,
        checkpointing_every=config.train.activation_checkpointing_every or 1,
    )


def step_traffic(config: Config, situation: Situation, shape: Shape, choice: Choice) -> Traffic:
    """What each node sends in a step, with this choice; a tensor group is on one node."""
    train, mesh = config.train, situation.mesh
    micro_batches, compute_bytes = situation.micro_batches, situation.compute_bytes
    buffers = step_buffers(
        shape, mesh, choice, micro_batches=micro_batches, compute_bytes=compute_bytes
    )
    traffic = node_traffic(buffers, mesh, situation.ranks_per_node)
    if mesh.tensor == 1:
        return traffic
    recomputed = -(-shape.n_layers // (train.activation_checkpointing_every or 1))
    of_groups = tensor_buffers(
        shape,
        choice,
        micro_batches=micro_batches,
        tokens=train.micro_batch_size * train.seq_len,
        compute_bytes=compute_bytes,
        recomputed_blocks=recomputed if train.activation_checkpointing != "none" else 0,
    )
    more = tensor_traffic(of_groups, mesh.tensor, situation.ranks_per_node)
    return Traffic(traffic.within + more, traffic.between)


def _allowed(config: Config, situation: Situation) -> Iterator[Choice]:
    """What the configuration leaves open, what takes least memory first."""
    section = config.parallelism
    for keep in (False, True):
        for once in (False, True):
            # With one micro batch there is nothing to keep gradients for.
            if section.reduce_gradients == ("micro_batch" if once else "step"):
                continue
            if section.reshard_after_forward == ("always" if keep else "never"):
                continue
            yield Choice(once and situation.micro_batches > 1, keep)


def _counted(config: Config, situation: Situation, shape: Shape, choice: Choice) -> _Option:
    traffic = step_traffic(config, situation, shape, choice)
    memory = needed_memory(config, situation, shape, choice).total
    return _Option(choice, traffic, memory)


def _cost(option: _Option) -> tuple[int, int, int]:
    return option.traffic.between, option.traffic.within, option.memory


def _because(choice: Choice, reason: str) -> Choice:
    return Choice(choice.reduce_once, choice.keep_parameters, reason)
