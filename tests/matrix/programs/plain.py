"""A plain loop: plain.py plain FEATURE

The class of a feature, here or in `optimizers.py`, has what is its own.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import optimizers  # noqa: F401
import record
import torch
import torch.distributed as dist
from loops import BATCH, EPOCH, STEPS, Loop, Points, Samples
from record import RANK, WORLD
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler

from kempner import ResumableBatchSampler, ResumableDataLoader, survive

# Data


class Shuffle(Loop):
    def data(self) -> Any:
        return DataLoader(Points(), BATCH // WORLD, shuffle=True)


class InOrder(Loop):
    def data(self) -> Any:
        return DataLoader(Points(), BATCH // WORLD)


class Ragged(Loop):
    """The last batch of an epoch is a smaller one."""

    def data(self) -> Any:
        return DataLoader(Points(EPOCH * BATCH - 2), BATCH // WORLD, shuffle=True)


class Workers(Loop):
    def data(self) -> Any:
        return DataLoader(Points(), BATCH // WORLD, shuffle=True, num_workers=2)


class Persistent(Loop):
    def data(self) -> Any:
        generator = torch.Generator().manual_seed(7)
        return DataLoader(
            Points(),
            BATCH // WORLD,
            shuffle=True,
            generator=generator,
            num_workers=1,
            persistent_workers=True,
        )


class Stateful(Loop):
    def data(self) -> Any:
        from torchdata.stateful_dataloader import StatefulDataLoader

        sampler = DistributedSampler(Points(), WORLD, RANK, seed=5)
        return StatefulDataLoader(Points(), BATCH // WORLD, sampler=sampler)


class Stream(Loop):
    """A stream of Hugging Face's, a shard of it for each rank."""

    def data(self) -> Any:
        from datasets import Dataset as Table
        from datasets.distributed import split_dataset_by_node

        table = Table.from_dict({"index": list(range(EPOCH * BATCH))})
        stream = table.to_iterable_dataset(num_shards=2).shuffle(seed=5, buffer_size=6)
        return DataLoader(
            split_dataset_by_node(stream, RANK, WORLD),
            BATCH // WORLD,
            collate_fn=lambda rows: torch.utils.data.default_collate(
                [Points()[row["index"]] for row in rows]
            ),
        )


class Kempner(Loop):
    """The loader of kempner."""

    def data(self) -> Any:
        sampler = ResumableBatchSampler(Points(), BATCH // WORLD, seed=5)
        return ResumableDataLoader(Points(), sampler, num_workers=1)


# Random numbers


class Dropout(Loop):
    def network(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1))


class NumpyNoise(Loop):
    """Augmentation by NumPy's own generator, in the loop."""

    def loss(self, step: int, batch: Samples) -> Tensor:
        noise = torch.from_numpy(np.random.normal(0, 0.1, batch[1].shape)).float()
        record.drawn(step, "noise", noise.sum().item())
        return mse_loss(self.model(batch[1] + noise), batch[2])


class PythonNoise(Loop):
    """By Python's."""

    def loss(self, step: int, batch: Samples) -> Tensor:
        sign = random.choice([-1.0, 1.0, 2.0])
        record.drawn(step, "sign", sign)
        return mse_loss(self.model(batch[1] * sign), batch[2])


class AugmentedData(Loop):
    """In the data set, of which a worker reads."""

    def data(self) -> Any:
        class Noisy(Points):
            def __getitem__(self, index: int) -> Samples:
                number, x, y = super().__getitem__(index)
                return number, x + 0.1 * torch.randn(4) + np.float32(np.random.rand()), y

        sampler = DistributedSampler(Noisy(), WORLD, RANK, seed=5)
        return DataLoader(Noisy(), BATCH // WORLD, sampler=sampler, num_workers=2)


class PerRank(Loop):
    """A generator that each rank has for itself, and one that all have alike."""

    def prepare(self) -> None:
        self.own = torch.Generator().manual_seed(RANK)
        self.common = np.random.default_rng(4)

    def state(self) -> dict[str, Any]:
        return {"common": self.common}

    def per_rank(self) -> dict[str, Any]:
        return {"own": self.own}

    def loss(self, step: int, batch: Samples) -> Tensor:
        noise = 0.1 * torch.randn(batch[1].shape, generator=self.own) + self.common.random()
        return mse_loss(self.model(batch[1] + noise), batch[2])


class RandomEvaluation(Dropout):
    """An evaluation that draws random numbers."""

    def evaluate(self) -> float:
        x = torch.rand(3, 4) + random.random() + np.random.rand()
        with torch.no_grad():
            return self.net(x.float()).mean().item()


# State beside the model


class Average(Loop):
    """Averaged weights, which are what is evaluated."""

    def prepare(self) -> None:
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.8))

    def state(self) -> dict[str, Any]:
        return {"average": self.average}

    def update(self, step: int) -> None:
        super().update(step)
        self.average.update_parameters(self.net)

    @torch.no_grad()
    def evaluate(self) -> float:
        return mse_loss(self.average(self.held_out[0]), self.held_out[1]).item()


class Best(Loop):
    """The best weights so far, and when they were found."""

    rate = 0.3

    def prepare(self) -> None:
        self.best: dict[str, Any] = {"value": 9.0, "step": 0, "weights": self.weights()}

    def weights(self) -> dict[str, Tensor]:
        return copy.deepcopy(self.net.state_dict())

    def state(self) -> dict[str, Any]:
        return {"best": self.best}

    def judge(self, step: int, value: float) -> None:
        if value < self.best["value"]:
            self.best.update(value=value, step=step, weights=self.weights())

    def found(self) -> dict[str, Any]:
        weights = record.digest(self.best["weights"])
        return {"best": self.best["step"], "weights of the best": weights}


class Early(Best):
    """Ends when two evaluations have found nothing better."""

    def prepare(self) -> None:
        super().prepare()
        self.patience = {"left": 2}

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "patience": self.patience}

    def judge(self, step: int, value: float) -> None:
        better = step == 3  # so that it ends at step 9, whatever is learned
        if better:
            super().judge(step, value)
        self.patience["left"] = 2 if better else self.patience["left"] - 1

    def is_done(self) -> bool:
        return self.patience["left"] == 0


class Window:
    """An object of the user's own, with the last losses and their mean."""

    def __init__(self) -> None:
        self.last: deque[float] = deque(maxlen=3)
        self.seen = 0

    def add(self, loss: float) -> float:
        self.last.append(loss)
        self.seen += 1
        return sum(self.last) / len(self.last)

    def state_dict(self) -> dict[str, Any]:
        return {"last": list(self.last), "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last.extend(state["last"])
        self.seen = state["seen"]


class Custom(Loop):
    """The loss is weighed by what was lost lately."""

    def prepare(self) -> None:
        self.window = Window()

    def per_rank(self) -> dict[str, Any]:
        return {"window": self.window}

    def loss(self, step: int, batch: Samples) -> Tensor:
        loss = super().loss(step, batch)
        return loss / (1 + self.window.add(loss.item()))


class Replay(Loop):
    """A list of what was trained on before, and a tensor that is changed in place."""

    def prepare(self) -> None:
        self.seen: list[int] = []
        self.total = torch.zeros(1)

    def state(self) -> dict[str, Any]:
        return {"total": self.total}

    def per_rank(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def loss(self, step: int, batch: Samples) -> Tensor:
        self.seen.extend(batch[0].tolist())
        self.total += 1
        again = Points()[self.seen[len(self.seen) // 2]]
        return super().loss(step, batch) + mse_loss(self.model(again[1]), again[2]) / self.total


# Models


class BatchNorm(Loop):
    def network(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


class Frozen(Loop):
    def network(self) -> nn.Module:
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        net[0].requires_grad_(False)
        return net

    def make_optimizer(self) -> torch.optim.Optimizer:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=self.rate, eps=1e-3)


class Tied(Loop):
    def network(self) -> nn.Module:
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))
        net[2].weight = net[0].weight  # type: ignore[union-attr]
        return net


class Compiled(Loop):
    """torch.compile, without the compiler of C++ that its default needs."""

    def wrapped(self, net: nn.Module) -> nn.Module:
        return torch.compile(super().wrapped(net), backend="eager")  # type: ignore[return-value]


class Sharded(Loop):
    def wrapped(self, net: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        return fully_shard(net)


class ByHand(Loop):
    """Gradients that are averaged by hand."""

    def wrapped(self, net: nn.Module) -> nn.Module:
        return net

    def update(self, step: int) -> None:
        for parameter in self.model.parameters():
            if WORLD > 1:
                dist.all_reduce(parameter.grad)
                parameter.grad /= WORLD  # type: ignore[operator]
        super().update(step)


class NoData(Loop):
    """The form without data: the samples follow from the step."""

    def run(self) -> None:
        steps = survive(self.model, self.optimizer, steps=STEPS, save_every=4)
        for step in steps:
            self.train(step, next(self.batches(step)))
            if step % 3 == 0:
                with steps.evaluation():
                    record.evaluating(step)
                    value = self.evaluate()
                record.evaluation(step, value)
        record.end(steps.train_state.step, self.net)

    def batches(self, step: int) -> Iterator[Samples]:
        first = (step - 1) % EPOCH * BATCH + RANK * (BATCH // WORLD)
        rows: Iterable[Samples] = (Points()[first + n] for n in range(BATCH // WORLD))
        yield torch.utils.data.default_collate(list(rows))


def features() -> dict[str, type[Loop]]:
    """Every class that is a feature, by its name in small letters."""
    found, left = {}, [Loop]
    while left:
        kind = left.pop()
        left += kind.__subclasses__()
        if kind is not Loop:
            found[kind.__name__.lower()] = kind
    return found


if __name__ == "__main__":
    if WORLD > 1:
        dist.init_process_group("gloo")
    features()[sys.argv[2]]().run()
