"""Forward and backward over a rank's share of the global batch.

Decides, once at start and on all ranks alike, when ranks send each other what.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kempner.config.sections import Config
from kempner.data.order.batch_slices import micro_steps
from kempner.data.serve.loader import IGNORE, MicroBatch
from kempner.model.loss import cross_entropy
from kempner.model.sharding import compute_dtype
from kempner.model.spec.communication import EACH_MICRO_BATCH, Choice
from kempner.model.spec.communication_choice import Situation, choose, usable_memory
from kempner.model.spec.mesh import MeshDegrees
from kempner.model.spec.shape import Shape
from kempner.model.transformer import Transformer
from kempner.run.control.heartbeat import Waiting, untimed
from kempner.run.output.logs import logger
from kempner.training.compute.seeds import set_rng
from kempner.training.groups.process_groups import Ranks


def accumulate(
    model: nn.Module,
    micro_batches: Sequence[MicroBatch],
    *,
    device: torch.device,
    seed: int,
    step: int,
    rank: int,
    copies: int = 1,
    choice: Choice = EACH_MICRO_BATCH,
    waiting: Waiting = untimed,
) -> Tensor:
    """Add the step's gradient to the parameters; return its loss, a scalar on `device`.

    The loss is the sum over all valid tokens of all ranks divided by their global count, so neither
    loss nor gradient depends on how the batch is split. Every rank passes the same number of micro
    batches; rows without a valid token weigh nothing. Gradients are reduced, and parameters freed,
    as `choice` says; after the last micro batch all are reduced, and nothing stays gathered.
    `copies` ranks at a time, those of a tensor group, pass the same samples, of which each computes
    a part: they count once. What dropout draws follows from `rank`, of the world, since each drops
    from its own part of the sequence. `waiting` is entered while this rank waits for others.
    """
    valid = _valid_tokens(micro_batches, device)
    with waiting("the count of tokens"):
        valid = (sum_over_ranks(valid) / copies).clamp(min=1)
    total = torch.zeros((), device=device)
    for micro_step, micro_batch in enumerate(micro_batches):
        set_rng(seed, step, micro_step, rank)
        if micro_step == 0 or micro_step + 1 == len(micro_batches):
            _communicate(model, choice, last=micro_step + 1 == len(micro_batches))
        loss = summed_loss(model, micro_batch, device)
        (loss / valid).backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    with waiting("the sum of losses"):
        return sum_over_ranks(total) / copies / valid


def _communicate(model: nn.Module, choice: Choice, last: bool) -> None:
    """What the next backward does about gradients and parameters, `last` in its step or not."""
    if dist.get_world_size() == 1:
        return
    from torch.distributed.fsdp import FSDPModule  # a rank that is alone is spared it

    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or not choice.reduce_once)
        # The sum of a step's shards takes no more memory than one of them.
        model.set_requires_all_reduce(last)
        model.set_reshard_after_backward(last or not choice.keep_parameters)


def weightless(micro_steps: int, micro_batch_size: int, seq_len: int) -> list[MicroBatch]:
    """Micro batches without a valid token, for a rank that has no data but whose peers wait."""
    shape = (micro_batch_size, seq_len)
    empty = MicroBatch(torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORE))
    return [empty] * micro_steps


def summed_loss(model: nn.Module, micro_batch: MicroBatch, device: torch.device) -> Tensor:
    """Cross-entropy in nats, summed over the valid tokens of one micro batch; a float32 scalar."""
    tokens = micro_batch.inputs.to(device, non_blocking=True)
    targets = micro_batch.targets.to(device, non_blocking=True)
    if isinstance(model, Transformer):
        loss: Tensor = model(tokens, targets)
        return loss
    return cross_entropy(model(tokens), targets)


def sum_over_ranks(value: Tensor) -> Tensor:
    """The sum of every rank's `value`, in place."""
    if dist.get_world_size() > 1:
        dist.all_reduce(value)
    return value


def _valid_tokens(micro_batches: Iterable[MicroBatch], device: torch.device) -> Tensor:
    """Counted on the device: the host would wait while a count of its own is copied there."""
    targets = [batch.targets.to(device, non_blocking=True) for batch in micro_batches]
    return torch.stack([(each != IGNORE).sum() for each in targets]).sum().float()


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
