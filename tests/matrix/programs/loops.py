"""The loop that all features of a plain loop have in common."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import record
import torch
from record import RANK, WORLD
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from kempner import survive

EPOCH, BATCH, STEPS = 5, 4, 14

Samples = tuple[Tensor, Tensor, Tensor]
"""The numbers of samples, what they are, and what is to be learned of them."""


class Points(Dataset[Samples]):
    """Numbered points and a curve through them."""

    def __init__(self, size: int = EPOCH * BATCH) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Samples:
        x = torch.sin(torch.arange(1, 5) * (index + 1.0))
        return torch.tensor(index), x, x.sum(0, keepdim=True).tanh()


class Loop:
    """AdamW, an evaluation every three steps, a save every four."""

    accumulate = 1
    rate = 1e-2

    def __init__(self) -> None:
        torch.manual_seed(3)
        random.seed(RANK)
        np.random.seed(RANK)
        self.net = self.network()
        self.model = self.wrapped(self.net)
        self.optimizer = self.make_optimizer()
        self.held_out = [tensor[None] for tensor in Points(60)[50][1:]]
        self.prepare()

    def network(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def wrapped(self, net: nn.Module) -> nn.Module:
        return DistributedDataParallel(net) if WORLD > 1 else net

    def make_optimizer(self) -> torch.optim.Optimizer:
        # With a smaller eps, what is left of a gradient after rounding becomes a step.
        return torch.optim.AdamW(self.model.parameters(), lr=self.rate, eps=1e-3)

    def prepare(self) -> None:
        """What else there is."""

    def state(self) -> dict[str, Any]:
        """What is registered."""
        return {}

    def per_rank(self) -> dict[str, Any]:
        """What is registered of each rank."""
        return {}

    def data(self) -> Any:
        points = Points(self.accumulate * EPOCH * BATCH)
        sampler = DistributedSampler(points, WORLD, RANK, seed=5)
        return DataLoader(points, BATCH // WORLD, sampler=sampler)

    def run(self) -> None:
        more = {"accumulate": self.accumulate} if self.accumulate > 1 else {}
        steps = survive(
            self.model,
            self.optimizer,
            data=self.data(),
            steps=STEPS,
            save_every=4,
            state=self.state(),
            per_rank=self.per_rank(),
            **more,
        )
        for step, batch in steps:
            self.train(step, batch)
            if step % 3 == 0:
                with steps.evaluation():
                    record.evaluating(step)
                    value = self.evaluate()
                record.evaluation(step, value)
                self.judge(step, value)
                if self.is_done():
                    steps.finish()
                    break
        record.end(steps.train_state.step, self.net, **self.found())

    def train(self, step: int, batch: Any) -> None:
        """A step: a batch, or a list of them."""
        self.optimizer.zero_grad()
        for part in batch if self.accumulate > 1 else [batch]:
            loss = self.loss(step, part) / self.accumulate
            self.backward(loss)
            self.note(step, part, loss)
        self.update(step)

    def loss(self, step: int, batch: Samples) -> Tensor:
        return mse_loss(self.model(batch[1]), batch[2])

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def note(self, step: int, batch: Samples, loss: Tensor) -> None:
        record.step(step, loss, batch[0], [group["lr"] for group in self.optimizer.param_groups])

    def update(self, step: int) -> None:
        self.optimizer.step()

    @torch.no_grad()
    def evaluate(self) -> float:
        self.model.eval()
        value = mse_loss(self.net(self.held_out[0]), self.held_out[1]).item()
        self.model.train()
        return value

    def judge(self, step: int, value: float) -> None:
        """Take note of an evaluation."""

    def is_done(self) -> bool:
        return False

    def found(self) -> dict[str, Any]:
        """What else has come of it."""
        return {}
