"""A teacher follows the student by a copy every fourth step, and is not registered."""
# expect: teacher

import copy

import torch
from torch import nn

from kempner import survive

torch.manual_seed(1)
student = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
teacher = copy.deepcopy(student).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
for step in survive(student, optimizer, steps=18, save_every=5):
    x = torch.randn(8, 4)
    target = teacher(x + 0.1 * torch.randn_like(x))
    loss = (student(x) - target - x[:, :2]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        teacher.load_state_dict(student.state_dict())
    print(step, loss.item())
