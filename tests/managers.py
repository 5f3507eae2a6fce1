"""A manager as a script over ranks uses it, in an attempt of its own."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from kempner.checkpoint.context import CheckpointContext
from kempner.checkpoint.format.manifest import Identity
from kempner.checkpoint.manager import CheckpointManager
from kempner.checkpoint.store.retention import Keep
from kempner.run.record.attempts import Fence, begin_attempt
from kempner.run.record.run_dir import RunDirectory


def open_manager(
    run: RunDirectory,
    model: nn.Module,
    optimizer: Optimizer,
    group: dist.ProcessGroup,
    **options: Any,
) -> CheckpointManager:
    """Keeps the last two checkpoints of `run`; called on every rank of `group`.

    `options` go into its context.
    """
    world = dist.get_world_size(group)
    box = [begin_attempt(run) if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(box, group_src=0, group=group)
    assert box[0] is not None
    context = CheckpointContext(
        path=run.checkpoints,
        identity=Identity(world, {"fsdp": world}, 0, "", {}),
        fence=Fence(run.attempts, box[0]),
        group=group,
        **options,
    )
    return CheckpointManager(context, model, optimizer, keep=Keep(last=2))
