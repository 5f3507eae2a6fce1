"""Momentum by hand, added to the gradients from a list that nothing saves."""
# expect: velocity

import torch
from torch import nn

from kempner import survive


class Task:
    """A model with what trains it."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02)
        self.velocity = [torch.zeros_like(p) for p in self.model.parameters()]

    def step(self, x: torch.Tensor) -> float:
        loss = (self.model(x) - x[:, :1]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        for v, p in zip(self.velocity, self.model.parameters(), strict=True):
            v.mul_(0.9).add_(p.grad)
            p.grad.copy_(v)
        self.optimizer.step()
        return loss.item()


torch.manual_seed(1)
task = Task()
for step in survive(task.model, task.optimizer, steps=15, save_every=4):
    print(step, task.step(torch.randn(8, 4)))
