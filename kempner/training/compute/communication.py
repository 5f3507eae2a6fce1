"""Decides, once at start and on all ranks alike, when ranks send each other what."""

from __future__ import annotations

import torch
import torch.distributed as dist

from kempner.config.sections import Config
from kempner.data.order.global_batches import micro_steps
from kempner.model.sharding import compute_dtype
from kempner.model.spec.communication import Choice
from kempner.model.spec.communication_choice import Situation, choose, usable_memory
from kempner.model.spec.mesh import MeshDegrees
from kempner.model.spec.shape import Shape
from kempner.run.output.logs import logger
from kempner.training.groups.process_groups import Ranks


def choose_communication(config: Config, vocab_size: int, ranks: Ranks) -> Choice:
    """What `[parallelism]` comes to in this world; rank 0 logs it, with its reason."""
    compute_bytes = compute_dtype(config.train.dtype, ranks.device).itemsize
    situation = situation_of(
        config, vocab_size, ranks.degrees, compute_bytes, *_smallest_node(ranks)
    )
    choice = choose(config, situation)
    if ranks.world.rank == 0 and ranks.world.size > 1:
        logger().info("communication", choice=choice.describe(), reason=choice.reason)
    return choice


def situation_of(
    config: Config,
    vocab_size: int,
    mesh: MeshDegrees,
    compute_bytes: int,
    ranks_per_node: int,
    gpu_memory: int | None,
) -> Situation:
    """What the choice depends on, in a world that need not be there yet."""
    train = config.train
    return Situation(
        shape=None if config.model.factory is not None else Shape.of(config.model, vocab_size),
        mesh=mesh,
        ranks_per_node=ranks_per_node,
        micro_batches=micro_steps(train.global_batch_size, mesh.data_world, train.micro_batch_size),
        compute_bytes=compute_bytes,
        gpu_memory=gpu_memory,
    )


def _smallest_node(ranks: Ranks) -> tuple[int, int | None]:
    """Ranks per node, and bytes of a GPU: the fewest of any, so that all ranks choose alike."""
    if ranks.device.type != "cuda":
        return ranks.world.local_size, None  # on which nothing depends
    memory = usable_memory(torch.cuda.get_device_properties(ranks.device).total_memory)
    fewest = torch.tensor([ranks.world.local_size, memory])
    dist.all_reduce(fewest, dist.ReduceOp.MIN, group=ranks.votes)
    ranks_per_node, memory = fewest.tolist()
    return ranks_per_node, memory
