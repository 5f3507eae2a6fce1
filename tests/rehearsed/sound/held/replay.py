"""A replay buffer in a tensor with its place, both registered."""

import torch
from torch import nn

from kempner import survive

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
memory, place = torch.zeros(32, 3), {"filled": 0}
for step in survive(
    model, optimizer, steps=20, save_every=5, state={"memory": memory, "place": place}
):
    for row in torch.randn(4, 3):
        memory[place["filled"] % 32] = row
        place["filled"] += 1
    x = memory[torch.randint(min(32, place["filled"]), (8,))]
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
