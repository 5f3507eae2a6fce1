"""Muon for the matrices inside the blocks, sharded or not, and AdamW for the rest.

Muon (Jordan et al., https://kellerjordan.github.io/posts/muon/) makes the momentum of a matrix
orthogonal, which takes the whole matrix. `torch.optim.Muon` refuses the shards of FSDP2, so a step
over shards is made here: of every few matrices each rank gets one whole, makes it orthogonal, and
hands the rows back. Every matrix is worked on once, and no rank holds more than one at a time.

Both optimizers obey `found_inf`, as torch's fused ones do: where it is 1, on the device, a step
changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Muon
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from kempner.checkpoint.tensors.state import is_sharded, local_part
from kempner.training.compute.adamw import GuardedAdamW
from kempner.training.compute.uncompiled import Uncompiled


class MuonAndAdamW(Uncompiled):
    """Two optimizers as one: their groups in one list, their state in one table."""

    found_inf: Tensor | None = None

    def __init__(self, muon: GuardedMuon, adamw: GuardedAdamW) -> None:
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._parts = (muon, adamw)
        self.state = muon.state = adamw.state = defaultdict(dict)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """A step of both. Raises `ValueError` for a closure, which would have to run twice."""
        if closure is not None:
            raise ValueError("MuonAndAdamW takes no closure")
        for part in self._parts:
            part.found_inf = self.found_inf
            part.step()


class GuardedMuon(Uncompiled, Muon):
    """`torch.optim.Muon`, bit for bit, for matrices that are whole, or sharded by rows over one
    mesh dimension, and the same along others; where `found_inf` is 1, parameters and momentum stay
    what they are.

    Every rank makes the same steps, since the ranks exchange rows in them.
    """

    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step. Raises `ValueError` for a closure."""
        if closure is not None:
            raise ValueError("GuardedMuon takes no closure")
        for group in self.param_groups:
            # Matrices of one size go together, so that no rank waits for another's larger one.
            ordered = sorted(group["params"], key=lambda p: p.numel(), reverse=True)
            ranks = _row_group(ordered[0])
            world = 1 if ranks is None else dist.get_world_size(ranks)
            for first in range(0, len(ordered), world):
                self._update(ordered[first : first + world], group, ranks)

    def _update(
        self,
        matrices: Sequence[Tensor],
        group: Mapping[str, Any],
        ranks: dist.ProcessGroup | None,
    ) -> None:
        """Update at most as many matrices as there are ranks."""
        directions = orthogonalise(
            [self._direction(matrix, group) for matrix in matrices],
            [matrix.shape for matrix in matrices],
            ranks,
            lambda whole: _zeropower_via_newtonschulz(
                whole, group["ns_coefficients"], group["ns_steps"], group["eps"]
            ),
        )
        decay = 1 - group["lr"] * group["weight_decay"]
        for matrix, direction in zip(matrices, directions, strict=True):
            rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], matrix.shape)
            local = local_part(matrix)
            local.mul_(self._unless_skipped(decay, 1.0))
            local.add_(self._unless_skipped(direction, 0.0), alpha=-rate)

    def _direction(self, matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
        """This rank's rows of what is to be made orthogonal; moves the momentum."""
        assert matrix.grad is not None  # every matrix takes part in every backward
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix.grad)
        momentum = local_part(state["momentum_buffer"])
        # A gradient that equals the momentum does not move it.
        gradient = self._unless_skipped(local_part(matrix.grad), momentum)
        momentum.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum

    def _unless_skipped(self, value: Tensor | float, otherwise: Tensor | float) -> Any:
        """`value`, or `otherwise` in a step that is to change nothing; chosen on the device."""
        if self.found_inf is None:
            return value
        return torch.where(self.found_inf.bool(), otherwise, value)


def _row_group(matrix: Tensor) -> dist.ProcessGroup | None:
    """The ranks that hold a matrix between them, by rows; None if this one has all of it.

    Where there are several such groups, as in HSDP, each does the same.
    """
    if not is_sharded(matrix):
        return None
    (cut,) = (level for level, way in enumerate(matrix.placements) if way.is_shard())
    group: dist.ProcessGroup = matrix.device_mesh.get_group(cut)
    return group


def orthogonalise(
    rows: Sequence[Tensor],
    shapes: Sequence[torch.Size],
    ranks: dist.ProcessGroup | None,
    iterate: Callable[[Tensor], Tensor],
) -> list[Tensor]:
    """Apply `iterate` to whole matrices whose rows are spread over the ranks of a group.

    Matrix i is put together on rank i, and there are no more matrices than ranks. They travel as
    bfloat16, the type in which `iterate` works.

    Args:
        rows: this rank's rows of every matrix, [n, columns], cut as `torch.chunk` does.
        shapes: of the whole matrices.
        ranks: all of whose ranks call this alike; None where the matrices are whole.
        iterate: bfloat16 matrix to bfloat16 matrix of the same shape; may overwrite its input.

    Returns:
        This rank's rows of every result, bfloat16.
    """
    if ranks is None:
        return [iterate(part.bfloat16()) for part in rows]
    rank, world = dist.get_rank(ranks), dist.get_world_size(ranks)
    given = [part.numel() for part in rows] + [0] * (world - len(rows))
    taken = _lengths(shapes[rank], world) if rank < len(shapes) else [0] * world
    sent = torch.cat([part.bfloat16().flatten() for part in rows])
    whole = sent.new_empty(sum(taken))
    dist.all_to_all_single(whole, sent, taken, given, group=ranks)
    if rank < len(shapes):
        whole = iterate(whole.view(shapes[rank])).flatten()
    back = torch.empty_like(sent)
    dist.all_to_all_single(back, whole, given, taken, group=ranks)
    returned = torch.split(back, given[: len(rows)])
    return [part.view_as(own) for part, own in zip(returned, rows, strict=True)]


def _lengths(shape: torch.Size, world: int) -> list[int]:
    """How many elements of a matrix each rank has."""
    from torch.distributed.tensor import Shard

    cut = (Shard.local_shard_size_and_offset(shape[0], world, rank) for rank in range(world))
    return [height * shape[1] for height, _ in cut]
