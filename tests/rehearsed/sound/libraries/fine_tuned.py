"""Pretrained weights are loaded before survive(), from a file that the program makes itself."""

from pathlib import Path

import torch
from torch import nn

from kempner import survive


def pretrained(path: Path) -> dict[str, torch.Tensor]:
    if not path.exists():
        torch.manual_seed(3)
        torch.save(nn.Linear(4, 1).state_dict(), path)
    return torch.load(path, weights_only=True)


model = nn.Linear(4, 1)
model.load_state_dict(pretrained(Path("pretrained.pt")))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in survive(model, optimizer, steps=14, save_every=4, seed=5):
    x = torch.randn(8, 4)
    loss = (model(x) - x.mean(1, keepdim=True)).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
