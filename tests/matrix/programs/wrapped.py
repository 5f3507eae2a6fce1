"""A loop of one's own in Fabric or Accelerate: wrapped.py Fabric|Accelerate VARIANT"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import record
import torch
from loops import BATCH, EPOCH, STEPS, Points
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from kempner import survive

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "workers": {"num_workers": 2},
    "accumulate": {},
    "schedule": {},
    "clip": {},
}

Backward = Callable[[torch.Tensor], object]


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def loader(variant: str) -> DataLoader[Any]:
    size = EPOCH * BATCH * (2 if variant == "accumulate" else 1)
    return DataLoader(Points(size), BATCH // record.WORLD, shuffle=True, **VARIANTS[variant])


def train(variant: str, model: Any, optimizer: Any, data: Any, backward: Backward) -> None:
    """The loop that both have in common."""
    schedule = StepLR(getattr(optimizer, "optimizer", optimizer), 3, 0.5)
    many = variant == "accumulate"
    more: dict[str, Any] = {"accumulate": 2} if many else {}
    if variant == "schedule":
        more["state"] = {"schedule": schedule}
    steps = survive(model, optimizer, data=data, steps=STEPS, save_every=4, **more)
    for step, batch in steps:
        optimizer.zero_grad()
        for indices, x, y in batch if many else [batch]:
            loss = nn.functional.mse_loss(model(x), y)
            backward(loss / 2 if many else loss)
            record.step(step, loss, indices, [group["lr"] for group in optimizer.param_groups])
        if variant == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if variant == "schedule":
            schedule.step()
        if step % 3 == 0:
            with steps.evaluation(), torch.no_grad():
                record.evaluating(step)
                value = model(Points(60)[50][1][None]).mean()
            record.evaluation(step, value)
    record.end(steps.train_state.step, getattr(model, "module", model))


def fabric(variant: str) -> None:
    from lightning.fabric import Fabric

    from kempner.integrations.lightning import KempnerEnvironment

    fabric = Fabric(accelerator="cpu", devices=record.WORLD, plugins=[KempnerEnvironment()])
    fabric.launch()
    model, optimizer = fabric.setup(*parts())
    data = fabric.setup_dataloaders(loader(variant), use_distributed_sampler=False)
    train(variant, model, optimizer, data, fabric.backward)


def accelerate(variant: str) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, data = accelerator.prepare(*parts(), loader(variant))
    train(variant, model, optimizer, data, accelerator.backward)


if __name__ == "__main__":
    {"Fabric": fabric, "Accelerate": accelerate}[sys.argv[1]](sys.argv[2])
