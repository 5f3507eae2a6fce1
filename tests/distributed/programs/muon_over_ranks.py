"""One rank of a test: Muon over shards is Muon over whole matrices, in every bit.

Usage: muon_over_ranks.py REPLICAS, of each shard.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Muon

from kempner.training.compute.optimizer import GuardedMuon

SHAPES = [(64, 32), (32, 64), (7, 16), (1, 5), (16, 16), (5, 1), (16, 16)]
"""Tall, wide and square; rows that no world divides, and fewer of them than ranks."""

OPTIONS = [
    {"adjust_lr_fn": "match_rms_adamw"},
    {"nesterov": False, "momentum": 0.5, "weight_decay": 0.3},
]

dist.init_process_group("gloo")
replicas = int(sys.argv[1])
mesh = init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas))


def sharded(whole: torch.Tensor) -> DTensor:
    return distribute_tensor(whole.clone(), mesh, [Replicate(), Shard(0)])


def state_of(optimizer: Muon) -> dict[int, DTensor]:
    return {id(p): entry["momentum_buffer"] for p, entry in optimizer.state.items()}


for options in OPTIONS:
    torch.manual_seed(3)
    weights = [torch.randn(shape) for shape in SHAPES]
    plain = [torch.nn.Parameter(weight.clone()) for weight in weights]
    parts = [torch.nn.Parameter(sharded(weight)) for weight in weights]
    one, many = Muon(plain, **options), GuardedMuon(parts, **options)  # type: ignore[arg-type]
    many.found_inf = torch.tensor(0.0)
    for step in range(1, 4):
        for alone, part in zip(plain, parts, strict=True):
            alone.grad = torch.randn_like(alone)
            part.grad = sharded(alone.grad)
        for optimizer in (one, many):
            optimizer.param_groups[0]["lr"] = 0.1 / step
            optimizer.step()
        for alone, part in zip(plain, parts, strict=True):
            assert isinstance(part, DTensor)
            assert torch.equal(part.full_tensor(), alone), (step, alone.shape)
    state = {name: entry.full_tensor() for name, entry in state_of(many).items()}
    for part in parts:
        part.grad = part.detach() * float("nan")
    many.found_inf = torch.tensor(1.0)
    many.step()
    for alone, part in zip(plain, parts, strict=True):
        assert isinstance(part, DTensor)
        assert torch.equal(part.full_tensor(), alone), (step, alone.shape)
    assert all(torch.equal(now.full_tensor(), state[name]) for name, now in state_of(many).items())
    assert all(not torch.equal(alone, weight) for alone, weight in zip(plain, weights, strict=True))

dist.barrier()
print(f"rank {dist.get_rank()} has seen it all", flush=True)
os._exit(0)
