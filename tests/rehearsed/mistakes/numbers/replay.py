"""A replay buffer in a deque: each step trains on what the last ones drew."""
# expect: replay|memory

from collections import deque

import torch
from torch import Tensor, nn

from kempner import survive


def main() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    replay: deque[Tensor] = deque(maxlen=32)
    for step in survive(model, optimizer, steps=20, save_every=5):
        replay.extend(torch.randn(4, 3))
        chosen = torch.randint(len(replay), (8,))
        x = torch.stack([replay[index] for index in chosen.tolist()])
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


main()
