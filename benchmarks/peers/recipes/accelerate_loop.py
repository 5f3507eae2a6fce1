"""A loop with Accelerate, as its page on checkpoints has it: save_state, skip_first_batches.

It has no answer to a signal. PEERS_SEEDABLE sets `use_seedable_sampler`.
"""

from __future__ import annotations

import os
from typing import Any

import task
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, set_seed
from shape import BATCH, EPOCHS, EVALUATE_EVERY, PER_EPOCH, SAVE_EVERY, STEPS
from task import ACCUMULATION
from torch.utils.data import DataLoader

SAVED = task.FOLDER / "saved"


def plain(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    done = max((int(path.name[5:]) for path in SAVED.glob("step_*")), default=0)
    if done:
        accelerator.load_state(str(SAVED / f"step_{done}"))
    for epoch in range(done // PER_EPOCH, EPOCHS):
        loader.set_epoch(epoch)
        left = loader
        if epoch == done // PER_EPOCH and done % PER_EPOCH:
            left = skip_first_batches(loader, done % PER_EPOCH * ACCUMULATION)
        for indices, x in left:
            with accelerator.accumulate(model):
                loss = task.loss_of(model, x)
                task.note(done + 1, indices.tolist(), loss.item())
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            done += 1
            if done % SAVE_EVERY == 0:
                accelerator.save_state(str(SAVED / f"step_{done}"))
            if done % EVALUATE_EVERY == 0:
                task.evaluating(done)


def surviving(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    from kempner import survive

    todo = survive(
        model,
        optimizer,
        data=loader,
        accumulate=ACCUMULATION,
        steps=STEPS,
        save_every=SAVE_EVERY,
    )
    for step, batches in todo:
        for indices, x in batches:
            with accelerator.accumulate(model):
                loss = task.loss_of(model, x)
                task.note(step, indices.tolist(), loss.item())
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        if step % EVALUATE_EVERY == 0:
            with todo.evaluation():
                task.evaluating(step)


def main() -> None:
    set_seed(1)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATION,
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler="PEERS_SEEDABLE" in os.environ
        ),
    )
    layers = task.curve()
    model, optimizer, loader = accelerator.prepare(
        layers,
        torch.optim.AdamW(layers.parameters(), lr=1e-2),
        DataLoader(task.Points(), BATCH, shuffle=True, num_workers=task.WORKERS),
    )
    (surviving if task.UNDER_KEMPNER else plain)(accelerator, model, optimizer, loader)
    task.finish(accelerator.unwrap_model(model))
    accelerator.end_training()


if __name__ == "__main__":
    main()
