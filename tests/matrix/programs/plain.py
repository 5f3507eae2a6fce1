"""A plain loop: plain.py plain FEATURE

`Loop` is the loop that all features have in common; the class of a feature has what is its own.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import record
import torch
import torch.distributed as dist
from record import RANK, WORLD
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from kempner import ResumableBatchSampler, ResumableDataLoader, survive

EPOCH, BATCH, STEPS = 5, 4, 14

Samples = tuple[Tensor, Tensor, Tensor]
"""The numbers of samples, what they are, and what is to be learned of them."""


class Points(Dataset[Samples]):
    """Numbered points and a curve through them."""

    def __init__(self, size: int = EPOCH * BATCH) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Samples:
        x = torch.sin(torch.arange(1, 5) * (index + 1.0))
        return torch.tensor(index), x, x.sum(0, keepdim=True).tanh()


class Loop:
    """AdamW, an evaluation every three steps, a save every four."""

    accumulate = 1
    rate = 1e-2

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.net = self.network()
        self.model = self.wrapped(self.net)
        self.optimizer = self.make_optimizer()
        self.held_out = [tensor[None] for tensor in Points(60)[50][1:]]
        self.prepare()

    def network(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def wrapped(self, net: nn.Module) -> nn.Module:
        return DistributedDataParallel(net) if WORLD > 1 else net

    def make_optimizer(self) -> torch.optim.Optimizer:
        # With a smaller eps, what is left of a gradient after rounding becomes a step.
        return torch.optim.AdamW(self.model.parameters(), lr=self.rate, eps=1e-3)

    def prepare(self) -> None:
        """What else there is."""

    def state(self) -> dict[str, Any]:
        """What is registered."""
        return {}

    def per_rank(self) -> dict[str, Any]:
        """What is registered of each rank."""
        return {}

    def data(self) -> Any:
        points = Points(self.accumulate * EPOCH * BATCH)
        sampler = DistributedSampler(points, WORLD, RANK, seed=5)
        return DataLoader(points, BATCH // WORLD, sampler=sampler)

    def run(self) -> None:
        more = {"accumulate": self.accumulate} if self.accumulate > 1 else {}
        steps = survive(
            self.model,
            self.optimizer,
            data=self.data(),
            steps=STEPS,
            save_every=4,
            state=self.state(),
            per_rank=self.per_rank(),
            **more,
        )
        for step, batch in steps:
            self.train(step, batch)
            if step % 3 == 0:
                with steps.evaluation():
                    record.evaluating(step)
                    value = self.evaluate()
                record.evaluation(step, value)
                self.judge(step, value)
                if self.is_done():
                    steps.finish()
                    break
        record.end(steps.train_state.step, self.net, **self.found())

    def train(self, step: int, batch: Any) -> None:
        """A step: a batch, or a list of them."""
        self.optimizer.zero_grad()
        for part in batch if self.accumulate > 1 else [batch]:
            loss = self.loss(step, part) / self.accumulate
            self.backward(loss)
            self.note(step, part, loss)
        self.update(step)

    def loss(self, step: int, batch: Samples) -> Tensor:
        return mse_loss(self.model(batch[1]), batch[2])

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def note(self, step: int, batch: Samples, loss: Tensor) -> None:
        record.step(step, loss, batch[0], [group["lr"] for group in self.optimizer.param_groups])

    def update(self, step: int) -> None:
        self.optimizer.step()

    @torch.no_grad()
    def evaluate(self) -> float:
        self.model.eval()
        value = mse_loss(self.net(self.held_out[0]), self.held_out[1]).item()
        self.model.train()
        return value

    def judge(self, step: int, value: float) -> None:
        """Take note of an evaluation."""

    def is_done(self) -> bool:
        return False

    def found(self) -> dict[str, Any]:
        """What else has come of it."""
        return {}


class Adamw(Loop):
    """Nothing else."""


# Optimizers and what changes the weights


class Sgd(Loop):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, nesterov=True)


class TwoOptimizers(Loop):
    """One for the weights, one for the biases, each with its own rate."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        weights = [p for p in self.model.parameters() if p.ndim > 1]
        biases = [p for p in self.model.parameters() if p.ndim == 1]
        self.second = torch.optim.RMSprop(biases, lr=3e-3, eps=1e-3)
        return torch.optim.Adam(weights, lr=self.rate, eps=1e-3)

    def state(self) -> dict[str, Any]:
        return {"second": self.second}

    def update(self, step: int) -> None:
        super().update(step)
        self.second.step()
        self.second.zero_grad()


class Adversary(Loop):
    """A second model and its optimizer, in turns."""

    def prepare(self) -> None:
        self.critic = nn.Linear(1, 1)
        self.critic_optimizer = torch.optim.SGD(self.critic.parameters(), lr=0.1)

    def state(self) -> dict[str, Any]:
        return {"critic": self.critic, "critic_optimizer": self.critic_optimizer}

    def loss(self, step: int, batch: Samples) -> Tensor:
        return super().loss(step, batch) - 0.1 * self.critic(self.model(batch[1])).mean()

    def update(self, step: int) -> None:
        super().update(step)
        for parameter in self.critic.parameters():
            if WORLD > 1:
                dist.all_reduce(parameter.grad)
                parameter.grad /= WORLD  # type: ignore[operator]
        self.critic_optimizer.step()
        self.critic_optimizer.zero_grad()


class Lbfgs(Loop):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.model.parameters(), lr=0.3, max_iter=3)

    def train(self, step: int, batch: Any) -> None:
        noted = False

        def closure() -> Tensor:
            nonlocal noted
            self.optimizer.zero_grad()
            loss = self.loss(step, batch)
            loss.backward()
            if not noted:
                self.note(step, batch, loss)
                noted = True
            return loss

        self.optimizer.step(closure)


class Scaler(Loop):
    """A loss scale that grows, and shrinks at a loss that is not finite."""

    def prepare(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    def state(self) -> dict[str, Any]:
        return {"scaler": self.scaler}

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def loss(self, step: int, batch: Samples) -> Tensor:
        return super().loss(step, batch) * (float("inf") if step == 6 else 1.0)

    def note(self, step: int, batch: Samples, loss: Tensor) -> None:
        super().note(step, batch, loss)
        record.drawn(step, "scale", self.scaler.get_scale())

    def update(self, step: int) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


class ClipNorm(Loop):
    def update(self, step: int) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        super().update(step)


class ClipValue(Loop):
    """Gradients, and weights after the step."""

    def update(self, step: int) -> None:
        nn.utils.clip_grad_value_(self.model.parameters(), 0.05)
        super().update(step)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.clamp_(-0.45, 0.45)


class Groups(Loop):
    """Two groups, one rate of which is lowered by hand."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        named = list(self.model.named_parameters())
        return torch.optim.AdamW(
            [
                {"params": [p for name, p in named if "weight" in name], "weight_decay": 0.1},
                {"params": [p for name, p in named if "bias" in name], "lr": 3e-3},
            ],
            lr=self.rate,
            eps=1e-3,
        )

    def update(self, step: int) -> None:
        super().update(step)
        if step in (5, 9):
            self.optimizer.param_groups[0]["lr"] /= 2


class Accumulate(Loop):
    accumulate = 2


# Schedules


class Schedule(Loop):
    """With a warm-up, then a cosine."""

    def prepare(self) -> None:
        first = LinearLR(self.optimizer, 0.1, total_iters=4)
        then = CosineAnnealingLR(self.optimizer, T_max=10)
        self.schedule: Any = SequentialLR(self.optimizer, [first, then], [4])

    def state(self) -> dict[str, Any]:
        return {"schedule": self.schedule}

    def update(self, step: int) -> None:
        super().update(step)
        self.schedule.step()


class Steps(Schedule):
    def prepare(self) -> None:
        self.schedule = StepLR(self.optimizer, 3, 0.5)


class Plateau(Schedule):
    """Judged by what the evaluations find."""

    def prepare(self) -> None:
        self.schedule = ReduceLROnPlateau(self.optimizer, factor=0.5, patience=0, threshold=0.2)

    def update(self, step: int) -> None:
        self.optimizer.step()

    def judge(self, step: int, value: float) -> None:
        self.schedule.step(value)


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
