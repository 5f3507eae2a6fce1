"""What a checkpoint cannot hold is refused in one sentence, before anything is saved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from saved import open_manager
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from kempner.checkpoint.format.manifest import TrainState
from kempner.checkpoint.tensors import state
from kempner.checkpoint.tensors.route import describe_difference, digests
from kempner.run.process.exit_codes import ExitCode, UsageError
from kempner.run.record.run_dir import RunDirectory


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


def with_hook(change: Callable[[dict[str, Any]], None]) -> nn.Module:
    """A model whose state dict is changed on its way out."""
    model = net()
    model.register_state_dict_post_hook(lambda module, table, prefix, extra: change(table))
    return model


def cloning(table: dict[str, Any]) -> None:
    table["0.weight"] = table["0.weight"].clone()


def casting(table: dict[str, Any]) -> None:
    table["1.running_mean"] = table["1.running_mean"].half()


def dropping(table: dict[str, Any]) -> None:
    del table["0.bias"]


def transposing(table: dict[str, Any]) -> None:
    table["0.weight"] = table["0.weight"].T


class Extra(nn.Linear):
    """Keeps something beside its tensors."""

    def get_extra_state(self) -> object:
        return {"scale": 1}

    def set_extra_state(self, state: object) -> None: ...


def wrapped() -> nn.Module:
    model = net()
    model.register_buffer("both", TwoTensor(torch.ones(2), torch.ones(2)))
    return model


def sparse() -> nn.Module:
    model = net()
    model.register_buffer("thin", torch.ones(2).to_sparse())
    return model


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (lambda: with_hook(cloning), "model.0.weight of model.state_dict.. is a copy"),
        (lambda: with_hook(casting), "model.1.running_mean of model.state_dict.. is a copy"),
        (lambda: with_hook(dropping), "0.bias is trained, but model.state_dict.. leaves it out"),
        (lambda: Extra(3, 3), "model._extra_state is of type dict"),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(3)), "model.1.weight is a .*lazy"),
        (lambda: net().to("meta"), "model.0.weight is a Tensor .*on meta"),
        (wrapped, "model.both is a TwoTensor"),
        (sparse, "model.thin is a Tensor .torch.sparse_coo, on cpu."),
    ],
)
def test_models(model: Callable[[], nn.Module], sentence: str) -> None:
    subject = model()
    optimizer = torch.optim.AdamW([p for p in subject.parameters() if p.requires_grad])
    with pytest.raises(UsageError, match=sentence) as refusal:
        state.capture(subject, optimizer)
    assert refusal.value.code is ExitCode.USAGE
    assert "\n" not in str(refusal.value)


def test_a_view_of_a_parameter_is_its_memory() -> None:
    model = with_hook(transposing)
    table = state.capture(model, torch.optim.AdamW(model.parameters()))
    assert table["model.0.weight"].data_ptr() == model.get_parameter("0.weight").data_ptr()


def moving(entry: object, value: object) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.state[model.get_parameter("0.weight")][entry] = value
        return optimizer

    return optimizer


@pytest.mark.parametrize(
    ("optimizer", "sentence"),
    [
        (moving("history", [1.0]), "optimizer.0.weight.history is of type list"),
        (moving("name", "fast"), "optimizer.0.weight.name is of type str"),
        (moving("momentum", None), "optimizer.0.weight.momentum is of type NoneType"),
        (moving("a.b", torch.ones(1)), "the optimizer keeps 'a.b' for 0.weight"),
        (moving(0, torch.ones(1)), "the optimizer keeps 0 for 0.weight"),
    ],
)
def test_optimizer_state(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer], sentence: str
) -> None:
    model = net()
    with pytest.raises(UsageError, match=sentence):
        state.capture(model, optimizer(model))


@pytest.fixture
def group(tmp_path: Path) -> Any:
    """Of a world of one."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.new_group(backend="gloo")
    dist.destroy_process_group()


def test_a_manager_refuses_when_it_is_built(tmp_path: Path, group: dist.ProcessGroup) -> None:
    model = with_hook(cloning)
    with pytest.raises(UsageError, match=r"model\.0\.weight of model\.state_dict\(\) is a copy"):
        open_manager(RunDirectory(tmp_path), model, torch.optim.SGD(model.parameters()), group)


def test_what_appears_in_the_first_step_is_refused_then(
    tmp_path: Path, group: dist.ProcessGroup
) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    run = RunDirectory(tmp_path)
    with closing(open_manager(run, model, optimizer, group)) as manager:
        optimizer.step(closure)
        for refuse in (manager.check_state, lambda: manager.save(TrainState(1))):
            with pytest.raises(UsageError, match=r"optimizer\.weight\.\w+ is of type list"):
                refuse()
        assert manager.in_flight is None


def test_what_appears_later_fails_a_save_and_is_refused_by_the_next(
    tmp_path: Path, group: dist.ProcessGroup
) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    with closing(open_manager(RunDirectory(tmp_path), model, optimizer, group)) as manager:
        manager.save(TrainState(1))
        manager.join()
        optimizer.state[model.weight]["history"] = [1.0]
        manager.save(TrainState(2))  # the other ranks must be told, and in their save they are
        manager.join()
        assert (manager.committed_step, manager.failures.count) == (1, 1)
        with pytest.raises(UsageError, match=r"optimizer\.weight\.history is of type list"):
            manager.save(TrainState(3))


def another_buffer(model: nn.Module) -> None:
    model.register_buffer("late", torch.ones(3))


def another_adapter(model: nn.Module) -> None:
    model.adapter = nn.Linear(3, 3)


def one_less(model: nn.Module) -> None:
    del model.bias
    model.bias = None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (another_buffer, r"model\.late appeared after the start"),
        (another_adapter, r"model\.adapter\.bias appeared after the start"),
        (one_less, r"model\.bias is gone since the start"),
    ],
)
def test_tensors_that_come_and_go_after_the_start_are_refused(
    tmp_path: Path,
    group: dist.ProcessGroup,
    change: Callable[[nn.Module], None],
    sentence: str,
) -> None:
    """By the look after the first step; later, a save fails and the next one is refused."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with closing(open_manager(RunDirectory(tmp_path), model, optimizer, group)) as manager:
        manager.save(TrainState(1))
        manager.join()
        change(model)
        manager.save(TrainState(2))
        manager.join()
        assert (manager.committed_step, manager.failures.count) == (1, 1)
        for refuse in (manager.check_state, lambda: manager.save(TrainState(3))):
            with pytest.raises(UsageError, match=sentence):
                refuse()


def test_which_tensor_differs_is_named() -> None:
    same, other = torch.ones(3), torch.tensor([1.0, 1.0, 2.0])
    held = digests({"a": same, "b": same}), digests({"a": same, "b": other})
    assert "b is not the same on rank 0 and rank 2" in describe_difference([*held[:1] * 2, held[1]])
    lacking = digests({"a": same})
    assert "rank 0 has b, and rank 1 does not" in describe_difference([held[0], lacking])
    assert "rank 1 has b, and rank 0 does not" in describe_difference([lacking, held[0]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int8, torch.bool])
def test_digests_tell_contents_apart(dtype: torch.dtype) -> None:
    one, other = torch.tensor([[1, 0], [0, 1]], dtype=dtype), torch.tensor([[1, 0], [1, 0]])
    table = {"one": one, "copy": one.clone(), "other": other.to(dtype), "none": one[:0]}
    found = digests(table)
    assert found["one"] == found["copy"]
    assert len({found["one"], found["other"], found["none"]}) == 3
