"""What to change in a configuration whose ranks need more memory than there is, or mostly wait."""

from __future__ import annotations

from collections.abc import Iterator

from kempner.config.sections import Config
from kempner.model.spec.communication import Choice
from kempner.model.spec.mesh import MeshDegrees
from kempner.model.spec.step_time import StepTime
from kempner.run.output.units import size_text
from kempner.training.plan.timeline import KINDS, Memory


def advise(config: Config, mesh: MeshDegrees, choice: Choice, memory: Memory, limit: int) -> str:
    """A sentence: by how much it does not fit, what takes most, and what to change first.

    Empty if it fits. What costs least comes first: what the configuration holds against its
    default, then what trades time for memory, then more GPUs.
    """
    if memory.total <= limit:
        return ""
    most = max(KINDS, key=lambda kind: getattr(memory, kind))
    what = next(_remedies(config, mesh, choice, memory))
    too_much = size_text(memory.total - limit)
    return (
        f"{size_text(memory.total)} are {too_much} more than there is room for; most of it, "
        f"{size_text(getattr(memory, most))}, is for {most}: {what}"
    )


def quicken(config: Config, choice: Choice, time: StepTime) -> str:
    """What to change where ranks wait for each other more than they compute; else empty."""
    if time.bound not in ("within_node", "between_nodes"):
        return ""
    if not (choice.reduce_once and choice.keep_parameters):
        return (
            "to send less, make room for what is kept for a step (reduce_gradients, "
            "reshard_after_forward): by train.activation_checkpointing or larger GPUs"
        )
    return f"to send less often, raise train.global_batch_size={config.train.global_batch_size}"


def _remedies(config: Config, mesh: MeshDegrees, choice: Choice, memory: Memory) -> Iterator[str]:
    train = config.train
    if choice.keep_parameters and mesh.data_world > 1:
        yield 'set parallelism.reshard_after_forward="always"'
    if choice.reduce_once and mesh.data_world > 1:
        yield 'set parallelism.reduce_gradients="micro_batch"'
    if train.loss_chunk == 0:
        yield "set train.loss_chunk=1024"
    state = memory.parameters + memory.gradients + memory.optimizer
    if memory.activations + memory.backward + memory.loss >= state:
        if train.micro_batch_size > 1:
            yield f"lower train.micro_batch_size={train.micro_batch_size}"
        if train.activation_checkpointing == "none":
            yield 'set train.activation_checkpointing="selective", or "full"'
        if train.activation_checkpointing_every is not None:
            yield "remove train.activation_checkpointing_every"
        if train.activation_checkpointing == "selective":
            yield 'set train.activation_checkpointing="full"'
        yield (
            f"set parallelism.tensor_parallel_degree={2 * mesh.tensor}, or lower "
            f"train.seq_len={train.seq_len}"
        )
    if mesh.replicate > 1:
        yield "shard over all ranks: set parallelism.data_parallel_replicate_degree=1"
    yield "start more ranks, over which the state is sharded, or take larger GPUs"
