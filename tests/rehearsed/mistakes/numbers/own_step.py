"""The warm-up counts steps from zero at each start, where the loop's own step would do."""
# expect: global_step

import torch
from torch import nn

from kempner import survive

torch.manual_seed(1)
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
global_step = 0
for _ in survive(model, optimizer, steps=18, save_every=5):
    optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, (global_step + 1) / 10)
    x = torch.randn(8, 4)
    loss = (model(x) - x[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    global_step = global_step + 1
    print(global_step, loss.item())
