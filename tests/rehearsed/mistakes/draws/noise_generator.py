"""The noise for the inputs comes from a generator of its own."""
# expect: noise

import torch
from torch import Tensor, nn

from kempner import survive


class Noisy(nn.Module):
    """Adds noise while it trains."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.noise = torch.Generator().manual_seed(seed)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x + 0.3 * torch.randn(x.shape, generator=self.noise)
        return self.layer(x)


torch.manual_seed(1)
model = Noisy(seed=3)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in survive(model, optimizer, steps=16, save_every=4):
    x = torch.randn(8, 4)
    loss = (model(x) - x[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
