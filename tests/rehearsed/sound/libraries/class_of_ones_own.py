"""A trainer class that keeps its history in a registered list."""

import torch
from torch import nn

from kempner import survive


class Training:
    """All that trains."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.norms: list[float] = []

    def step(self, x: torch.Tensor) -> float:
        loss = (self.model(x) - x[:, :1]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        limit = sum(self.norms) / len(self.norms) if self.norms else 1.0
        self.norms.append(float(nn.utils.clip_grad_norm_(self.model.parameters(), limit)))
        self.optimizer.step()
        return loss.item()

    def run(self) -> None:
        state = {"norms": self.norms}
        for step in survive(self.model, self.optimizer, steps=15, save_every=4, state=state):
            print(step, self.step(torch.randn(8, 4)))


torch.manual_seed(1)
Training().run()
