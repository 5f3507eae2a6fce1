"""A loop of one's own over two epochs."""

import torch
import torch.distributed as dist
from notes import end, note, state_of, stop_in
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from kempner import ResumableBatchSampler, ResumableDataLoader, survive

SAMPLES, BATCH, STEPS = 48, 2, 24


class Points(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index, torch.tensor([index / SAMPLES])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(1, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 1))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = survive(model, optimizer, steps=STEPS, save_every=5, seed=1)
    sampler = ResumableBatchSampler(Points(), BATCH, infinite=True, seed=1)
    sampler.set_position(steps.train_state.step * BATCH * dist.get_world_size())
    batches = iter(ResumableDataLoader(Points(), sampler))
    for step in steps:
        state = state_of(layers, optimizer)
        indices, x = next(batches)
        loss = nn.functional.mse_loss(model(x), torch.sin(6 * x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        note(step, indices.tolist(), loss.item(), state)
        stop_in(step)
    end(layers)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
