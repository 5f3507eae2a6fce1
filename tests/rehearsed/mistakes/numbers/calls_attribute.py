"""The model counts its calls in a Python attribute, and anneals a temperature by it."""
# expect: calls

import torch
from torch import Tensor, nn

from kempner import survive


class Annealed(nn.Module):
    """Softer at first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) / (1 + 5 / self.calls)


torch.manual_seed(1)
model = Annealed()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in survive(model, optimizer, steps=16, save_every=4):
    x = torch.randn(8, 4)
    loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
