"""The best loss is registered in a dict, and the best weights are saved beside."""

import torch
from torch import nn

from kempner import survive


def main() -> None:
    torch.manual_seed(1)
    held_out = torch.linspace(-3, 3, 32).unsqueeze(1)
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    best = {"error": 1e9}
    for step in survive(model, optimizer, steps=20, save_every=5, state={"best": best}):
        x = torch.randn(4, 1)
        loss = (model(x) - torch.sin(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 2 == 0:
            with torch.no_grad():
                error = (model(held_out) - torch.sin(held_out)).square().mean().item()
            if error < best["error"]:
                best["error"] = error
                torch.save(model.state_dict(), "best.pt")


main()
