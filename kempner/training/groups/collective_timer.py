"""Measures how long a rank waits for others in a step's collectives.

Ranks that train together take the same time for a step, however slow one of them is: the others
wait for it, in the first collective that it comes late to. A rank's own work is what is left.

On a CPU a collective holds the main thread until all have come, so its time is the wait, and what
the transfer takes, which is the same for all. On a GPU the host waits for nothing in a collective:
what is told apart there is only the vote.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from kempner.run.control.heartbeat import Waiting


def time_collectives(model: nn.Module, waiting: Waiting) -> None:
    """Enter `waiting` whenever the shards of `model` are gathered, or its gradients reduced."""
    gather, reduce = _AllGather(waiting), _ReduceScatter(waiting)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(reduce)


class _AllGather(DefaultAllGather):
    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting

    def __call__(self, *arguments: Any, **options: Any) -> dist.Work | None:
        with self._waiting("an all-gather of weights"):
            return super().__call__(*arguments, **options)


class _ReduceScatter(DefaultReduceScatter):
    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting

    def __call__(self, *arguments: Any, **options: Any) -> dist.Work:
        with self._waiting("a reduce-scatter of gradients"):
            return super().__call__(*arguments, **options)
