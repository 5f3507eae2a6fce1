"""What is registered beside model and optimizer: written, read, or refused in a sentence."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from kempner.checkpoint.context import CheckpointContext
from kempner.checkpoint.format.manifest import Identity, TrainState
from kempner.checkpoint.format.names import SHARED_OBJECTS, objects_file
from kempner.checkpoint.io.verify import verify
from kempner.checkpoint.manager import CheckpointEngine
from kempner.checkpoint.registered.groups import gather
from kempner.checkpoint.registered.objects import decode, encode
from kempner.checkpoint.store.retention import Keep
from kempner.data.serve.sampler import ResumableBatchSampler
from kempner.run.process.exit_codes import DataError, MismatchError, UsageError
from kempner.run.record.attempts import Fence, begin_attempt
from kempner.run.record.run_dir import RunDirectory


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def open_checkpoints(
    folder: Path,
    state: Mapping[str, object],
    per_rank: Mapping[str, object] | None = None,
    world: int = 1,
) -> CheckpointEngine:
    """In a new attempt of the run in `folder`, with a model of its own."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = RunDirectory(folder)
    identity, fence = Identity(world, {}, 0, "", {}), Fence(run.attempts, begin_attempt(run))
    context = CheckpointContext(run.checkpoints, identity, fence, dist.group.WORLD)
    every = gather(model, optimizer, state, per_rank or {})
    return CheckpointEngine(
        context, every.model, every.optimizer, keep=Keep(2), registered=every.registered
    )


def data_of(samples: int) -> ResumableBatchSampler:
    return ResumableBatchSampler(range(samples), 2, seed=1)


def save(folder: Path, step: int, state: Mapping[str, object], **more: Any) -> None:
    checkpoints = open_checkpoints(folder, state, **more)
    checkpoints.restore()
    checkpoints.save(TrainState(step))
    checkpoints.close()


def test_what_is_written_is_read_with_its_types() -> None:
    value = {
        "numbers": [1, 2.5, True, None, 3 + 4j, np.float32(0.1), np.int64(-7)],
        "words": ("a", b"b"),
        7: {"tensor": torch.arange(6).view(2, 3), "bfloat16": torch.ones(2, dtype=torch.bfloat16)},
        "array": np.arange(6, dtype=np.uint16).reshape(2, 3),
        "set": {3, 1},
        "last": deque([1, 2], maxlen=2),
        "kempner:kind": "a user's own key",
    }
    again = decode(encode(value, "value"), "here")
    assert repr(again) == repr(value)
    assert [type(number) for number in again["numbers"]] == [type(n) for n in value["numbers"]]
    assert again["last"].maxlen == 2
    with pytest.raises(DataError, match="here cannot be read"):
        decode(encode(value, "value")[:100], "here")


@pytest.mark.usefixtures("one_rank")
def test_a_state_goes_on_changing_and_the_checkpoint_does_not(tmp_path: Path) -> None:
    best, order = {"loss": 1.0}, [1]
    checkpoints = open_checkpoints(tmp_path, {"best": best}, {"order": order})
    checkpoints.restore()
    checkpoints.save(TrainState(1))
    best["loss"], order[:] = 0.5, [2, 3]
    checkpoints.close()
    assert verify(tmp_path / "checkpoints" / "step-00000001") == []
    assert open_checkpoints(tmp_path, {"best": best}, {"order": order}).restore() is not None
    assert (best, order) == ({"loss": 1.0}, [1])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("file", [SHARED_OBJECTS, objects_file(0)])
def test_one_flipped_bit_in_it_and_the_one_before_is_taken(tmp_path: Path, file: str) -> None:
    for step in (1, 2):
        save(tmp_path, step, {"best": {"step": step}}, per_rank={"order": [step]})
    damaged = tmp_path / "checkpoints" / "step-00000002" / file
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    best: dict[str, int] = {}
    train_state = open_checkpoints(tmp_path, {"best": best}, {"order": []}).restore()
    assert train_state is not None
    assert (train_state.step, best) == (1, {"step": 1})


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("saved", "now", "sentence"),
    [
        ({"best": {}}, {"other": {}}, "register the same names, or begin a new run"),
        ({"best": {}}, {}, "register the same names, or begin a new run"),
        ({}, {"best": {}}, "register the same names, or begin a new run"),
        ({"place": data_of(10)}, {"place": data_of(11)}, "give the sampler the same data and seed"),
    ],
)
def test_what_does_not_fit_is_refused_and_no_damage(
    tmp_path: Path, saved: dict[str, object], now: dict[str, object], sentence: str
) -> None:
    save(tmp_path, 1, saved)
    with pytest.raises(MismatchError, match=sentence):
        open_checkpoints(tmp_path, now).restore()
    assert [p.name for p in (tmp_path / "checkpoints").glob("step*")] == ["step-00000001"]


@pytest.mark.usefixtures("one_rank")
def test_what_differs_on_each_rank_wants_as_many_ranks_again(tmp_path: Path) -> None:
    save(tmp_path, 1, {}, per_rank={"order": [1]}, world=2)
    with pytest.raises(MismatchError, match=r"was saved by 2 ranks .* this run has 1"):
        open_checkpoints(tmp_path, {}, {"order": []}).restore()


def test_one_parameter_has_one_optimizer() -> None:
    model = nn.Linear(2, 2)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    with pytest.raises(UsageError, match="two optimizers have the same parameter"):
        gather(model, first, {"second": second}, {})
