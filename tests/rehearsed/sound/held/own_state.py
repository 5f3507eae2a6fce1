"""An object with state_dict keeps running statistics, and is registered."""

from typing import Any

import torch
from torch import Tensor, nn

from kempner import survive


class Normal:
    """Running mean."""

    def __init__(self) -> None:
        self.count, self.mean = 0, 0.0

    def __call__(self, x: Tensor) -> Tensor:
        self.count += 1
        self.mean += (x.mean().item() - self.mean) / self.count
        return x - self.mean

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.mean = state["count"], state["mean"]


torch.manual_seed(1)
model, normal = nn.Linear(4, 1), Normal()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in survive(model, optimizer, steps=15, save_every=4, state={"normal": normal}):
    x = normal(5 * torch.randn(8, 4) + 2)
    loss = (model(x) - x[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
