"""What a rank of a rehearsal looks at: the program's variables, and what it does elsewhere."""

from __future__ import annotations

import os
import random
import sys
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from kempner.run.control.rehearsal import RehearsalPart, place_of
from kempner.training.rehearsal.recorder import (
    ExternalAccess,
    Seen,
    Walk,
    look,
    of_rows,
    of_state,
    of_tensor,
)
from kempner.training.rehearsal.switch import recorder


class Task:
    """An object of the program."""

    seen = 0

    def __init__(self) -> None:
        self.best = 3.5
        self.norms = [1.0, 2.0]


def seen_of(**variables: object) -> dict[str, Seen]:
    walk = Walk()
    walk.all_of("", variables)
    return walk.found


CHANGES = {
    "a number": (lambda: {"x": 1.0}, lambda it: it.update(x=2.0)),
    "a list": (lambda: {"x": [1, 2]}, lambda it: it["x"].append(3)),
    "a list of tensors": (lambda: {"x": [torch.zeros(2)]}, lambda it: it["x"][0].add_(1)),
    "a deque": (lambda: {"x": deque([1])}, lambda it: it["x"].append(1)),
    "a dict": (lambda: {"x": {"a": 1}}, lambda it: it["x"].update(b=2)),
    "a tensor": (lambda: {"x": torch.zeros(3)}, lambda it: it["x"].add_(1)),
    "an array": (lambda: {"x": np.zeros(3)}, lambda it: it["x"].__iadd__(1)),
    "torch's generator": (
        lambda: {"x": torch.Generator()},
        lambda it: torch.rand(1, generator=it["x"]),
    ),
    "NumPy's generator": (lambda: {"x": np.random.default_rng(1)}, lambda it: it["x"].random()),
    "Python's generator": (lambda: {"x": random.Random(1)}, lambda it: it["x"].random()),
    "an attribute": (lambda: {"x": Task()}, lambda it: it["x"].norms.append(3.0)),
    "an attribute of its class": (lambda: {"x": Task()}, lambda it: setattr(it["x"], "seen", 1)),
    "a weight": (lambda: {"x": nn.Linear(2, 2)}, lambda it: it["x"].weight.data.add_(1)),
    "a buffer": (lambda: {"x": nn.BatchNorm1d(2)}, lambda it: it["x"](torch.randn(4, 2))),
    "a late buffer": (
        lambda: {"x": nn.Linear(2, 2)},
        lambda it: it["x"].register_buffer("late", torch.zeros(1)),
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_whatever_changes_is_seen_and_what_does_not_is_the_same(what: str) -> None:
    make, change = CHANGES[what]
    variables = make()
    before = seen_of(**variables)

    assert before
    assert seen_of(**variables) == before
    change(variables)
    assert seen_of(**variables) != before


def test_the_variables_of_functions_that_wait_are_seen_by_their_names() -> None:
    task, model = Task(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    found = look(sys._getframe())

    assert found.found["task.best"] == ("value", repr(task.best), "3.5")
    assert found.found["model.weight"][0] == "weight"
    assert found.found["optimizer.param_groups"][2] == "0.5"
    assert found.names[id(optimizer)] == "optimizer"
    assert __file__ in found.files


def test_an_object_that_leads_to_itself_ends() -> None:
    task = Task()
    task.own = task  # type: ignore[attr-defined]

    assert seen_of(task=task)["task.best"][0] == "value"


def test_digests_follow_the_bits() -> None:
    x = torch.tensor([[0.0, 1.0], [0.0, 1.0]])

    assert of_rows(x)[0] == of_rows(x)[1]
    assert of_tensor(torch.tensor(0.0)) != of_tensor(torch.tensor(-0.0))
    assert of_tensor(x) != of_tensor(x.flatten())
    assert of_tensor(x.t().contiguous()) == of_tensor(x.t())
    assert of_tensor(x.bfloat16()) != of_tensor(x)
    assert of_state({"a": [x, 1]}) != of_state({"a": [x, 2]})


def test_files_and_hosts_outside_of_the_run_are_named(tmp_path: Path) -> None:
    outside = ExternalAccess(tmp_path / "scratch")

    for path, flags in (("told.txt", os.O_WRONLY), ("scratch/x", os.O_WRONLY), ("in.txt", 0)):
        outside._hear("open", (str(tmp_path / path), None, flags))
    outside._hear("open", (str(tmp_path), None, os.O_RDWR | os.O_TMPFILE))
    outside._hear("socket.connect", (None, ("127.0.0.1", 1)))
    outside._hear("socket.connect", (None, ("10.0.0.7", 443)))

    assert list(outside.written) == [str(tmp_path / "told.txt")]
    assert list(outside.read) == [str(tmp_path / "in.txt")]
    assert list(outside.called) == ["10.0.0.7:443"]


def test_a_rank_of_a_rehearsal_has_a_run_of_its_own() -> None:
    environ = RehearsalPart("/scratch/part", "/scratch/run", at=3).environment()

    assert RehearsalPart.from_environment(environ) == RehearsalPart(
        "/scratch/part", "/scratch/run", at=3
    )
    assert place_of("runs/real", environ) == Path("/scratch/run/runs-real")
    assert place_of("/data/../runs/real", environ).is_relative_to("/scratch/run")
    assert place_of("runs/real", {}) == Path("runs/real")


def test_without_a_rehearsal_nothing_is_recorded() -> None:
    assert recorder() is None
