"""A loop that is not in the main thread, which only waits for it. With an argument it fails."""

from __future__ import annotations

import sys
import threading

import torch

from kempner import survive


def loop() -> None:
    """Steps without end."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in survive(model, optimizer, steps=10**9, save_every=10**9):
        optimizer.zero_grad()
        model(torch.ones(4)).square().sum().backward()
        optimizer.step()
        print(f"step {step} loss 0", flush=True)
        if sys.argv[1:]:
            raise ValueError("there is no batch")


thread = threading.Thread(target=loop)
thread.start()
thread.join()
