"""What wraps a module changes no name, and may be another when a run goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from kempner.checkpoint import manager
from kempner.checkpoint.context import CheckpointContext
from kempner.checkpoint.format.manifest import Identity, TrainState
from kempner.checkpoint.format.names import METADATA
from kempner.checkpoint.manager import CheckpointEngine
from kempner.checkpoint.registered.composite import plainly_named
from kempner.checkpoint.registered.groups import gather
from kempner.checkpoint.store.retention import Keep
from kempner.checkpoint.tensors import save, state
from kempner.run.record.attempts import Fence, begin_attempt
from kempner.run.record.run_dir import RunDirectory


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Network(nn.Module):
    """A part is called as the wrappers call what they wrap."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.module(x))


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def parts_compiled(module: nn.Module) -> nn.Module:
    module.module = compiled(module.get_submodule("module"))
    module.head = checkpoint_wrapper(module.get_submodule("head"))
    return module


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "none": lambda module: module,
    "compiled": compiled,
    "parallel": DistributedDataParallel,
    "parallel compiled": lambda module: compiled(DistributedDataParallel(module)),
    "compiled in parallel": lambda module: DistributedDataParallel(compiled(module)),
    "parts compiled": parts_compiled,
    "all of them": lambda module: compiled(DistributedDataParallel(parts_compiled(module))),
}


class Program:
    """A wrapped model with its optimizer, and perhaps another one that is registered."""

    def __init__(self, wrapper: str, with_critic: bool = True) -> None:
        torch.manual_seed(1)
        self.model = WRAPPERS[wrapper](Network())
        self.critic = WRAPPERS[wrapper](Network())
        both = [*self.model.parameters(), *(self.critic.parameters() if with_critic else ())]
        self.optimizer = torch.optim.AdamW(both, lr=0.1)
        state = {"critic": self.critic} if with_critic else {}
        self.everything = gather(self.model, self.optimizer, state, {})

    def step(self) -> None:
        x = torch.arange(12.0).view(4, 3)
        (self.model(x).square().sum() + self.critic(x).sum()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def checkpoints(self, folder: Path) -> CheckpointEngine:
        run, identity = RunDirectory(folder), Identity(1, {}, 0, "", {})
        fence = Fence(run.attempts, begin_attempt(run))
        context = CheckpointContext(run.checkpoints, identity, fence, dist.group.WORLD)
        every = self.everything
        return CheckpointEngine(
            context, every.model, every.optimizer, keep=Keep(2), registered=every.registered
        )

    def table(self) -> dict[str, list[float]]:
        every = self.everything
        table = state.capture(plainly_named(every.model), every.optimizer)
        return {key: tensor.tolist() for key, tensor in table.items()}


def resumed(folder: Path, before: str, after: str) -> tuple[Program, Program]:
    """A program that has saved, and another that goes on from there."""
    first = Program(before)
    first.step()
    checkpoints = first.checkpoints(folder)
    checkpoints.save(TrainState(1))
    checkpoints.close()
    second = Program(after)
    checkpoints = second.checkpoints(folder)
    assert checkpoints.restore() == TrainState(1)
    checkpoints.close()
    return first, second


@pytest.mark.parametrize(("before", "after"), [*product(WRAPPERS, ["none", "all of them"])])
def test_a_run_goes_on_with_other_wrappers(tmp_path: Path, before: str, after: str) -> None:
    first, second = resumed(tmp_path, before, after)
    assert second.table() == first.table()
    assert "model.module.0.weight" in first.table()
    assert "optimizer.critic/module.1.weight.exp_avg" in first.table()


@pytest.mark.parametrize("before", ["compiled", "parts compiled"])
def test_names_of_older_checkpoints_with_wrappers_are_understood(
    tmp_path: Path, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Program(before, with_critic=False)
    old.step()
    with monkeypatch.context() as patched:
        for module in (manager, save):
            patched.setattr(module, "plainly_named", lambda model: model)
        checkpoints = old.checkpoints(tmp_path)
        checkpoints.save(TrainState(1))
        checkpoints.close()
    index = tmp_path / "checkpoints" / "step-00000001" / METADATA
    assert b"_orig_mod." in index.read_bytes()
    new = Program("none", with_critic=False)
    checkpoints = new.checkpoints(tmp_path)
    assert checkpoints.restore() == TrainState(1)
    checkpoints.close()
    assert new.table() == old.table()
