"""The state's tensors are looked up once, and again as soon as they are others."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import nn

from kempner.checkpoint.format.shard_plan import place
from kempner.checkpoint.tensors import state
from kempner.checkpoint.tensors.file_buffer import FileBuffer, container, tensor_specs
from kempner.checkpoint.tensors.route import FileLayout, Route
from kempner.checkpoint.tensors.staging import Stager
from kempner.run.process.exit_codes import UsageError


class Subject(nn.Module):
    """A parameter in a submodule, and a buffer that every forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("empty", None)
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x)


def trained() -> tuple[Subject, torch.optim.Optimizer]:
    model = Subject()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    return model, optimizer


def step(model: Subject, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def bind(model: Subject, optimizer: torch.optim.Optimizer) -> tuple[Route, FileLayout]:
    binding = state.Binding(model, optimizer)
    specs = tensor_specs(binding.table, 1)
    placed = place(specs, 0, container)
    layout = FileLayout(specs, [p.chunk.key for p in placed], placed, 1)
    return Route.of(binding, layout, FileBuffer(placed)), layout


def saved(route: Route, key: str) -> torch.Tensor:
    return route.image.views[route.layout.keys.index(key)]


def test_training_on_leaves_it_intact() -> None:
    model, optimizer = trained()
    binding = state.Binding(model, optimizer)
    for _ in range(3):
        step(model, optimizer)
        assert binding.intact()


def assign(model: Subject, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def move_data(model: Subject, optimizer: torch.optim.Optimizer) -> None:
    model.layer.weight.data = model.layer.weight.data.clone()


def replace_a_parameter(model: Subject, optimizer: torch.optim.Optimizer) -> None:
    model.layer.bias = nn.Parameter(torch.ones(3))


def load_the_optimizer(model: Subject, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def forget_a_state(model: Subject, optimizer: torch.optim.Optimizer) -> None:
    del optimizer.state[model.layer.bias]


def add_an_entry(model: Subject, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.layer.bias]["average"] = torch.zeros(3)


def replace_a_counter(model: Subject, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.layer.bias]["step"] = torch.tensor(5.0)


def replace_a_buffer(model: Subject, optimizer: torch.optim.Optimizer) -> None:
    model.calls = model.calls + 1


def register_another_buffer(model: Subject, optimizer: torch.optim.Optimizer) -> None:
    model.layer.register_buffer("late", torch.zeros(1))


def fill_a_buffer(model: Subject, optimizer: torch.optim.Optimizer) -> None:
    model.empty = torch.zeros(1)


@pytest.mark.parametrize(
    "change",
    [
        replace_a_buffer,
        register_another_buffer,
        fill_a_buffer,
        assign,
        move_data,
        replace_a_parameter,
        load_the_optimizer,
        forget_a_state,
        add_an_entry,
        replace_a_counter,
    ],
)
def test_other_tensors_are_noticed(
    change: Callable[[Subject, torch.optim.Optimizer], None],
) -> None:
    model, optimizer = trained()
    binding = state.Binding(model, optimizer)
    assert binding.intact()
    change(model, optimizer)
    assert not binding.intact()


def test_state_of_parameters_that_were_replaced_is_missed() -> None:
    model, optimizer = trained()
    assign(model, optimizer)
    with pytest.raises(UsageError, match="state for 2 parameters that the model does not have"):
        state.capture(model, optimizer)


def test_what_a_forward_pass_writes_is_copied_at_once() -> None:
    model, optimizer = trained()
    route, _ = bind(model, optimizer)
    stager, hold = Stager(torch.device("cpu")), threading.Event()
    stager._thread.submit(hold.wait)  # the copy in the background cannot start
    staged = route.stage(stager, step=1)
    model(torch.ones(2, 3))
    hold.set()
    assert staged.settle() == set()
    stager.close()
    assert model.calls.item() == 2
    assert saved(route, "model.calls").item() == 1
    assert torch.equal(saved(route, "model.layer.weight"), model.layer.weight.detach())


def test_only_persistent_state_is_saved() -> None:
    binding = state.Binding(*trained())
    assert "model.scratch" not in binding.table
    assert binding.buffers == {"model.calls"}


def test_a_tensor_is_asked_for_its_shards_while_another_thread_imports_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the first save does: for a moment the module is there, and empty."""
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", ModuleType("half imported"))
    assert not state.is_sharded(torch.ones(1))
