"""A plain loop over kempner's `survive`, with a plain DataLoader."""

from __future__ import annotations

import task
import torch
import torch.distributed as dist
from shape import BATCH, EVALUATE_EVERY, SAVE_EVERY, STEPS
from task import ACCUMULATION
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from kempner import survive


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(task.curve())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(task.Points(), BATCH, shuffle=True, num_workers=task.WORKERS)
    steps = survive(
        model, optimizer, data=loader, accumulate=ACCUMULATION, steps=STEPS, save_every=SAVE_EVERY
    )
    for step, batches in steps:
        for indices, x in batches:
            loss = task.loss_of(model, x)
            task.note(step, indices.tolist(), loss.item())
            (loss / ACCUMULATION).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVALUATE_EVERY == 0:
            with steps.evaluation():
                task.evaluating(step)
    task.finish(model.module)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
