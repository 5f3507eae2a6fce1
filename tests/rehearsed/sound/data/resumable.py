"""survive() has kempner's own loader, with samples of a text each."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from kempner import ResumableBatchSampler, ResumableDataLoader, survive


class Texts(Dataset[Tensor]):
    """Made-up token ids."""

    def __len__(self) -> int:
        return 56

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(16, (6,), generator=torch.Generator().manual_seed(index))


torch.manual_seed(1)
sampler = ResumableBatchSampler(Texts(), batch_size=8, seed=3)
model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = ResumableDataLoader(Texts(), sampler)
for step, ids in survive(model, optimizer, data=loader, steps=16, save_every=5):
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
