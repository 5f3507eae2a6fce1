"""A recurrent model whose hidden state goes from step to step in a registered tensor."""

import torch
from torch import nn

from kempner import survive

torch.manual_seed(1)
text = torch.randint(12, (4, 200), generator=torch.Generator().manual_seed(2))
embedding, cell, head = nn.Embedding(12, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 12)
model = nn.ModuleList([embedding, cell, head])
hidden = torch.zeros(1, 4, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in survive(model, optimizer, steps=18, save_every=5, state={"hidden": hidden}):
    piece = text[:, 8 * step : 8 * step + 9]
    output, last = cell(embedding(piece[:, :-1]), hidden.clone())
    loss = nn.functional.cross_entropy(head(output).flatten(0, 1), piece[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    hidden.copy_(last.detach())
    print(step, loss.item())
