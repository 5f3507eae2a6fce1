"""Features of a plain loop: optimizers, schedules, and what changes gradients and weights."""

from __future__ import annotations

from typing import Any

import record
import torch
import torch.distributed as dist
from loops import Loop, Samples
from record import WORLD
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)


class Adamw(Loop):
    """Nothing else."""


# Optimizers and what changes the weights


class Sgd(Loop):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, nesterov=True)


class TwoOptimizers(Loop):
    """One for the weights, one for the biases, each with its own rate."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        weights = [p for p in self.model.parameters() if p.ndim > 1]
        biases = [p for p in self.model.parameters() if p.ndim == 1]
        self.second = torch.optim.RMSprop(biases, lr=3e-3, eps=1e-3)
        return torch.optim.Adam(weights, lr=self.rate, eps=1e-3)

    def state(self) -> dict[str, Any]:
        return {"second": self.second}

    def update(self, step: int) -> None:
        super().update(step)
        self.second.step()
        self.second.zero_grad()


class Adversary(Loop):
    """A second model and its optimizer, in turns."""

    def prepare(self) -> None:
        self.critic = nn.Linear(1, 1)
        self.critic_optimizer = torch.optim.SGD(self.critic.parameters(), lr=0.1)

    def state(self) -> dict[str, Any]:
        return {"critic": self.critic, "critic_optimizer": self.critic_optimizer}

    def loss(self, step: int, batch: Samples) -> Tensor:
        return super().loss(step, batch) - 0.1 * self.critic(self.model(batch[1])).mean()

    def update(self, step: int) -> None:
        super().update(step)
        for parameter in self.critic.parameters():
            if WORLD > 1:
                dist.all_reduce(parameter.grad)
                parameter.grad /= WORLD  # type: ignore[operator]
        self.critic_optimizer.step()
        self.critic_optimizer.zero_grad()


class Lbfgs(Loop):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.model.parameters(), lr=0.3, max_iter=3)

    def train(self, step: int, batch: Any) -> None:
        noted = False

        def closure() -> Tensor:
            nonlocal noted
            self.optimizer.zero_grad()
            loss = self.loss(step, batch)
            loss.backward()
            if not noted:
                self.note(step, batch, loss)
                noted = True
            return loss

        self.optimizer.step(closure)


class Scaler(Loop):
    """A loss scale that grows, and shrinks at a loss that is not finite."""

    def prepare(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    def state(self) -> dict[str, Any]:
        return {"scaler": self.scaler}

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def loss(self, step: int, batch: Samples) -> Tensor:
        return super().loss(step, batch) * (float("inf") if step == 6 else 1.0)

    def note(self, step: int, batch: Samples, loss: Tensor) -> None:
        super().note(step, batch, loss)
        record.drawn(step, "scale", self.scaler.get_scale())

    def update(self, step: int) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


class ClipNorm(Loop):
    def update(self, step: int) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        super().update(step)


class ClipValue(Loop):
    """Gradients, and weights after the step."""

    def update(self, step: int) -> None:
        nn.utils.clip_grad_value_(self.model.parameters(), 0.05)
        super().update(step)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.clamp_(-0.45, 0.45)


class Groups(Loop):
    """Two groups, one rate of which is lowered by hand."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        named = list(self.model.named_parameters())
        return torch.optim.AdamW(
            [
                {"params": [p for name, p in named if "weight" in name], "weight_decay": 0.1},
                {"params": [p for name, p in named if "bias" in name], "lr": 3e-3},
            ],
            lr=self.rate,
            eps=1e-3,
        )

    def update(self, step: int) -> None:
        super().update(step)
        if step in (5, 9):
            self.optimizer.param_groups[0]["lr"] /= 2


class Accumulate(Loop):
    accumulate = 2


# Schedules


class Schedule(Loop):
    """With a warm-up, then a cosine."""

    def prepare(self) -> None:
        first = LinearLR(self.optimizer, 0.1, total_iters=4)
        then = CosineAnnealingLR(self.optimizer, T_max=10)
        self.schedule: Any = SequentialLR(self.optimizer, [first, then], [4])

    def state(self) -> dict[str, Any]:
        return {"schedule": self.schedule}

    def update(self, step: int) -> None:
        super().update(step)
        self.schedule.step()


class Steps(Schedule):
    def prepare(self) -> None:
        self.schedule = StepLR(self.optimizer, 3, 0.5)


class Plateau(Schedule):
    """Judged by what the evaluations find."""

    def prepare(self) -> None:
        self.schedule = ReduceLROnPlateau(self.optimizer, factor=0.5, patience=0, threshold=0.2)

    def update(self, step: int) -> None:
        self.optimizer.step()

    def judge(self, step: int, value: float) -> None:
        self.schedule.step(value)
