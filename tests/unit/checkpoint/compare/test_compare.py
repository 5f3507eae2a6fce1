"""Two checkpoints of whatever kind are equal where they should be, and what differs is named."""

from __future__ import annotations

import json
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from saved import commit_state, small_state
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from kempner.checkpoint import compare
from kempner.checkpoint.compare import TensorDifference, difference
from kempner.checkpoint.convert.import_safetensors import TensorLocation
from kempner.cli.entry import main
from kempner.run.record.run_dir import RunDirectory

Captured = pytest.CaptureFixture[str]


def kempner(*arguments: str | Path | int) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        main([*map(str, arguments)])
    return left.value.code


def compared(capsys: Captured, *arguments: str | Path) -> tuple[int | str | None, dict[str, Any]]:
    """The exit code and the JSON, its tensors by their names."""
    capsys.readouterr()
    code = kempner("compare", *arguments, "--json")
    table = json.loads(capsys.readouterr().out)
    return code, {**table, "tensors": {pair["name"]: pair for pair in table["tensors"]}}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """The same state twice, cut for one rank and for three."""
    run = RunDirectory(tmp_path / "run")
    commit_state(run, small_state(), 10)
    commit_state(run, small_state(), 20, world=3)
    return run


def test_one_state_is_equal_to_the_bit_whatever_it_is_saved_as(
    run: RunDirectory, tmp_path: Path, capsys: Captured
) -> None:
    one, three = (run.checkpoints / f"step-{step:08}" for step in (10, 20))
    assert kempner("checkpoint", "export", three, "--format=dcp", "--out", tmp_path / "dcp") == 0
    assert kempner("checkpoint", "export", run.path, "--out", tmp_path / "hf") == 0
    sides = (run.path, three, tmp_path / "dcp", tmp_path / "hf")
    for a, b in ((one, side) for side in sides):
        capsys.readouterr()
        count = 2 if b == tmp_path / "hf" else 6
        assert kempner("compare", a, b) == 0
        assert capsys.readouterr().out == f"equal to the bit: {count} tensors\n"
        code, table = compared(capsys, b, a)
        assert (code, table["equal"], table["identical"]) == (0, True, True)
        assert len(table["tensors"]) == count
    assert kempner("compare", one, three, "--model-only") == 0
    assert capsys.readouterr().out == "equal to the bit: 2 tensors\n"


def test_a_model_of_hugging_face_is_equal_to_its_import(tmp_path: Path, capsys: Captured) -> None:
    """In bfloat16 and float32, under other names, with rows of no token beyond the vocabulary."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    config = Qwen3Config(**sizes, num_key_value_heads=2, intermediate_size=48, vocab_size=61)
    model: Any = AutoModelForCausalLM.from_config(config)
    hf, run = tmp_path / "hf", tmp_path / "run"
    model.bfloat16().save_pretrained(hf, max_shard_size="20KB")
    assert (
        kempner("checkpoint", "import", "--from-hf", hf, "--into", run, "--vocab-multiple=16") == 0
    )
    count = len(model.state_dict())
    for a, b in ((run, hf), (hf, run)):
        capsys.readouterr()
        assert kempner("compare", a, b) == 0
        assert capsys.readouterr().out == (
            f"equal: {count} equal after rounding to bfloat16, which changed none\n"
        )
    code, table = compared(capsys, hf, run)
    assert (code, table["equal"], table["identical"]) == (0, True, False)
    assert table["tensors"]["model.embed.weight"]["b"] == {"shape": [61, 32], "dtype": "float32"}
    assert table["tensors"]["model.embed.weight"]["difference"]["elements"] == 61 * 32
    assert (
        kempner("checkpoint", "export", run, "--to-hf", tmp_path / "out", "--dtype=bfloat16") == 0
    )
    capsys.readouterr()
    assert kempner("compare", hf, tmp_path / "out") == 0
    assert capsys.readouterr().out == f"equal to the bit: {count} tensors\n"


def test_a_flipped_bit_is_found_and_named(
    run: RunDirectory, tmp_path: Path, capsys: Captured
) -> None:
    assert kempner("checkpoint", "export", run.path, "--out", tmp_path / "hf") == 0
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    weight = tensors["first.weight"]
    before = float(weight[411, 77])
    weight.view(torch.int32)[411, 77] ^= 1 << 20
    apart = abs(before - float(weight[411, 77]))
    save_file(tensors, file)
    capsys.readouterr()
    assert kempner("compare", tmp_path / "hf", run.path) == 1
    line, summary = capsys.readouterr().out.splitlines()
    assert line.startswith("model.first.weight: 1 of 350,000 elements (float32), at most ")
    assert line.endswith("; the first at [411, 77]")
    assert summary == "different: 1 of 2 tensors; 1 equal to the bit"
    code, table = compared(capsys, tmp_path / "hf", run.path)
    found = table["tensors"]["model.first.weight"]
    assert (code, table["equal"], found["verdict"]) == (1, False, "different")
    assert found["difference"]["max_abs"] == apart > 0
    assert found["difference"]["max_rel"] == apart / max(abs(before), abs(float(weight[411, 77])))


def test_rounded_weights_are_equal_and_what_rounding_took_is_counted(
    run: RunDirectory, tmp_path: Path, capsys: Captured
) -> None:
    """Never skipped: a weight beyond the rounding is a difference."""
    assert (
        kempner("checkpoint", "export", run.path, "--out", tmp_path / "hf", "--dtype=bfloat16") == 0
    )
    weight = small_state()["model.first.weight"]
    rounded = int((weight.bfloat16().float() != weight).sum())
    assert rounded > 300_000
    capsys.readouterr()
    assert kempner("compare", run.path, tmp_path / "hf") == 0
    assert capsys.readouterr().out == (
        "equal: 1 equal to the bit; "
        f"1 equal after rounding to bfloat16, which changed {rounded:,} elements\n"
    )
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    tensors["first.weight"].view(torch.int16)[3, 2] += 1  # the least that bfloat16 can say
    save_file(tensors, file)
    assert kempner("compare", run.path, tmp_path / "hf") == 1
    assert "model.first.weight: 1 of 350,000 elements (float32 and bfloat16)" in (
        capsys.readouterr().out
    )


def test_names_shapes_and_dtypes_that_differ_are_told(
    run: RunDirectory, tmp_path: Path, capsys: Captured
) -> None:
    state = small_state()
    state["model.last.weight"] = state["model.last.weight"].int()
    state["model.first.weight"] = state["model.first.weight"][:-1]
    state["model.new.weight"] = state.pop("optimizer.last.weight.step")
    other = RunDirectory(tmp_path / "other")
    commit_state(other, state, 10)
    assert kempner("compare", run.path, other.path) == 1
    assert set(capsys.readouterr().out.splitlines()) == {
        "model.first.weight: float32 [700, 500] in A, float32 [699, 500] in B",
        "model.last.weight: bfloat16 [3, 700] in A, int32 [3, 700] in B",
        "optimizer.last.weight.step: only in A",
        "model.new.weight: only in B",
        "different: 4 of 7 tensors; 3 equal to the bit",
    }
    code, table = compared(capsys, run.path, other.path)
    assert code == 1
    for side in (run, other):  # has logged steps: their bits are compared, not the checkpoints'
        side.metrics.write_text('{"step": 1, "loss": 2.0, "attempt": 1}\n')
    capsys.readouterr()
    assert kempner("compare", run.path, other.path, "--json") == 2
    assert f"naming {run.checkpoints} and {other.checkpoints}\n" in capsys.readouterr().err
    assert kempner("compare", run.path, other.path) == 0
    assert compared(capsys, run.checkpoints, other.checkpoints)[1]["tensors"] == table["tensors"]
    assert {name: pair["verdict"] for name, pair in table["tensors"].items()} == {
        "model.first.weight": "shape",
        "model.last.weight": "dtype",
        "model.new.weight": "only in B",
        "optimizer.first.weight.exp_avg": "identical",
        "optimizer.first.weight.step": "identical",
        "optimizer.last.weight.exp_avg": "identical",
        "optimizer.last.weight.step": "only in A",
    }


def test_two_tensors_are_in_memory_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        tensors = {f"{n}.weight": torch.full((4, 4), float(n)) for n in range(9)}
        save_file(tensors, tmp_path / name / "model.safetensors")
    held: list[weakref.ref[Tensor]] = []
    most = 0
    read = TensorLocation.read

    def counted(located: TensorLocation) -> Tensor:
        nonlocal most
        tensor = read(located)
        held.append(weakref.ref(tensor))
        most = max(most, sum(ref() is not None for ref in held))
        return tensor

    monkeypatch.setattr(TensorLocation, "read", counted)
    assert kempner("compare", tmp_path / "a", tmp_path / "b") == 0
    assert (len(held), most) == (18, 2)
    own = RunDirectory(tmp_path / "own")
    commit_state(own, {f"model.{name}": tensor for name, tensor in tensors.items()}, 10)
    held.clear()
    most = 0
    assert kempner("compare", own.path, tmp_path / "b") == 0
    assert (len(held), most) == (9, 1)


INF, NAN = math.inf, math.nan
FLOAT, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
EIGHT, EIGHT_WIDE = torch.float8_e4m3fn, torch.float8_e5m2
ROWS = {
    "the same": ([1, 2], FLOAT, [1, 2], FLOAT, TensorDifference(2, "float32")),
    "signs of zero": ([0.0], FLOAT, [-0.0], FLOAT, TensorDifference(1, "float32", 1, first=(0,))),
    "the same NaN": ([NAN, 1], FLOAT, [NAN, 1], FLOAT, TensorDifference(2, "float32")),
    "no number": (
        *([1, NAN, 3, INF], FLOAT, [1, 2, 4, 5], FLOAT),
        TensorDifference(4, "float32", 3, 0, 1.0, 0.25, 2, (1,)),
    ),
    "NaN of two dtypes": ([NAN, 1], FLOAT, [NAN, 1], BRAIN, TensorDifference(2, "bfloat16")),
    "rounded": ([1.001, 2], FLOAT, [1, 2], BRAIN, TensorDifference(2, "bfloat16", rounded=1)),
    "beyond rounding": (
        *([1, 2], BRAIN, [1, 2.5], FLOAT),
        TensorDifference(2, "bfloat16", 1, 0, 0.5, 0.2, 0, (1,)),
    ),
    "neither holds the other": (
        *([1 + 2**-10], HALF, [1], BRAIN),
        TensorDifference(1, "bfloat16", rounded=1),
    ),
    "float8 and its source": (
        *([1.0625, 3], BRAIN, [1, 3], EIGHT),
        TensorDifference(2, "float8_e4m3fn", rounded=1),
    ),
    "two kinds of float8": (
        *([1.125, 4], EIGHT, [1, 5], EIGHT_WIDE),
        TensorDifference(2, "float8_e5m2", 1, 1, 1.0, 0.2, 0, (1,)),
    ),
    "as much mantissa and less range": (
        *([1, 2], EIGHT, [1, 2], torch.float8_e4m3fnuz),
        TensorDifference(2, "float8_e4m3fnuz"),
    ),
    "whole numbers": ([3, -4], torch.int64, [3, 4], torch.int64, TensorDifference(
        2, "int64", 1, 0, 8.0, 2.0, 0, (1,)
    )),
    "truths": ([True], torch.bool, [True], torch.bool, TensorDifference(1, "bool")),
    "complex": (
        *([1 + 1j, 3 + 4j], torch.complex128, [1 + 1j, 0], torch.complex128),
        TensorDifference(2, "complex128", 1, 0, 5.0, 1.0, 0, (1,)),
    ),
    "nothing": ([], FLOAT, [], FLOAT, TensorDifference(0, "float32")),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_the_rule_by_which_values_are_compared(name: str) -> None:
    a, dtype, b, other, expected = ROWS[name]
    one = torch.tensor(a, dtype=torch.float64 if not dtype.itemsize > 8 else dtype).to(dtype)
    two = torch.tensor(b, dtype=torch.float64 if not other.itemsize > 8 else other).to(other)
    assert difference(one, two) == expected


def test_pieces_make_the_same_of_a_tensor_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(5, 3, 7, generator=generator)
    b = torch.where(torch.rand(a.shape, generator=generator) < 0.1, a * 1.5, a)
    b[0] = a[0]
    whole = difference(a, b)
    monkeypatch.setattr(compare, "_SLAB_ELEMENTS", 4)
    assert difference(a, b) == whole
    different = (a != b).nonzero()
    assert (whole.different, whole.first) == (len(different), tuple(different[0].tolist()))
    assert whole.max_abs == float((a.double() - b.double()).abs().max())
    assert difference(torch.tensor(1.0), torch.tensor(2.0)).first == ()
