"""What is printed is averaged over the last steps and timed, and nothing else depends on that."""

import time
from collections import deque

import torch
from torch import nn

from kempner import survive


class Meter:
    """An average for people."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.total += value
        self.count += 1


torch.manual_seed(1)
meter, window, began = Meter(), deque(maxlen=10), time.perf_counter()
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in survive(model, optimizer, steps=16, save_every=4):
    x = torch.randn(8, 4)
    loss = (model(x) - x[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    meter.update(loss.item())
    window.append(loss.item())
    mean = sum(window) / len(window)
    seconds = time.perf_counter() - began
    print(f"step {step}: {meter.total / meter.count:.3f} {mean:.3f} after {seconds:.1f} s")
