"""A layer registers its buffer with its first forward pass."""
# expect: buffer|scale|late

import torch
from torch import Tensor, nn

from kempner import survive


class Scaled(nn.Module):
    """Divides by a running mean of what it has seen."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", x.abs().mean(0))
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * x.abs().mean(0)
        return x / self.scale


torch.manual_seed(1)
model = nn.Sequential(Scaled(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in survive(model, optimizer, steps=15, save_every=4):
    x = torch.randn(8, 4) * torch.tensor([1.0, 10.0, 0.1, 3.0])
    loss = (model(x) - x[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
