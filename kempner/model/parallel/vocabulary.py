"""Logits and loss where the rows of the vocabulary are spread over a tensor group.

Each rank has the logits of its own rows only. What the loss needs of the others is three numbers a
token: their largest logit, their sum of exponentials and, from the one that has it, the logit of
the target. `torch.distributed.tensor.parallel.loss_parallel` does the same, but knows nothing of
rows that are no token, and replaces torch's operators for whoever runs in the meantime.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from kempner.model.loss import IGNORE


class VocabularyParallel:
    """The output projection of a tensor group, see `ShardedVocabulary`.

    Args:
        mesh: the group, one-dimensional.
        vocab_size: number of token ids; later rows are padding, and have no part in the loss.
    """

    def __init__(self, mesh: DeviceMesh, vocab_size: int) -> None:
        self._mesh, self._vocab_size = mesh, vocab_size

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """float32, [batch, seq, vocab_size], whole on every rank of the group."""
        own = F.linear(hidden, self._rows(weight)).float()
        spread = DTensor.from_local(own, self._mesh, (Shard(own.ndim - 1),), run_check=False)
        return spread.full_tensor()[..., : self._vocab_size].contiguous()

    def loss(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy in nats, summed over all targets but `IGNORE`, the same on every rank.

        Args:
            hidden: [batch, seq, dim], the same on every rank; its gradient is a rank's share.
            weight: DTensor, [rows, dim], cut by rows.
            targets: int64, [batch, seq].
        """
        rows = self._rows(weight)
        first = self._mesh.get_local_rank() * rows.shape[0]
        tokens = min(max(self._vocab_size - first, 0), rows.shape[0])
        logits = F.linear(hidden.flatten(0, 1), rows[:tokens]).float()
        group = self._mesh.get_group()
        loss: Tensor = _CrossEntropy.apply(logits, targets.flatten(), first, group)  # type: ignore[no-untyped-call]
        return loss

    def _rows(self, weight: Tensor) -> Tensor:
        """This rank's rows of a DTensor."""
        assert isinstance(weight, DTensor)
        return weight.to_local()


class _CrossEntropy(torch.autograd.Function):
    """Summed cross entropy of logits, [tokens, own rows], the first of which is row `first`."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup
    ) -> Tensor:
        tokens, own = logits.shape
        largest = logits.amax(-1) if own else logits.new_full((tokens,), -math.inf)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - largest[:, None]
        at = targets - first
        here = (at >= 0) & (at < own)  # never of IGNORE
        at = at.where(here, 0)[:, None]
        likely = shifted.gather(1, at)[:, 0].where(here, 0) if own else torch.zeros_like(largest)
        exponentials = shifted.exp_()
        sums = torch.stack((exponentials.sum(-1), likely))
        dist.all_reduce(sums, group=group)
        counted = targets != IGNORE
        ctx.save_for_backward(exponentials.div_(sums[0][:, None]), at, here, counted)
        return (sums[0].log() - sums[1]).where(counted, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_loss: Tensor) -> tuple[Tensor, None, None, None]:
        """Softmax, less 1 at the target."""
        likelihood, at, here, counted = ctx.saved_tensors
        of_logits = likelihood * counted[:, None]
        if of_logits.shape[1]:
            of_logits.scatter_add_(1, at, -here[:, None].to(of_logits.dtype))
        return of_logits * of_loss, None, None, None
