"""Groups of parameters come back by the names of their parameters, whatever their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from kempner.checkpoint.registered.groups import gather
from kempner.checkpoint.registered.objects import RegisteredObjects, pack, take, unpack
from kempner.run.process.exit_codes import MismatchError, UsageError

PARTS = 5
NAMES = [f"{at}.{kind}" for at in range(PARTS) for kind in ("weight", "bias")]
Groups = list[list[str]]


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(PARTS)))


def lr_of(names: Sequence[str]) -> float:
    return 0.01 * (1 + NAMES.index(min(names)))


def momentum_of(names: Sequence[str]) -> float:
    return 0.05 * NAMES.index(min(names))


def optimizer_of(model: nn.Module, groups: Groups) -> torch.optim.SGD:
    named = dict(model.named_parameters())
    return torch.optim.SGD(
        [
            {
                "params": [named[name] for name in names],
                "lr": lr_of(names),
                "momentum": momentum_of(names),
            }
            for names in groups
        ]
    )


Scheduled = Callable[[torch.optim.Optimizer, Groups], Any]

SCHEDULERS: dict[str, Scheduled] = {
    "lambda": lambda o, gs: LambdaLR(o, [lambda k, g=g: 1 / (1 + k * lr_of(g)) for g in gs]),
    "step": lambda o, gs: StepLR(o, 2),
    "plateau": lambda o, gs: ReduceLROnPlateau(o, patience=0, min_lr=[lr_of(g) / 3 for g in gs]),
    "cyclic": lambda o, gs: CyclicLR(
        o, [lr_of(g) / 2 for g in gs], [lr_of(g) for g in gs], 3, cycle_momentum=False
    ),
    "one cycle": lambda o, gs: OneCycleLR(o, [lr_of(g) for g in gs], total_steps=20),
    "restarts": lambda o, gs: CosineAnnealingWarmRestarts(o, 3),
    "sequence": lambda o, gs: SequentialLR(o, [StepLR(o, 1), StepLR(o, 3)], [2]),
}


class Program:
    """A model, its optimizer, and a scheduler if it has one."""

    def __init__(self, groups: Groups, scheduled: Scheduled | None, held: bool = True) -> None:
        self.model = network()
        self.optimizer = optimizer_of(self.model, groups)
        self.scheduler = scheduled and scheduled(self.optimizer, groups)
        state = {"schedule": self.scheduler} if held and scheduled else {}
        self.registered: RegisteredObjects = gather(
            self.model, self.optimizer, state, {}
        ).registered

    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.step()
            if isinstance(self.scheduler, ReduceLROnPlateau):
                self.scheduler.step(1.0)
            elif isinstance(self.scheduler, LRScheduler):
                self.scheduler.step()

    def hyperparameters(self) -> dict[str, dict[str, Any]]:
        """Of each parameter."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return {
            names[parameter]: {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        }

    def resume(self, saved: bytes) -> None:
        shared = self.registered.shared
        take(unpack(saved, shared, "state", "there"), shared)

    def save(self) -> bytes:
        return pack(self.registered.shared, "state")


@st.composite
def partitions(draw: st.DrawFn) -> tuple[Groups, Groups]:
    """Groups, and the same in another order."""
    order = draw(st.permutations(NAMES))
    cuts = sorted(draw(st.sets(st.integers(1, len(NAMES) - 1), max_size=4)))
    groups = [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(NAMES)], strict=True)]
    return groups, [list(draw(st.permutations(g))) for g in draw(st.permutations(groups))]


@given(both=partitions(), scheduler=st.sampled_from([None, *SCHEDULERS]), at=st.integers(0, 4))
def test_each_parameter_has_its_own_again_whatever_the_order(
    both: tuple[Groups, Groups], scheduler: str | None, at: int
) -> None:
    (groups, others), scheduled = both, SCHEDULERS[scheduler] if scheduler else None
    undisturbed, resumed = Program(groups, scheduled), Program(others, scheduled)
    undisturbed.step(at)
    resumed.resume(undisturbed.save())
    for program in (undisturbed, resumed):
        program.step(4)
    assert resumed.hyperparameters() == undisturbed.hyperparameters()


def by_hand(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def added(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    optimizer.add_param_group({"params": model.get_parameter("4.weight"), "lr": 7.0})


def removed(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    del optimizer.param_groups[1]


def moved(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop())


@pytest.mark.parametrize("change", [by_hand, added, removed, moved])
def test_groups_that_the_loop_has_changed_come_back(
    change: Callable[[torch.optim.Optimizer, nn.Module], None],
) -> None:
    groups = [["0.weight", "1.weight"], ["0.bias", "1.bias"]]
    undisturbed, resumed = Program(groups, None), Program(groups[::-1], None)
    change(undisturbed.optimizer, undisturbed.model)
    resumed.resume(undisturbed.save())
    assert resumed.hyperparameters() == undisturbed.hyperparameters()
    assert undisturbed.hyperparameters() != Program(groups, None).hyperparameters()


@pytest.mark.parametrize(
    ("groups", "sentence"),
    [
        ([["0.weight", "0.bias"]], "optimizer has 0.weight in one group with parameters that had"),
        ([["0.weight"], ["0.bias"], ["1.bias"]], "optimizer trains 1.bias, which it did not when"),
    ],
)
def test_other_groups_are_refused_in_a_sentence(groups: Groups, sentence: str) -> None:
    saved = Program([["0.weight"], ["0.bias"]], None).save()
    with pytest.raises(MismatchError, match=sentence):
        Program(groups, None).resume(saved)


def test_a_group_may_be_divided_and_groups_that_are_alike_united() -> None:
    whole, cut = [["0.weight", "0.bias"]], [["0.bias"], ["0.weight"]]
    saved = Program(whole, None).save()
    divided = Program(cut, None)
    divided.resume(saved)
    assert divided.hyperparameters() == Program(whole, None).hyperparameters()
    again = Program(whole, None)
    again.resume(divided.save())
    assert again.hyperparameters() == divided.hyperparameters()


def test_a_list_that_may_go_by_the_groups_is_refused_in_another_order() -> None:
    class Odd(StepLR):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(optimizer, 1)
            self.speeds = [group["lr"] for group in optimizer.param_groups]

    groups = [["0.weight"], ["0.bias"]]
    saved = Program(groups, lambda o, _: Odd(o)).save()
    Program(groups, lambda o, _: Odd(o)).resume(saved)
    with pytest.raises(MismatchError, match=r"\['schedule'\] keeps 'speeds', which may have"):
        Program(groups[::-1], lambda o, _: Odd(o)).resume(saved)


def test_a_parameter_that_no_registered_module_has_is_refused() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(3, 2)
    both = torch.optim.SGD([*model.parameters(), *other.parameters()])
    with pytest.raises(UsageError, match=r"optimizer trains a parameter of shape \(2, 3\)"):
        gather(model, both, {}, {})
    gather(model, both, {"other": other}, {})
    other.requires_grad_(False)
    gather(model, both, {}, {})


@pytest.mark.parametrize("kind", ["list", "object"])
def test_tensors_by_the_place_of_parameters_are_refused_in_another_order(kind: str) -> None:
    class Average:
        def __init__(self, model: nn.Module) -> None:
            self.shadow = [parameter.detach().clone() for parameter in model.parameters()]

        def state_dict(self) -> dict[str, Any]:
            return {"shadow": self.shadow}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.shadow = state["shadow"]

    def program(names: str) -> RegisteredObjects:
        model = nn.ModuleDict({name: nn.Linear(2, 2) for name in names})
        optimizer = torch.optim.SGD(model.parameters())
        average = Average(model)
        state = {"average": average if kind == "object" else average.shadow}
        return gather(model, optimizer, state, {"own": {}}).registered

    saved = pack(program("ab").shared, "state")
    take(unpack(saved, (same := program("ab").shared), "state", "there"), same)
    other = program("ba").shared
    with pytest.raises(MismatchError, match=r"\['average'\] has a list with a tensor for each"):
        take(unpack(saved, other, "state", "there"), other)


@pytest.mark.parametrize("several", [list, tuple, set, lambda parts: dict(enumerate(parts))])
def test_several_modules_want_a_name_each(several: Callable[[Any], Any]) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(UsageError, match=r"\['critics'\] is a \w+ of modules or optimizers"):
        gather(model, optimizer, {"critics": several([nn.Linear(2, 2), nn.Linear(2, 2)])}, {})


def test_lbfgs_is_refused_in_another_order() -> None:
    def program(order: int) -> RegisteredObjects:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.LBFGS([*model.parameters()][::order])
        return gather(model, optimizer, {}, {}).registered

    saved = pack(program(1).shared, "state")
    take(unpack(saved, (same := program(1).shared), "state", "there"), same)
    other = program(-1).shared
    with pytest.raises(MismatchError, match="optimizer keeps its state in the order"):
        take(unpack(saved, other, "state", "there"), other)
