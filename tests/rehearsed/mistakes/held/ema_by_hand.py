"""Averaged weights in a dict of tensors, which the evaluation uses and nothing saves."""
# expect: average

import torch
from torch import nn
from torch.func import functional_call

from kempner import survive

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
average = {name: p.detach().clone() for name, p in model.named_parameters()}
held_out = torch.randn(32, 4)


def error(x: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
    return (predicted - x.square().sum(1, keepdim=True)).square().mean()


for step in survive(model, optimizer, steps=16, save_every=4):
    x = torch.randn(8, 4)
    loss = error(x, model(x))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for name, p in model.named_parameters():
            average[name].lerp_(p, 0.1)
    if step % 4 == 0:
        model.eval()
        with torch.no_grad():
            print(step, error(held_out, functional_call(model, average, held_out)).item())
        model.train()
