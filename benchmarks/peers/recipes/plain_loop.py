"""A plain loop under torchrun, or a launcher that takes the same programs.

As PyTorch's tutorial on fault-tolerant training has it (a snapshot every few steps, loaded at each
start), with torchdata's StatefulDataLoader, which resumes within an epoch, and with what
--shutdown-timeout is for: SIGTERM is noted by a handler, the ranks agree with an all-reduce in each
step, and leave after a snapshot of it.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import task
import torch
import torch.distributed as dist
from shape import BATCH, EPOCHS, EVALUATE_EVERY, PER_EPOCH, SAVE_EVERY
from task import ACCUMULATION, RANK, WORLD
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader


class Stop:
    """A SIGTERM that some rank has got."""

    def __init__(self) -> None:
        self.asked = False
        if threading.current_thread() is threading.main_thread():  # Ray has one of its own
            signal.signal(signal.SIGTERM, self._note)

    def _note(self, *_: Any) -> None:
        self.asked = True

    def agreed(self) -> bool:
        flag = torch.tensor(int(self.asked))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)


class Run:
    """All that a snapshot holds; each rank has its own place in the data and its own generator."""

    def __init__(self) -> None:
        torch.manual_seed(1 + RANK)
        self.done, self.random = 0, None
        self.model = DistributedDataParallel(task.curve())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.sampler: Any = DistributedSampler(task.Points(), WORLD, RANK, seed=1)
        self.loader = StatefulDataLoader(
            task.Points(), BATCH, sampler=self.sampler, num_workers=task.WORKERS
        )

    def own(self) -> dict[str, Any]:
        return {"loader": self.loader.state_dict(), "random": torch.get_rng_state()}

    def take_own(self, own: dict[str, Any]) -> None:
        torch.set_rng_state(own["random"])
        if self.done % PER_EPOCH:
            self.loader.load_state_dict(own["loader"])
            self.random = own["random"]

    def batches(self) -> Iterator[Any]:
        """Of the rest of the epoch; an iterator that is made draws a random number."""
        batches = iter(self.loader)
        if self.random is not None:
            torch.set_rng_state(self.random)
            self.random = None
        return batches

    def state(self) -> dict[str, Any]:
        ranks: list[Any] = [None] * WORLD
        dist.all_gather_object(ranks, self.own())
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {**state, "step": self.done, "ranks": ranks}

    def take(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done = state["step"]
        self.take_own(state["ranks"][RANK % len(state["ranks"])])


class Keeper:
    """Snapshots in one file, by rank 0, every few steps and before a stop."""

    path = task.FOLDER / "snapshot.pt"

    def restore(self, run: Run) -> None:
        if self.path.exists():
            run.take(torch.load(self.path, weights_only=False))

    def after_step(self, run: Run, stopping: bool) -> None:
        if not stopping and run.done % SAVE_EVERY:
            return
        state = run.state()
        if RANK == 0:
            torch.save(state, self.path.with_suffix(".new"))
            self.path.with_suffix(".new").replace(self.path)
        dist.barrier()


def main(keeper: Keeper, each_step: Callable[[], None] = lambda: None) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    stop, run = Stop(), Run()
    keeper.restore(run)
    for epoch in range(run.done // PER_EPOCH, EPOCHS):
        run.sampler.set_epoch(epoch)
        for number, (indices, x) in enumerate(run.batches(), start=1):
            loss = task.loss_of(run.model, x)
            task.note(run.done + 1, indices.tolist(), loss.item())
            (loss / ACCUMULATION).backward()
            if number % ACCUMULATION:
                continue
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.done += 1
            stopping = stop.agreed()
            keeper.after_step(run, stopping)
            each_step()
            if stopping:
                sys.exit("stopped, with a snapshot")
            if run.done % EVALUATE_EVERY == 0:
                task.evaluating(run.done)
    task.finish(run.model.module)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Keeper())
