"""What is exported is what was saved, and only whole results appear."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from saved import commit_state, small_state
from torch import Tensor, nn

from kempner.checkpoint.convert import export, tensor_copy
from kempner.checkpoint.convert.tensor_copy import shard
from kempner.cli.entry import main
from kempner.model.initial_weights import initialise
from kempner.model.spec.shape import Shape
from kempner.model.transformer import Transformer
from kempner.run.record.run_dir import RunDirectory

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Captured = pytest.CaptureFixture[str]
FORMATS = ["dcp", "safetensors", "torch"]
SHAPE = {
    "dim": 8,
    "n_layers": 2,
    "n_heads": 2,
    "n_kv_heads": 1,
    "head_dim": 4,
    "ffn_dim": 12,
    "vocab_size": 11,
}


def kempner(*arguments: str | Path | int) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        main(["checkpoint", *map(str, arguments)])
    return left.value.code


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    commit_state(run, {key: tensor + 1 for key, tensor in small_state().items()}, 10)
    commit_state(run, small_state(), 20, world=3)
    return run


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "exports").mkdir()
    return tmp_path / "exports" / "new"


def flat(loaded: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    table = {f"model.{name}": tensor for name, tensor in loaded["model"].items()}
    for name, entries in loaded["optimizer"].items():
        for entry, tensor in entries.items():  # type: ignore[attr-defined]
            table[f"optimizer.{name}.{entry}"] = tensor
    return table


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("batch", [1, tensor_copy.BATCH_BYTES])
def test_torch_loads_its_file_as_plain_tensors(
    run: RunDirectory, out: Path, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_copy, "BATCH_BYTES", batch)
    assert kempner("export", run.path, "--format=torch", "--out", out) == 0
    loaded = torch.load(out, weights_only=True)
    assert_equal(flat(loaded), small_state())
    assert {name: loaded[name] for name in ("step", "cursor", "tokens")} == {
        "step": 20,
        "cursor": 160,
        "tokens": 1280,
    }
    assert all(type(tensor) is Tensor for tensor in loaded["model"].values())


def test_tensors_without_elements_and_names_with_dots(run: RunDirectory, out: Path) -> None:
    state = {
        "model.a.b": torch.zeros(0, 4),
        "model.a": torch.arange(5),
        "optimizer.a.b.step": torch.tensor(3.0),
        "optimizer.a.exp_avg": torch.ones(3, 2).to(torch.float8_e4m3fn),
    }
    commit_state(run, state, 30)
    assert kempner("export", run.path, "--format=torch", "--out", out) == 0
    found = flat(torch.load(out, weights_only=True))
    assert_equal({k: t.float() for k, t in found.items()}, {k: t.float() for k, t in state.items()})


@pytest.mark.parametrize("largest", [export.SHARD_BYTES, 1_000_000, 1])
def test_safetensors_are_what_its_library_reads(
    run: RunDirectory, out: Path, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "SHARD_BYTES", largest)
    assert kempner("export", run.path, "--format=safetensors", "--out", out) == 0
    files = sorted(out.glob("*.safetensors"))
    loaded = {name: (tensor, path) for path in files for name, tensor in load_file(path).items()}
    weights = {
        key.removeprefix("model."): tensor
        for key, tensor in small_state().items()
        if key.startswith("model.")
    }
    assert_equal({name: tensor for name, (tensor, _) in loaded.items()}, weights)
    if largest == export.SHARD_BYTES and len(files) == 1:
        assert sorted(p.name for p in out.iterdir()) == ["README.md", "model.safetensors"]
        return
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: path.name for name, (_, path) in loaded.items()}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights.values())
    assert [path.name for path in files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_shards_are_as_few_as_fit() -> None:
    tensors = {
        str(n): tensor_copy.Saved((size,), "uint8") for n, size in enumerate([5, 5, 1, 20, 2])
    }
    assert [list(each) for each in shard(tensors, 10)] == [["0", "1"], ["2"], ["3"], ["4"]]


@pytest.mark.parametrize("tied", [False, True])
def test_kempner_s_own_model_gets_hugging_face_s_names(
    run: RunDirectory, out: Path, tied: bool
) -> None:
    rest = {"rope_theta": 1e4, "norm_eps": 1e-5, "tie_embeddings": tied}
    shape = Shape(**SHAPE, **rest, max_seq_len=16, dropout=0.0)  # type: ignore[arg-type]
    model = Transformer(shape)
    initialise(model, seed=0)
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    commit_state(run, state, 30, world=2, model={**SHAPE, **rest})
    assert kempner("export", run.path, "--format=safetensors", "--out", out) == 0
    loaded = load_file(out / "model.safetensors")
    assert len(loaded) == len(state)
    attention = model.layers[1].attention
    assert isinstance(attention.wk, nn.Linear)
    assert torch.equal(loaded["model.layers.1.self_attn.k_proj.weight"], attention.wk.weight)
    assert torch.equal(loaded["model.embed_tokens.weight"], model.embed.weight)
    assert ("lm_head.weight" in loaded) is not tied
    config = json.loads((out / "config.json").read_text())
    assert config["tie_word_embeddings"] is tied
    assert (config["hidden_size"], config["num_key_value_heads"]) == (8, 1)


def test_the_stock_reader_loads_the_plain_folder(run: RunDirectory, out: Path) -> None:
    assert kempner("export", run.path, "--format=dcp", "--out", out, "--step=20") == 0
    assert sorted(path.name for path in out.iterdir()) == [
        ".metadata",
        *(f"__{rank}_0.distcp" for rank in range(3)),
    ]
    loaded = {key: torch.zeros_like(tensor) for key, tensor in small_state().items()}
    dcp.load(loaded, checkpoint_id=out, no_dist=True)
    assert_equal(loaded, small_state())


@pytest.mark.parametrize(
    "where", ["checkpoints", "checkpoints/latest", "checkpoints/step-00000020"]
)
def test_any_way_to_name_a_checkpoint_will_do(run: RunDirectory, out: Path, where: str) -> None:
    assert kempner("export", run.path / where, "--format=torch", "--out", out) == 0
    assert torch.load(out, weights_only=True)["step"] == 20


def test_a_step_is_chosen(run: RunDirectory, out: Path) -> None:
    assert kempner("export", run.path, "--format=torch", "--out", out, "--step", 10) == 0
    loaded = torch.load(out, weights_only=True)
    assert loaded["step"] == 10
    assert torch.equal(loaded["model"]["last.weight"], small_state()["model.last.weight"] + 1)


@pytest.mark.parametrize("format_", FORMATS)
def test_damage_is_named_and_leaves_nothing(
    run: RunDirectory, out: Path, format_: str, capsys: Captured
) -> None:
    damaged = run.checkpoints / "step-00000020" / "__2_0.distcp"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    assert kempner("export", run.path, f"--format={format_}", "--out", out) == 65
    said = capsys.readouterr().err
    assert "__2_0.distcp: block 0 (from byte 0) does not match its checksum" in said
    assert said.count("\n") == 1
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("format_", FORMATS)
def test_nothing_is_overwritten(
    run: RunDirectory, out: Path, format_: str, capsys: Captured
) -> None:
    out.symlink_to("nowhere")
    assert kempner("export", run.path, f"--format={format_}", "--out", out) == 2
    assert f"{out} exists already" in capsys.readouterr().err
    assert [path.name for path in out.parent.iterdir()] == ["new"]


def test_missing_folders_are_made_and_go_again_with_a_failure(
    run: RunDirectory, tmp_path: Path, capsys: Captured
) -> None:
    flat, deep = tmp_path / "file", tmp_path / "a" / "b" / "new"
    flat.write_text("")
    assert kempner("export", run.path, "--format=torch", "--out", flat / "new") == 2
    assert f"{flat} is not a folder, so {flat}/new cannot be in it" in capsys.readouterr().err
    damaged = run.checkpoints / "step-00000020" / "__2_0.distcp"
    content = damaged.read_bytes()
    damaged.write_bytes(b"x" * len(content))
    assert kempner("export", run.path, "--format=torch", "--out", deep) == 65
    assert not (tmp_path / "a").exists()
    damaged.write_bytes(content)
    assert kempner("export", run.path, "--format=torch", "--out", deep) == 0
    assert deep.is_file()


@pytest.mark.parametrize("format_", FORMATS)
def test_a_full_disk_is_told_and_leaves_nothing(
    run: RunDirectory, small_disk: Path, format_: str, capsys: Captured
) -> None:
    with open(small_disk / "ballast", "wb") as ballast:
        ballast.write(b"\1" * (3 << 20))
    assert kempner("export", run.path, f"--format={format_}", "--out", small_disk / "new") == 74
    assert "new cannot be written: No space left on device" in capsys.readouterr().err
    assert [path.name for path in small_disk.iterdir()] == ["ballast"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--format=torch", "--step=15"], "step 15 is not committed in"),
        (["--format=gguf"], "gguf"),
        (["--format=torch", "--data=x"], "--data has no effect with --format torch"),
    ],
)
def test_what_cannot_be_exported_is_said_in_a_sentence(
    run: RunDirectory, out: Path, arguments: list[str], words: str, capsys: Captured
) -> None:
    assert kempner("export", run.path, *arguments, "--out", out) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
