"""What every rank must hold alike, because a checkpoint holds it once: compared by digests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from xxhash import xxh3_64

from kempner.checkpoint.context import CheckpointContext
from kempner.checkpoint.registered.composite import Modules
from kempner.checkpoint.tensors.state import is_sharded
from kempner.run.process.exit_codes import UsageError

_PIECE = 16 << 20
"""Elements that are brought to the host at a time."""


def digests(table: Mapping[str, Tensor]) -> dict[str, int]:
    """A number for each tensor that is no DTensor, which tells other contents from these."""
    return {key: _digest(tensor) for key, tensor in table.items() if not is_sharded(tensor)}


def combine(held: Mapping[str, int]) -> int:
    """One number of 63 bits for all of `held`."""
    text = repr(sorted(held.items())).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def agree(context: CheckpointContext, look: Callable[[], Mapping[str, int]]) -> None:
    """Compare what `look` returns over the ranks: a number for each tensor that it finds.

    Raises `UsageError` on all ranks alike: what `look` raised on any, or which tensor differs.
    """
    held: Mapping[str, int] = {}
    refusal = None
    try:
        held = look()
    except UsageError as error:
        refusal = str(error)
    told = context.gather((refusal, combine(held)))
    for refused, _ in told:
        if refused is not None:
            raise UsageError(refused)
    if any(number != told[0][1] for _, number in told):
        raise UsageError(describe_difference(context.gather(held)))


def describe_difference(by_rank: Sequence[Mapping[str, int]]) -> str:
    """Which tensor is not the same on all ranks, as a sentence; `by_rank` has the numbers."""
    first = by_rank[0]
    for rank, held in enumerate(by_rank):
        if lacking := sorted(first.keys() ^ held.keys()):
            has, lacks = (0, rank) if lacking[0] in first else (rank, 0)
            return f"rank {has} has {lacking[0]}, and rank {lacks} does not: all must hold the same"
        for key in sorted(held):
            if held[key] != first[key]:
                return (
                    f"{key} is not the same on rank 0 and rank {rank}, and a checkpoint holds it "
                    "once: let DistributedDataParallel or SyncBatchNorm keep it the same, or "
                    "broadcast it in every step"
                )
    return "the ranks hold different states"


class SharedBuffers:
    """The buffers that `DistributedDataParallel` takes from rank 0 before each forward pass.

    Until then those of the other ranks differ, as running statistics do, and no longer count.
    """

    def __init__(self, model: nn.Module) -> None:
        wrapped = model.wrapped if isinstance(model, Modules) else (model,)
        modules = (module for given in wrapped for module in given.modules())
        parallel = (module for module in modules if isinstance(module, DistributedDataParallel))
        self._parallel = [module for module in parallel if module.broadcast_buffers]

    def share(self) -> None:
        """Take them from rank 0 now; called on every rank."""
        for parallel in self._parallel:
            ignored = parallel.parameters_to_ignore
            buffers = [b for name, b in parallel.module.named_buffers() if name not in ignored]
            for dtype in sorted({buffer.dtype for buffer in buffers}, key=str):
                _share_from_rank_0([b for b in buffers if b.dtype is dtype], parallel.process_group)


@torch.no_grad()
def _share_from_rank_0(buffers: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    together = torch.cat([buffer.reshape(-1) for buffer in buffers])
    dist.broadcast(together, group=group, group_src=0)
    parts = torch.split(together, [buffer.numel() for buffer in buffers])
    for buffer, part in zip(buffers, parts, strict=True):
        buffer.copy_(part.view(buffer.shape))


def _digest(tensor: Tensor) -> int:
    total = xxh3_64()
    if tensor.numel():
        for piece in torch.split(tensor.detach().reshape(-1), _PIECE):
            total.update(piece.cpu().view(torch.uint8).numpy().data)
    return total.intdigest()
