"""Trains with every kind of state, and again with an interruption: found-<rank>.json says how.

state_matrix.py FOLDER ddp|fsdp1|fsdp2|submesh
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from kempner import survive
from kempner.run.process.exit_codes import UsageError

STEPS, STOP = 6, 3
folder, wrapper = Path(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Counter:
    """A Stateful with what such things hold."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"names": [], "last": deque(maxlen=3), "best": np.float64(9.0)}

    def add(self, step: int, loss: float) -> None:
        self.seen["names"].append(f"step {step}")
        self.seen["last"].append((step, loss))
        self.seen["best"] = np.minimum(self.seen["best"], loss)

    def state_dict(self) -> dict[str, Any]:
        return self.seen

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))


def plain_network() -> nn.Module:
    """Without running statistics, which only DistributedDataParallel keeps the same."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4))


def wrapped(module: nn.Module) -> nn.Module:
    if wrapper == "ddp":  # see docs/own_loop.md for the option
        return DistributedDataParallel(module, find_unused_parameters=True)
    if wrapper.startswith("fsdp1"):
        return FullyShardedDataParallel(
            module, device_id=torch.device("cpu"), use_orig_params=wrapper == "fsdp1-original"
        )
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "other"))
    if wrapper == "tensor":
        module[1] = nn.Identity()  # type: ignore[operator]
        plan = {"0": ColwiseParallel(), "3": RowwiseParallel()}
        parallelize_module(module, mesh["other"], plan)
    whole = init_device_mesh("cpu", (world,))
    fully_shard(module, mesh={"fsdp2": whole, "hsdp": mesh}.get(wrapper, mesh["data"]))
    return module


class RegisteredState:
    """All kinds of state that can be held beside each other."""

    def __init__(self) -> None:
        build = network if wrapper == "ddp" else plain_network
        self.model, self.critic = wrapped(build()), wrapped(plain_network())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.critic_optimizer = torch.optim.SGD(self.critic.parameters(), lr=1e-2, momentum=0.9)
        torch.manual_seed(6)
        self.quadratic = nn.Linear(4, 1)
        self.lbfgs = torch.optim.LBFGS(self.quadratic.parameters(), max_iter=3)
        average = get_ema_multi_avg_fn(0.9)
        self.ema = AveragedModel(deepcopy(self.quadratic), multi_avg_fn=average)
        self.schedule = CosineAnnealingLR(self.optimizer, T_max=20)
        self.plateau = ReduceLROnPlateau(self.critic_optimizer, patience=0)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=2)
        self.counter = Counter()
        self.best: dict[str, Any] = {"step": 0, "loss": 9.0}
        self.order = [3, 1, 2]
        self.running, self.table = torch.zeros(3), np.zeros((2, 2))
        self.draws = torch.Generator().manual_seed(7)
        self.python, self.numpy = random.Random(8), np.random.default_rng(9)
        self.old_numpy = np.random.RandomState(10)
        self.mine = Counter()
        self.own_buffer = torch.full((2,), float(rank))
        self.own_draws = torch.Generator().manual_seed(rank)

    def state(self) -> dict[str, Any]:
        names = ("critic", "critic_optimizer", "quadratic", "lbfgs", "ema", "schedule", "plateau")
        names += ("scaler", "counter", "best", "order", "running", "table", "draws", "python")
        names += ("numpy", "old_numpy")
        return {name: getattr(self, name) for name in names}

    def per_rank(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("mine", "own_buffer", "own_draws")}

    def step(self, step: int) -> None:
        """One of training, in which everything moves."""
        noise = torch.rand(4, 8, generator=self.own_draws)
        loss = self.model(noise + torch.rand(4, 8)).square().mean()
        other = self.critic(torch.rand(4, 8)).square().mean()
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        other.backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.critic_optimizer.step()
        self.optimizer.zero_grad()
        self.critic_optimizer.zero_grad()
        target = torch.rand(6, 4, generator=self.draws)

        def closure() -> Tensor:
            self.lbfgs.zero_grad()
            far = (self.quadratic(target) - target.sum(1, keepdim=True)).square().mean()
            far.backward()
            return far

        self.lbfgs.step(closure)  # type: ignore[no-untyped-call]
        self.ema.update_parameters(self.quadratic)
        self.schedule.step()
        self.plateau.step(1.0)
        self.counter.add(step, self.python.random())
        self.best.update(step=step, loss=self.numpy.random())
        self.order.append(self.old_numpy.randint(9))
        self.running += torch.rand(3, generator=self.draws)
        self.table += self.numpy.random((2, 2))
        self.mine.add(step, float(loss.detach()) + rank)
        self.own_buffer.mul_(1.5).add_(rank)

    def digests(self) -> dict[str, str]:
        """Of each by its name."""
        whole = {"model": self.model, "optimizer": self.optimizer, **self.state()}
        whole |= self.per_rank()
        return {name: digest(thing) for name, thing in whole.items()}


def digest(thing: Any) -> str:
    return hashlib.blake2b(repr(told(thing)).encode(), digest_size=8).hexdigest()


def told(thing: Any) -> Any:
    """In words that are the same for the same bits."""
    if isinstance(thing, torch.optim.Optimizer):
        return [told(thing.state_dict()["state"]), told(thing.state_dict()["param_groups"])]
    for name in ("state_dict", "get_state", "getstate"):
        if hasattr(thing, name):
            return told(getattr(thing, name)())
    if isinstance(thing, np.random.Generator):
        return told(thing.bit_generator.state)
    if isinstance(thing, Tensor):
        local = thing.to_local() if isinstance(thing, DTensor) else thing
        thing = local.detach().numpy()
    if isinstance(thing, np.ndarray | np.generic):
        return (str(thing.dtype), thing.shape, thing.tobytes())
    if isinstance(thing, dict):
        return {key: told(value) for key, value in thing.items()}
    return [*map(told, thing)] if isinstance(thing, list | tuple | deque) else thing


def train(name: str, steps: int) -> RegisteredState:
    things = RegisteredState()
    for step in survive(
        things.model,
        things.optimizer,
        steps=steps,
        save_every=2,
        run_dir=folder / name,
        state=things.state(),
        per_rank=things.per_rank(),
    ):
        things.step(step)
    return things


def refused(**arguments: Any) -> str:
    """What survive says at its first line, or after the first step; empty if it takes it."""
    model = wrapped(plain_network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    where = folder / f"refused-{len(list(folder.iterdir()))}"
    dist.barrier()
    try:
        survive(model, optimizer, steps=1, save_every=1, run_dir=where, **arguments)
    except UsageError as error:
        return str(error)
    return ""


class Mute:
    """Has no state that a manager could ask for."""


class Holding:
    """A Stateful that holds what no checkpoint can."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return {"deep": [self.held]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing was saved")


def main() -> None:
    found: dict[str, Any] = {}
    try:
        whole = train("undisturbed", STEPS).digests()
        train("resumed", STOP)
        again = train("resumed", STEPS).digests()
        found["equal"] = {name: whole[name] == again[name] for name in whole}
    except UsageError as error:
        found["whole"] = str(error)
    refusals: dict[str, Callable[[], str]] = {
        "a number": lambda: refused(state={"count": 3}),
        "an object": lambda: refused(state={"mute": Mute()}),
        "a function in a state": lambda: refused(state={"deep": Holding(print)}),
        "objects in an array": lambda: refused(state={"deep": Holding(np.array([object()]))}),
        "a sparse tensor": lambda: refused(state={"deep": Holding(torch.eye(2).to_sparse())}),
        "a module per rank": lambda: refused(per_rank={"module": nn.Linear(2, 2)}),
        "a name twice": lambda: refused(state={"a": {}}, per_rank={"a": {}}),
        "no name": lambda: refused(state={"a b": {}}),
    }
    if "whole" not in found:
        found["refused"] = {name: refuse() for name, refuse in refusals.items()}
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    print(f"rank {rank} has seen it all", flush=True)


main()
