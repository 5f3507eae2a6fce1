"""A list of losses is printed, and a log of text is written."""

import logging

import torch
from torch import nn

from kempner import survive


def main() -> None:
    logging.basicConfig(filename="train.log", level=logging.INFO)
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses: list[float] = []
    for step in survive(model, optimizer, steps=14, save_every=4):
        x = torch.randn(8, 4)
        loss = (model(x) - x[:, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        logging.info("step %d loss %f mean %f", step, loss.item(), sum(losses) / len(losses))
    print("losses of this start:", losses)


main()
