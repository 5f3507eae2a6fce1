"""Distillation from a teacher that follows slowly and is registered."""

import copy

import torch
from torch import nn

from kempner import survive


def main() -> None:
    torch.manual_seed(1)
    student = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    teacher = copy.deepcopy(student).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    for step in survive(student, optimizer, steps=18, save_every=5, state={"teacher": teacher}):
        x = torch.randn(8, 4)
        loss = (student(x) - teacher(x) - x[:, :2]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            teacher.load_state_dict(student.state_dict())
        print(step, loss.item())


main()
