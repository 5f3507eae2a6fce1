"""What a save has of a state that is written to meanwhile, and what a rollback keeps of the old."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from saved import open_manager
from torch import Tensor, nn

from kempner.checkpoint.format.manifest import TrainState
from kempner.checkpoint.manager import CheckpointEngine
from kempner.checkpoint.tensors import restore
from kempner.checkpoint.tensors.load import fill
from kempner.checkpoint.tensors.staging import StagedCopy
from kempner.run.record.events import CheckpointFailed, LedgerEvent
from kempner.run.record.run_dir import RunDirectory


class Counting(torch.optim.SGD):
    """Keeps Python numbers, as many optimizers do."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter]
                kept["step"] = kept.get("step", 0) + 1
                kept["best"] = 0.1 + kept["step"]
                kept["odd"] = kept["step"] % 2 == 1


class Setting:
    """A model in training, its manager, and what went into the ledger."""

    def __init__(
        self, run: RunDirectory, group: dist.ProcessGroup, kind: type[torch.optim.SGD]
    ) -> None:
        self.model = nn.Linear(4, 4)
        self.model.register_parameter("slow", nn.Parameter(torch.zeros(4), requires_grad=False))
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = kind(trained, lr=0.1, momentum=0.9)
        self.ledger: list[LedgerEvent] = []
        self.manager: CheckpointEngine = open_manager(
            run, self.model, self.optimizer, group, record=self.ledger.append
        )

    def step(self) -> None:
        self.model(torch.ones(2, 4)).square().sum().backward()
        self.manager.release_staging()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save_while(self, step: int, write: Callable[[], object]) -> None:
        """Save, with a write after the save began and before the copy could."""
        hold = threading.Event()
        self.manager._saver._stager._thread.submit(hold.wait)
        try:
            self.manager.save(TrainState(step))
            write()
        finally:
            hold.set()
        self.step()
        self.manager.join()

    def table(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


@pytest.fixture
def setting(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Setting]:
    """In a world of one, after a step."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    kind = getattr(request, "param", torch.optim.SGD)
    setting = Setting(RunDirectory(tmp_path), dist.new_group(backend="gloo"), kind)
    with closing(setting.manager):
        setting.step()
        yield setting
    dist.destroy_process_group()


def test_a_copy_that_was_written_to_is_not_committed_and_made_again(setting: Setting) -> None:
    def average() -> None:
        setting.model.slow.lerp_(setting.model.bias.detach(), 0.5)

    setting.save_while(1, lambda: None)
    assert setting.manager.committed_step == 1
    setting.save_while(2, average)
    assert (setting.manager.committed_step, setting.manager.failures.count) == (1, 1)
    ((why,),) = [e.reasons.values() for e in setting.ledger if isinstance(e, CheckpointFailed)]
    assert "model.slow changed outside of optimizer.step" in why

    as_saved = setting.table()
    setting.save_while(3, average)
    assert (setting.manager.committed_step, setting.manager.failures.count) == (3, 0)
    assert not torch.equal(setting.table()["slow"], as_saved["slow"])
    setting.manager.roll_back(3)
    for name, tensor in setting.table().items():
        assert torch.equal(tensor, as_saved[name]), name


def test_a_loop_that_never_waits_for_the_copy_is_noticed(setting: Setting) -> None:
    setting.step = lambda: None  # type: ignore[method-assign]
    with torch.no_grad():
        setting.save_while(1, lambda: setting.model.weight.add_(1.0))
    assert (setting.manager.committed_step, setting.manager.failures.count) == (None, 1)


def writes() -> dict[str, Callable[[Tensor], object]]:
    def in_inference_mode(tensor: Tensor) -> None:
        with torch.inference_mode():
            tensor.mul_(2.0)

    return {
        "in place": lambda tensor: tensor.mul_(2.0),
        "a row": lambda tensor: tensor.__setitem__(0, 2.0),
        "foreach": lambda tensor: torch._foreach_mul_([tensor], 2.0),
        "a view": lambda tensor: tensor.detach().view(-1)[1:].zero_(),
        "inference mode": in_inference_mode,
    }


@pytest.mark.parametrize("way", writes())
def test_writes_that_are_noticed(way: str) -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    copy = StagedCopy([("weight", parameter)])
    with torch.no_grad():
        writes()[way](parameter)
    copy.done.set_result(None)
    assert copy.settle() == {"weight"}


def test_only_writes_before_the_first_look_count() -> None:
    tensor = torch.ones(2)
    copy = StagedCopy([("weight", tensor)])
    copy.done.set_result(None)
    assert copy.settle() == set()
    tensor.add_(1)
    assert copy.settle() == set()


def test_a_rollback_lets_go_of_the_old_optimizer_state(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = np.zeros((4, 4), dtype=np.float32)
    kept = setting.optimizer.state[setting.model.weight]
    kept["momentum_buffer"] = torch.from_numpy(memory)
    still_there = weakref.ref(memory)
    del kept, memory
    setting.save_while(1, lambda: None)
    assert still_there() is not None
    held: list[object] = []

    def fill_and_look(*arguments: Any) -> int:
        held.append(still_there() is not None)
        return fill(*arguments)

    monkeypatch.setattr(restore, "fill", fill_and_look)
    setting.manager.roll_back(1)
    assert held == [False]


@pytest.mark.parametrize("setting", [Counting], indirect=True)
def test_python_numbers_of_an_optimizer_are_kept(setting: Setting) -> None:
    def numbers() -> list[tuple[object, ...]]:
        return [(s["step"], s["best"], s["odd"]) for s in setting.optimizer.state.values()]

    setting.save_while(1, lambda: None)  # and a step
    setting.save_while(2, lambda: None)
    assert numbers() == [(3, 3.1, True)] * 2
    setting.manager.roll_back(2)
    assert numbers() == [(2, 2.1, False)] * 2
    setting.manager.roll_back(1)
    assert numbers() == [(1, 1.1, True)] * 2
    assert {type(n) for row in numbers() for n in row} == {int, float, bool}
