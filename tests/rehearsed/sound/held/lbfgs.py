"""LBFGS, which calls the model many times a step."""

import torch
from torch import Tensor, nn

from kempner import survive


def main() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=4)
    for step in survive(model, optimizer, steps=12, save_every=4):
        x = torch.randn(16, 4)

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = (model(x) - x[:, :1]).square().mean()
            loss.backward()
            return loss

        print(step, float(optimizer.step(closure)))


main()
