"""Forward and backward over a rank's share of the global batch; when ranks send each other what,
which all decide alike at the start; random numbers as a pure function of (seed, step, micro step,
rank)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kempner.config.sections import Config
from kempner.data.order.batch_slices import micro_steps
from kempner.data.serve.loader import IGNORE, MicroBatch
from kempner.model.fused import cross_entropy
from kempner.model.sharding import compute_dtype
from kempner.model.spec.communication import EACH_MICRO_BATCH, Choice
from kempner.model.spec.memory import Situation, choose, usable_memory
from kempner.model.spec.mesh import MeshDegrees
from kempner.model.spec.shape import Shape
from kempner.model.transformer import Transformer
from kempner.run.control.heartbeat import Waiting, untimed
from kempner.run.output.logs import logger
from kempner.training.compute.preferences import PAIR_MEANS, count_pairs, summed_over_pairs
from kempner.training.groups.process_groups import Ranks

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class _Program:
    """What the program has seeded torch's generator with, which steps seed anew."""

    own: int | None = None
    replaced_by: int | None = None

    def seed(self) -> int:
        """The last seed that was not a step's."""
        now = torch.default_generator.initial_seed()
        if self.own is None or now != self.replaced_by:
            self.own = now
        return self.own


_program = _Program()


def program_seed() -> int:
    """What the program gave to `torch.manual_seed`; torch's default if nothing."""
    return _program.seed()


def given_seed() -> int | None:
    """The same, or None if the program seems to have given nothing: torch draws 64 bits then, the
    upper half of which is hardly ever zero."""
    seed = program_seed()
    return seed if seed < 1 << 32 else None


def seed_for(seed: int, step: int, micro_step: int, rank: int) -> int:
    """A 63-bit seed: the first bytes of BLAKE2b over the four numbers."""
    text = f"kempner.rng.v1:{seed}:{step}:{micro_step}:{rank}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def set_rng(seed: int, step: int, micro_step: int, rank: int) -> None:
    """Seed torch's global generators (CPU and CUDA), from which dropout draws."""
    if torch.default_generator.initial_seed() != _program.replaced_by:
        _program.seed()  # the program has seeded it since the last step
    number = _program.replaced_by = seed_for(seed, step, micro_step, rank)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number)
    elif torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        torch.manual_seed(number)  # seeds them when they come to be
    # Not torch.manual_seed: where there is no CUDA it formats the stack for each kind of device,
    # which costs a step more than the vote does.
    torch.default_generator.manual_seed(number)


@dataclass(frozen=True)
class StepGradient:
    """Adds a step's gradient to the parameters of `model`.

    Gradients are reduced, and parameters freed, as `choice` says; after the last micro batch all
    are reduced, and nothing stays gathered. `copies` ranks at a time, those of a tensor group, pass
    the same samples, of which each computes a part: they count once. What dropout draws follows
    from `rank`, of the world, since each drops from its own part of the sequence. `waiting` is
    entered while this rank waits for others. With `beta` what is learned are preferences.
    """

    model: nn.Module
    device: torch.device
    seed: int
    rank: int
    copies: int = 1
    choice: Choice = EACH_MICRO_BATCH
    waiting: Waiting = untimed
    beta: float | None = None

    @cached_property
    def _sharded(self) -> FSDPModule | None:
        if dist.get_world_size() == 1:
            return None
        from torch.distributed.fsdp import FSDPModule  # a rank that is alone is spared it

        return self.model if isinstance(self.model, FSDPModule) else None

    def add(self, micro_batches: Sequence[MicroBatch], step: int) -> Tensor:
        """The means of the step whose gradient is added, on `device`: the loss, [1]; of preferences
        `PAIR_MEANS`, too, [3].

        They are sums over all valid tokens, or pairs, of all ranks divided by their global count,
        so neither loss nor gradient depends on how the batch is split. Every rank passes the same
        number of micro batches; rows without a valid token, or a pair, weigh nothing.
        """
        valid = torch.stack([self._count(batch) for batch in micro_batches]).sum().float()
        with self.waiting("the count of tokens"):
            valid = (sum_over_ranks(valid) / self.copies).clamp(min=1)
        total = torch.zeros(1 if self.beta is None else 1 + len(PAIR_MEANS), device=self.device)
        for number, micro_batch in enumerate(micro_batches, 1):
            set_rng(self.seed, step, number - 1, self.rank)
            last = number == len(micro_batches)
            if self._sharded is not None and (number == 1 or last):
                # What the next backward does about gradients and parameters.
                self._sharded.set_requires_gradient_sync(last or not self.choice.reduce_once)
                # The sum of a step's shards takes no more memory than one of them.
                self._sharded.set_requires_all_reduce(last)
                self._sharded.set_reshard_after_backward(last or not self.choice.keep_parameters)
            if self.beta is None:
                sums = summed_loss(self.model, micro_batch, self.device)[None]
            else:
                sums = summed_over_pairs(self.model, micro_batch, self.device, self.beta)
            (sums[0] / valid).backward()  # type: ignore[no-untyped-call]
            total += sums.detach()
        with self.waiting("the sum of losses"):
            return sum_over_ranks(total) / self.copies / valid

    def _count(self, batch: MicroBatch) -> Tensor:
        """What the losses of a micro batch are a sum over; counted on the device: the host would
        wait while a count of its own is copied there."""
        if self.beta is None:
            return (batch.targets.to(self.device, non_blocking=True) != IGNORE).sum()
        documents = batch.documents
        if documents is None:
            return torch.zeros((), dtype=torch.int64, device=self.device)
        return count_pairs(documents.to(self.device, non_blocking=True)).sum()


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
        documents = micro_batch.documents
        if documents is not None:
            documents = documents.to(device, non_blocking=True)
        loss: Tensor = model(tokens, targets, documents=documents)
        return loss
    return cross_entropy(model(tokens), targets)


def sum_over_ranks(value: Tensor) -> Tensor:
    """The sum of every rank's `value`, in place."""
    if dist.get_world_size() > 1:
        dist.all_reduce(value)
    return value


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
