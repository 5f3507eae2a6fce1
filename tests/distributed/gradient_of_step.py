"""One rank of a test: the full gradient of the next step of a run, written by rank 0.

Usage: gradient_of_step.py OUT CONFIG [--section.key=value]...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from kempner.config.loading import load
from kempner.run.attempts import Attempt, begin_attempt
from kempner.run.logs import configure
from kempner.training.assembly import build
from kempner.training.distributed import connect
from kempner.training.faults import arm
from kempner.training.presence import appear
from kempner.training.shutdown import ShutdownHandler
from kempner.training.step import accumulate

configure()
config = load(Path(sys.argv[2]), sys.argv[3:])
shutdown = ShutdownHandler()
presence = appear(config, shutdown)
faults = arm(config, presence)
ranks = connect(presence.world, config)
attempt = ranks.broadcast(begin_attempt(presence.run) if ranks.world.rank == 0 else None)
assert isinstance(attempt, Attempt)
training = build(config, presence, ranks, attempt, shutdown, faults)
batch = training.feed.take(give_up=lambda: False)
assert batch is not None
loss = accumulate(
    training.model,
    batch.micro,
    device=ranks.device,
    seed=config.train.seed,
    step=training.position.step + 1,
    data_rank=ranks.world.rank,
)
gradient = {}
for name, parameter in training.model.named_parameters():
    assert parameter.grad is not None
    full = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
    gradient[name] = full.clone()
if ranks.world.rank == 0:
    torch.save({"loss": loss, "gradient": gradient, "step": training.position.step}, sys.argv[1])
training.feed.close()
ranks.farewell()
os._exit(0)
