"""Tensor and sequence parallelism: which rank of a tensor group has what of each layer.

As Shoeybi et al. ("Megatron-LM", arXiv:1909.08053) and Korthikanti et al. ("Reducing Activation
Recomputation in Large Transformer Models", arXiv:2205.05198) divide a transformer: heads and the
inner width of the feed-forward over the ranks, and between those, where every token is by itself
(residual stream, norms, dropout), the sequence. A block gathers the sequence behind each norm and
scatters the sum of the ranks' parts after each branch.

Each rank has the logits of its own rows of the vocabulary only. What the loss needs of the others
is three numbers a token: their largest logit, their sum of exponentials and, from the one that has
it, the logit of the target. `torch.distributed.tensor.parallel.loss_parallel` does the same, but
knows nothing of rows that are no token, and replaces torch's operators for all code meanwhile.

Imports torch.distributed.tensor.parallel: to be imported only where there is a tensor group.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from kempner.model.adapter import adapted_layers, freeze
from kempner.model.fused import IGNORE, WithGradients
from kempner.model.transformer import Transformer


class VocabularyParallel:
    """The output projection of a tensor group, see `ShardedVocabulary`.

    Args:
        mesh: the group, one-dimensional.
        vocab_size: number of token ids; later rows are padding, and have no part in the loss.
        chunk: most tokens whose logits exist at once in the loss; 0 is all.
    """

    def __init__(self, mesh: DeviceMesh, vocab_size: int, chunk: int) -> None:
        self._mesh, self._vocab_size, self._chunk = mesh, vocab_size, chunk

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """float32, [batch, seq, vocab_size], whole on every rank of the group."""
        own = F.linear(hidden, _rows(weight)).float()
        spread = DTensor.from_local(own, self._mesh, (Shard(own.ndim - 1),), run_check=False)
        whole = spread.full_tensor()
        if whole.shape[-1] == self._vocab_size:
            return whole
        return whole[..., : self._vocab_size].contiguous()  # FSDP must not be given a view

    def loss(self, hidden: Tensor, weight: Tensor, targets: Tensor, each: bool = False) -> Tensor:
        """Cross entropy in nats, summed over all targets but `IGNORE`, the same on every rank.

        Args:
            hidden: [batch, seq, dim], the same on every rank; its gradient is a rank's share.
            weight: DTensor, [rows, dim], cut by rows.
            targets: int64, [batch, seq].
            each: give that of each token, [batch * seq]; only if `weight` does not train.
        """
        rows, tokens = _rows(weight), hidden.flatten(0, 1)
        first = self._mesh.get_local_rank() * rows.shape[0]
        part = _VocabularyPart(
            first=first,
            rows=min(max(self._vocab_size - first, 0), rows.shape[0]),
            chunk=self._chunk or len(tokens),
            group=self._mesh.get_group(),
            each=each,
        )
        if not torch.is_grad_enabled():
            return _chunks(tokens, rows, targets.flatten(), part, gradients=False)[0]
        chunks = partial(_chunks, part=part)
        loss: Tensor = WithGradients.apply(tokens, rows, targets.flatten(), chunks)  # type: ignore[no-untyped-call]
        return loss


class _VocabularyPart(NamedTuple):
    """A rank's part of the vocabulary: its first token id, the number of its rows that are tokens;
    how many tokens are worked on at once, the ranks with the other parts, and whether the loss is
    that of each token."""

    first: int
    rows: int
    chunk: int
    group: dist.ProcessGroup
    each: bool


def _chunks(
    hidden: Tensor, weight: Tensor, targets: Tensor, part: _VocabularyPart, gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and what it makes of `hidden` and `weight`, if `gradients` are wanted. As
    `linear_cross_entropy` does for a whole vocabulary: the gradients of a chunk of tokens are
    computed while its logits are there."""
    rows = weight[: part.rows]
    loss = hidden.new_zeros(len(hidden) if part.each else (), dtype=torch.float32)
    of_hidden = torch.empty_like(hidden if gradients else hidden[:0])
    trains = gradients and weight.requires_grad
    of_weight = torch.zeros_like(weight if trains else weight[:0], dtype=torch.float32)
    for start in range(0, len(hidden), part.chunk):
        x, of_x = hidden[start : start + part.chunk], of_hidden[start : start + part.chunk]
        target = targets[start : start + part.chunk]
        at = target - part.first
        here = (at >= 0) & (at < part.rows)  # never of IGNORE
        at = at.where(here, 0)[:, None]
        likelihood, costs = _softmax((x @ rows.T).float(), at, here, part.group)
        counted = target != IGNORE
        if part.each:
            loss[start : start + part.chunk] = costs.where(counted, 0)
        else:
            loss += costs.where(counted, 0).sum()
        if not gradients:
            continue
        if part.rows:
            likelihood.scatter_add_(1, at, -here[:, None].float())
        of_logits = likelihood.mul_(counted[:, None]).to(x.dtype)
        of_x[:] = of_logits @ rows
        if trains:
            of_weight[: part.rows] += of_logits.T @ x
    return loss, of_hidden, of_weight.to(weight.dtype)


def _softmax(
    logits: Tensor, at: Tensor, here: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """The likelihood of a rank's own tokens, and the cost of every target, on every rank.

    Args:
        logits: float32, [tokens, own rows]; overwritten.
        at: int64, [tokens, 1], the row of each target, where it is `here`.
        here: bool, [tokens].
        group: the ranks with the other rows.
    """
    own = logits.shape[1]
    largest = logits.amax(-1) if own else logits.new_full((len(logits),), -math.inf)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    logits -= largest[:, None]
    likely = logits.gather(1, at)[:, 0].where(here, 0) if own else torch.zeros_like(largest)
    exponentials = logits.exp_()
    sums = torch.stack((exponentials.sum(-1), likely))
    dist.all_reduce(sums, group=group)
    return exponentials.div_(sums[0][:, None]), sums[0].log() - sums[1]


def _rows(weight: Tensor) -> Tensor:
    assert isinstance(weight, DTensor)
    return weight.to_local()


class GatheringNorm(SequenceParallel):
    """A norm of a part of the sequence, whose output is brought together. The output is a DTensor
    for layers that are themselves parallel. With `use_local_output` it is plain, and its gradient
    is taken to be each rank's share of a sum."""

    @staticmethod
    def _prepare_output_fn(
        use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Tensor:
        whole: DTensor = outputs.redistribute(placements=(Replicate(),))
        return whole.to_local(grad_placements=(Partial(),)) if use_local_output else whole


class ScatteredEmbedding(RowwiseParallel):
    """An embedding by rows of the vocabulary, whose sum over the ranks each has a part of. The sum
    is waited for: a block that `torch.compile` has compiled would take what is still on its way for
    a constant, and the embedding would get no gradient."""

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: Any
    ) -> Tensor:
        part: DTensor = outputs.redistribute(placements=output_layouts)
        return part.to_local() if use_local_output else part


class AdaptedColumns(ColwiseParallel):
    """A layer by columns: the second matrix of its pair is cut as its weight is, the first is whole
    on every rank."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        _spread(module, device_mesh, weight=Shard(0), lora_A=Replicate(), lora_B=Shard(0))


class AdaptedRows(RowwiseParallel):
    """A layer by rows: the first matrix of its pair is cut as its weight is, the second is whole on
    every rank."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        _spread(module, device_mesh, weight=Shard(1), lora_A=Shard(1), lora_B=Replicate())


def _spread(module: nn.Module, mesh: DeviceMesh, **placements: Placement) -> None:
    for name, parameter in [*module.named_parameters(recurse=False)]:
        spread = distribute_tensor(parameter, mesh, [placements[name]])
        module.register_parameter(name, nn.Parameter(spread, parameter.requires_grad))


def _product_of_columns(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """B A x where x and A are whole and B is cut by rows. What a rank learns of the gradients of
    the first two is its share of a sum."""
    assert isinstance(x, DTensor)
    assert isinstance(a, DTensor)
    assert isinstance(b, DTensor)
    whole, first = (part.to_local(grad_placements=(Partial(),)) for part in (x, a))
    own = F.linear(F.linear(whole, first), b.to_local())
    return DTensor.from_local(own, b.device_mesh, (Shard(own.ndim - 1),), run_check=False)


def _product_of_rows(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """B A x where x and A are cut alike and B is whole: every rank has its share of the sum."""
    assert isinstance(x, DTensor)
    assert isinstance(a, DTensor)
    assert isinstance(b, DTensor)
    second = b.to_local(grad_placements=(Partial(),))
    share = F.linear(F.linear(x.to_local(), a.to_local()), second)
    return DTensor.from_local(share, b.device_mesh, (Partial(),), run_check=False)


def parallelize(model: Transformer, mesh: DeviceMesh) -> None:
    """Spread a model over a tensor group, in place: its parameters become DTensors over `mesh`.

    Embedding and output projection are cut by rows of the vocabulary, queries, keys, values and the
    feed-forward's inner width by heads and columns; norms are whole on every rank.
    `mesh` is the group, one-dimensional; its size divides what `check_tensor_degree` names.
    """
    plan: dict[str, ParallelStyle] = {
        "embed": ScatteredEmbedding(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": GatheringNorm(use_local_output=True),
    }
    if model.output is not None:
        plan["output"] = ColwiseParallel()
    block = _block_plan(model)
    for number in range(len(model.layers)):
        plan |= {f"layers.{number}.{name}": style for name, style in block.items()}
    parallelize_module(model, mesh, plan)
    model.vocabulary = VocabularyParallel(mesh, model.shape.vocab_size, model.loss_chunk)
    if adapted := adapted_layers(model):
        for name, layer in adapted.items():
            rows = name.endswith(_BY_ROWS)
            layer.product = _product_of_rows if rows else _product_of_columns
        freeze(model)  # norms were replaced


_BY_COLUMNS = ("attention.wq", "attention.wk", "attention.wv", "ffn.w1", "ffn.w3")
_BY_ROWS = ("attention.wo", "ffn.w2")


def _block_plan(model: Transformer) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        "attention_norm": GatheringNorm(),
        "ffn_norm": GatheringNorm(),
    }
    adapted = adapted_layers(model.layers[0])
    for name in _BY_COLUMNS:
        plan[name] = AdaptedColumns() if name in adapted else ColwiseParallel()
    for name in _BY_ROWS:
        rows = AdaptedRows if name in adapted else RowwiseParallel
        plan[name] = rows(output_layouts=Shard(1))
    if model.shape.qk_norm:  # [batch, seq, heads, head_dim]: it is the heads that are spread
        heads = SequenceParallel(sequence_dim=2, use_local_output=True)
        plan |= {"attention.q_norm": heads, "attention.k_norm": heads}
    return plan
