"""A checkpoint of the stock writer becomes one of ours, or is refused in a sentence."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from saved import small_state
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from kempner.checkpoint.convert.import_dcp import fit
from kempner.checkpoint.convert.tensor_copy import Source
from kempner.checkpoint.format.manifest import TrainState, read
from kempner.checkpoint.format.names import CheckpointFolder
from kempner.checkpoint.io.verify import verify
from kempner.cli.entry import main
from kempner.run.process.exit_codes import DataError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Captured = pytest.CaptureFixture[str]


def kempner(*arguments: str | Path | int) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        main(["checkpoint", *map(str, arguments)])
    return left.value.code


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 5), nn.Conv2d(2, 3, 2))
    model[1].to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(model.parameters())
    (model[0](torch.randn(3, 6)).sum() + model[1](torch.randn(1, 2, 4, 4)).sum()).backward()
    optimizer.step()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    table = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for entry, tensor in optimizer.state[parameter].items():
            table[f"optimizer.{name}.{entry}"] = tensor
    return table


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    source = Source.open(checkpoint)
    return dict(source.read(source.contents.tensors))


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    """A checkpoint of `small_state`."""
    dcp.save(nested(small_state()), checkpoint_id=tmp_path / "stock", no_dist=True)
    return tmp_path / "stock"


@pytest.fixture
def into(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "new"


def nested(state: dict[str, Tensor]) -> dict[str, Any]:
    table: dict[str, Any] = {"model": {}, "optimizer": {}}
    for key, tensor in state.items():
        kind, _, name = key.partition(".")
        table[kind][name] = tensor
    return table


@pytest.mark.parametrize(
    "arrange",
    [
        lambda model, optimizer: {"model": model, "optimizer": optimizer},
        lambda model, optimizer: {"model": model, "optim": optimizer, "scheduler": {"last": 3}},
        lambda model, optimizer: {
            "app": {"model": model, "optim": optimizer},
            "rng": torch.ones(2),
        },
    ],
)
@pytest.mark.parametrize("flat", [True, False])
def test_what_dcp_saves_is_committed_bit_for_bit(
    tmp_path: Path, into: Path, arrange: Callable[..., dict[str, Any]], flat: bool
) -> None:
    model, optimizer = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    states = get_state_dict(model, optimizer, options=options)
    dcp.save(arrange(*states), checkpoint_id=tmp_path / "stock", no_dist=True)
    arguments = ("--into", into, "--step", 7, "--cursor", 56)
    assert kempner("import", tmp_path / "stock", *arguments) == 0
    folder = CheckpointFolder(into / "checkpoints")
    assert folder.latest() == 7
    assert verify(folder.step(7)) == []
    manifest = read(folder.step(7))
    assert (manifest.train_state, manifest.identity.optimizer) == (TrainState(7, 56), "adamw")
    found, expected = tensors_of(folder.step(7)), state_of(model, optimizer)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    loaded = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
    dcp.load(loaded, checkpoint_id=folder.step(7), no_dist=True)
    assert all(torch.equal(loaded[key], tensor) for key, tensor in expected.items())


def test_what_is_left_out_is_said(tmp_path: Path, into: Path, capsys: Captured) -> None:
    stock = tmp_path / "stock"
    extra = {**nested(small_state()), "loader": {"position": 3}, "rng": torch.ones(3)}
    dcp.save(extra, checkpoint_id=stock, no_dist=True)
    assert kempner("import", stock, "--into", into) == 0
    assert read(into / "checkpoints" / "latest").identity.optimizer is None
    said = capsys.readouterr().out
    assert f"{into}/checkpoints/step-00000000: committed, 6 tensors, step 0, cursor 0\n" in said
    assert "not imported, because a run creates it: loader.position, rng\n" in said
    assert "this one begins with step 0 and the first sample, unless --step and" in said


@pytest.mark.parametrize(
    ("tensors", "others", "names"),
    [
        (["model.a", "optim.state.a.exp_avg"], [], ["model.a", "optimizer.a.exp_avg"]),
        (["model.state.a", "optimizer.state.a.m"], [], ["model.state.a", "optimizer.state.a.m"]),
        (["x.model._orig_mod.a"], ["y"], ["model.a"]),
        (["model.l._checkpoint_wrapped_module.w"], [], ["model.l.w"]),
    ],
)
def test_names_that_fit(tensors: list[str], others: list[str], names: list[str]) -> None:
    found = fit(tensors, others)
    assert list(found.names.values()) == names
    assert list(found.names) == tensors
    assert found.left_out == tuple(others)


@pytest.mark.parametrize(
    ("tensors", "others", "words"),
    [
        (["embed.weight"], [], "no keys model.<parameter>, but embed.weight; save"),
        ([], [], "but none; save"),
        (["a.model.x", "b.model.x"], [], "no keys model"),
        (["model.a", *(f"optimizer.state.{n}.m" for n in range(9))], [], "0.m, .* and 6 more can"),
        (["model.a"], ["model.a._extra_state"], "model.a._extra_state cannot be imported"),
        (["model.a"], ["optimizer.state.a.step"], "optimizer.state.a.step cannot"),
        (["model.a", "optim.a.m", "optim.state.a.m"], [], "optim.state.a.m cannot"),
    ],
)
def test_names_that_do_not_fit(tensors: list[str], others: list[str], words: str) -> None:
    with pytest.raises(DataError, match=words):
        fit(tensors, others)


def test_a_run_that_has_a_checkpoint_gets_no_other(
    stock: Path, into: Path, capsys: Captured
) -> None:
    """Not even if `latest` is gone."""
    assert kempner("import", stock, "--into", into, "--step", 5) == 0
    latest = into / "checkpoints" / "latest"
    for prepare in (lambda: None, latest.unlink):
        prepare()
        before = sorted(into.rglob("*"))
        for where in (into, into / "checkpoints"):
            assert kempner("import", stock, "--into", where, "--step", 9) == 2
            said = capsys.readouterr().err
            assert "has checkpoints already; import into a run that has none" in said
        assert sorted(into.rglob("*")) == before


def damage_metadata(stock: Path, change: Callable[[Any], None]) -> None:
    metadata = FileSystemReader(stock).read_metadata()
    change(metadata)
    (stock / ".metadata").write_bytes(pickle.dumps(metadata))


def lose_a_chunk(metadata: Any) -> None:
    metadata.state_dict_metadata["model.first.weight"].chunks.clear()


def point_elsewhere(metadata: Any) -> None:
    for stored in metadata.storage_data.values():
        stored.relative_path = "../elsewhere"


def swap_places(metadata: Any) -> None:
    places = list(metadata.storage_data.values())
    for stored in places:
        stored.offset, stored.length = places[0].offset, places[0].length


def cut_lengths(metadata: Any) -> None:
    for stored in metadata.storage_data.values():
        stored.length //= 2


def say_compressed(metadata: Any) -> None:
    for stored in metadata.storage_data.values():
        stored.transform_descriptors = ["zstd"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lose_a_chunk, "model.first.weight does not have all of its elements"),
        (point_elsewhere, "is not stored in this folder"),
        (swap_places, "does not have the expected dtype and shape"),
        (cut_lengths, "is refused: it is not a plain tensor"),
        (say_compressed, "is compressed or encrypted"),
    ],
)
def test_a_source_that_contradicts_itself_leaves_nothing(
    stock: Path, into: Path, change: Callable[[Any], None], words: str, capsys: Captured
) -> None:
    damage_metadata(stock, change)
    assert kempner("import", stock, "--into", into) == 65
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert list((into / "checkpoints").iterdir()) == []


class Runs:
    """Pickles as a call of its function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def test_a_container_that_runs_something_is_refused(
    stock: Path, into: Path, tmp_path: Path, capsys: Captured
) -> None:
    mark = tmp_path / "executed"
    attack = io.BytesIO()
    torch.save(Runs(os.mkdir, str(mark)), attack)

    def point_at_attack(metadata: Any) -> None:
        for stored in metadata.storage_data.values():
            stored.relative_path, stored.offset = "__9_0.distcp", 0
            stored.length = len(attack.getvalue())

    (stock / "__9_0.distcp").write_bytes(attack.getvalue())
    damage_metadata(stock, point_at_attack)
    assert kempner("import", stock, "--into", into) == 65
    assert "is refused: it is not a plain tensor" in capsys.readouterr().err
    (stock / ".metadata").write_bytes(pickle.dumps(Runs(os.mkdir, str(mark))))
    assert kempner("import", stock, "--into", into) == 65
    assert "is not allowed there" in capsys.readouterr().err
    assert not mark.exists()


def test_what_is_no_checkpoint_is_said(tmp_path: Path, into: Path, capsys: Captured) -> None:
    assert kempner("import", tmp_path, "--into", into) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path}/.metadata cannot be read: No such file or directory; name" in said
    assert not into.exists()


def test_a_full_disk_is_told_and_leaves_nothing(
    stock: Path, small_disk: Path, capsys: Captured
) -> None:
    with open(small_disk / "ballast", "wb") as ballast:
        ballast.write(b"\1" * (3 << 20))
    assert kempner("import", stock, "--into", small_disk / "run") == 74
    assert "cannot be written: No space left on device" in capsys.readouterr().err
    assert list((small_disk / "run" / "checkpoints").iterdir()) == []
