"""Two groups, a frozen layer and tied weights."""

import torch
from torch import Tensor, nn

from kempner import survive


class Tied(nn.Module):
    """Its output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 6)
        self.body, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.frozen(torch.relu(self.body(self.embedding(ids)))))


torch.manual_seed(1)
model = Tied()
groups = [
    {"params": [model.embedding.weight], "lr": 1e-2, "weight_decay": 0.0},
    {"params": list(model.body.parameters())},
]
optimizer = torch.optim.AdamW(groups, lr=1e-3)
for step in survive(model, optimizer, steps=16, save_every=4):
    ids = torch.randint(12, (8,))
    loss = nn.functional.cross_entropy(model(ids), (ids + 1) % 12)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
