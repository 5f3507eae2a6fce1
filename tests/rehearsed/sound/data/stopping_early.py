"""Early stopping whose count is registered, and which says that the run is complete."""

import torch
from torch import nn

from kempner import survive


def main() -> None:
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept = {"lowest": 1e9, "waited": 0}
    steps = survive(model, optimizer, steps=20, save_every=5, state={"kept": kept})
    for _ in steps:
        x = torch.randn(8, 4)
        loss = (model(x) - x[:, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept["waited"] = 0 if loss.item() < kept["lowest"] else kept["waited"] + 1
        kept["lowest"] = min(kept["lowest"], loss.item())
        if kept["waited"] > 15:
            steps.finish()
            break


main()
