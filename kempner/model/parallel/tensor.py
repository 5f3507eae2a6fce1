"""Tensor and sequence parallelism: which rank of a tensor group has what of each layer.

As Shoeybi et al. ("Megatron-LM", arXiv:1909.08053) and Korthikanti et al. ("Reducing Activation
Recomputation in Large Transformer Models", arXiv:2205.05198) divide a transformer: heads and the
inner width of the feed-forward over the ranks, and between those, where every token is by itself
(residual stream, norms, dropout), the sequence. A block gathers the sequence behind each norm and
scatters the sum of the ranks' parts after each branch.

Imports torch.distributed.tensor.parallel: to be imported only where there is a tensor group.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from kempner.model.parallel.vocabulary import VocabularyParallel
from kempner.model.transformer import Transformer


class GatheringNorm(SequenceParallel):
    """A norm of a part of the sequence, whose output is brought together.

    The output is a DTensor for layers that are themselves parallel. With `use_local_output` it is
    plain, and its gradient is taken to be each rank's share of a sum.
    """

    @staticmethod
    def _prepare_output_fn(
        use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Tensor:
        whole: DTensor = outputs.redistribute(placements=(Replicate(),))
        return whole.to_local(grad_placements=(Partial(),)) if use_local_output else whole


class ScatteredEmbedding(RowwiseParallel):
    """An embedding by rows of the vocabulary, whose sum over the ranks each has a part of.

    The sum is waited for: a block that `torch.compile` has compiled would take what is still on its
    way for a constant, and the embedding would get no gradient.
    """

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: Any
    ) -> Tensor:
        part: DTensor = outputs.redistribute(placements=output_layouts)
        return part.to_local() if use_local_output else part


def parallelize(model: Transformer, mesh: DeviceMesh) -> None:
    """Spread a model over a tensor group, in place: its parameters become DTensors over `mesh`.

    Embedding and output projection are cut by rows of the vocabulary, queries, keys, values and the
    feed-forward's inner width by heads and columns; norms are whole on every rank.

    Args:
        model: with plain parameters, on any device, meta included.
        mesh: the tensor group, one-dimensional; its size divides what `check_tensor_degree` names.
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


def _block_plan(model: Transformer) -> dict[str, ParallelStyle]:
    columns, rows = ColwiseParallel, partial(RowwiseParallel, output_layouts=Shard(1))
    plan: dict[str, ParallelStyle] = {
        "attention_norm": GatheringNorm(),
        "attention.wq": columns(),
        "attention.wk": columns(),
        "attention.wv": columns(),
        "attention.wo": rows(),
        "ffn_norm": GatheringNorm(),
        "ffn.w1": columns(),
        "ffn.w2": rows(),
        "ffn.w3": columns(),
    }
    if model.shape.qk_norm:  # [batch, seq, heads, head_dim]: it is the heads that are spread
        heads = SequenceParallel(sequence_dim=2, use_local_output=True)
        plan |= {"attention.q_norm": heads, "attention.k_norm": heads}
    return plan
