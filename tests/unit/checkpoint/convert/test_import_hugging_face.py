"""A model of Hugging Face becomes a run's first checkpoint, and comes out again as it was."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli
import torch
from patience import scaled
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from kempner.checkpoint.convert import export
from kempner.checkpoint.format.manifest import TrainState, read
from kempner.checkpoint.format.names import CheckpointFolder
from kempner.checkpoint.io.verify import verify
from kempner.cli.checkpoint import trained_on
from kempner.cli.entry import main
from kempner.config.model import ModelSection
from kempner.model.spec.shape import Shape
from kempner.model.transformer import Transformer

Captured = pytest.CaptureFixture[str]

SIZES = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 48, "vocab_size": 61, "max_position_embeddings": 256},
}
SCALED = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama 2": lambda: LlamaConfig(**SIZES, num_key_value_heads=4, rms_norm_eps=1e-5),
    "llama 3": lambda: LlamaConfig(**SIZES, num_key_value_heads=2, rope_theta=5e5),
    "llama 3.1": lambda: LlamaConfig(
        **SIZES, num_key_value_heads=2, rope_theta=5e5, rope_scaling=SCALED
    ),
    "llama 3.2": lambda: LlamaConfig(
        **SIZES, num_key_value_heads=1, rope_scaling=SCALED, tie_word_embeddings=True
    ),
    "qwen 3": lambda: Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16, rope_theta=1e6),
    "qwen 3, tied": lambda: Qwen3Config(
        **SIZES, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True
    ),
}
TOKENS = torch.randint(0, 61, (2, 96), generator=torch.Generator().manual_seed(4))


def kempner(*arguments: str | Path | int) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        main(["checkpoint", *map(str, arguments)])
    return left.value.code


def make(folder: Path, family: str, dtype: torch.dtype = torch.float32) -> None:
    """A random model of a family, saved in several files."""
    torch.manual_seed(2)
    model: Any = AutoModelForCausalLM.from_config(FAMILIES[family]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
    model.to(dtype).save_pretrained(folder, max_shard_size="20KB")
    return model


def weights(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def loaded(checkpoint: Path) -> Transformer:
    manifest = read(checkpoint)
    shape = Shape.recorded(manifest.identity.model, max_seq_len=256)
    return trained_on.load_model(checkpoint, manifest, shape, "float32", torch.device("cpu"))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_comes_in_computes_the_same_and_goes_out_bit_for_bit(
    tmp_path: Path, family: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = torch.bfloat16 if family in ("llama 3.1", "qwen 3") else torch.float32
    make(tmp_path / "hf", family, dtype)
    name = str(dtype).removeprefix("torch.")
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    run = tmp_path / "runs" / "new"
    assert kempner("import", tmp_path / "hf", "--into", run) == 0
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    assert CheckpointFolder(run / "checkpoints").latest() == 0
    assert verify(checkpoint) == []
    assert read(checkpoint).train_state == TrainState(0, 0)

    said = tomli.loads(capsys.readouterr().out.partition("its run needs\n")[2])["model"]
    section = ModelSection.model_validate(said)
    assert Shape.of(section, said["vocab_size"]).fixed() == read(checkpoint).identity.model
    assert section.max_seq_len == 256

    with torch.no_grad():
        expected = theirs(TOKENS).logits
        torch.testing.assert_close(loaded(checkpoint)(TOKENS), expected, rtol=1e-4, atol=2e-4)

    monkeypatch.setattr(export, "SHARD_BYTES", 20_000)
    out = tmp_path / "out"
    assert kempner("export", run, "--out", out, "--dtype", name) == 0
    before, after = weights(tmp_path / "hf"), weights(out)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert (tensor.dtype, after[key].dtype) == (dtype, dtype)
        assert torch.equal(tensor, after[key]), key
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == before.keys()
    again: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert type(again) is type(theirs)
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, expected)
    ours, first = again.config.to_dict(), theirs.config.to_dict()
    assert ours["rope_parameters"] == first["rope_parameters"]
    assert ours["head_dim"] == first["head_dim"]


def test_padding_rows_are_zeros_that_no_export_has(tmp_path: Path) -> None:
    make(tmp_path / "hf", "llama 3")
    into = ("--into", tmp_path / "run", "--vocab-multiple", 16)
    assert kempner("import", tmp_path / "hf", *into) == 0
    model = loaded(tmp_path / "run" / "checkpoints" / "step-00000000")
    assert model.embed.weight.shape == (64, 32)
    assert model.embed.weight[61:].abs().max() == 0
    assert model(TOKENS).shape == (2, 96, 61)
    assert kempner("export", tmp_path / "run", "--out", tmp_path / "out") == 0
    before, after = weights(tmp_path / "hf"), weights(tmp_path / "out")
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())


def test_a_tokenizer_and_what_goes_with_it_are_copied(tmp_path: Path, capsys: Captured) -> None:
    make(tmp_path / "hf", "qwen 3")
    assert kempner("import", tmp_path / "hf", "--into", tmp_path / "run") == 0
    out = ("--out", tmp_path / "out", "--tokenizer", tmp_path / "hf")
    assert kempner("export", tmp_path / "run", *out) == 65
    assert "has no tokenizer.json" in capsys.readouterr().err
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "hf" / name).write_text(f'{{"of": "{name}"}}')
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config |= {"eos_token_id": 60, "max_position_embeddings": 99}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    assert kempner("export", tmp_path / "run", *out) == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_text() == f'{{"of": "{name}"}}'
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["eos_token_id"], written["max_position_embeddings"]) == (60, 99)
    assert capsys.readouterr().err == ""


def edit_config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def edit_weights(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        table = weights(folder)
        change(table)
        for file in folder.glob("model*"):
            file.unlink()
        save_file(table, folder / "model.safetensors")

    return rewrite


def cut_off(folder: Path) -> None:
    file = min(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-5])


def lose_a_file(folder: Path) -> None:
    min(folder.glob("*.safetensors")).unlink()


def no_weights(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()


def point_outside(folder: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("spoil", "code", "sentence"),
    [
        (edit_config(architectures=["MistralForCausalLM"]), 65, "the architecture Mistral"),
        (edit_config(architectures=None), 65, "the architecture of nothing"),
        (edit_config(attention_bias=True), 65, "sets attention_bias"),
        (edit_config(hidden_act="gelu"), 65, "has hidden_act gelu"),
        (edit_config(quantization_config={"bits": 4}), 65, "sets quantization_config"),
        (edit_config(rope_parameters={"rope_type": "yarn"}), 65, "scaled by the rule yarn"),
        (edit_config(hidden_size=None), 65, "config.json has no hidden_size"),
        (edit_config(num_attention_heads="four"), 65, "make no sense: n_heads"),
        (edit_config(vocab_size=62), 65, "by config.json it must be [62, 32]"),
        (lambda folder: (folder / "config.json").write_text("{"), 65, "it is not JSON"),
        (edit_weights(lambda table: table.pop(K_PROJ)), 65, f"has no {K_PROJ}"),
        (edit_weights(lambda t: t.update(bias=torch.ones(2))), 65, "has bias, which kempner's"),
        (edit_weights(lambda t: t.update({K_PROJ: t[K_PROJ].int()})), 65, "is int32"),
        (cut_off, 65, "damaged or cut off"),
        (lose_a_file, 2, "cannot be read: No such file"),
        (no_weights, 2, "cannot be read: No such file"),
        (point_outside, 65, "does not say where the weights are"),
    ],
)
def test_what_is_another_model_or_damaged_is_refused_in_a_sentence(
    tmp_path: Path,
    capsys: Captured,
    spoil: Callable[[Path], object],
    code: int,
    sentence: str,
) -> None:
    make(tmp_path / "hf", "llama 3")
    spoil(tmp_path / "hf")
    capsys.readouterr()
    assert kempner("import", tmp_path / "hf", "--into", tmp_path / "run") == code
    told = capsys.readouterr().err
    assert sentence in told
    assert told.count("\n") == 1
    assert not (tmp_path / "run").exists()


MEASURED = """
import resource, sys
from kempner.cli.entry import main
try:
    main(["checkpoint", *sys.argv[1:]])
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


def peak(*arguments: str | Path) -> int:
    """The most memory that a command needs at once, bytes."""
    command = [sys.executable, "-c", MEASURED, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(120), check=False)
    assert done.returncode == 0, done.stderr
    return 1024 * int(done.stderr.split()[-1])


def write_zeros(folder: Path, layers: int) -> int:
    """A llama of zeros, in one file with holes; the bytes of its weights as float32."""
    folder.mkdir()
    wide = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8}
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers, **wide}
    config |= {"vocab_size": 512, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens": (512, 1024), "model.norm": (1024,), "lm_head": (512, 1024)}
    for n in range(layers):
        shapes |= {f"model.layers.{n}.self_attn.{x}_proj": (1024, 1024) for x in "qkvo"}
        shapes |= {f"model.layers.{n}.mlp.{x}_proj": (2048, 1024) for x in ("gate", "up")}
        shapes[f"model.layers.{n}.mlp.down_proj"] = (1024, 2048)
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= {f"model.layers.{n}.{x}": (1024,) for x in norms}
    end, header = 0, {}
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        place = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        header[f"{name}.weight"], end = place, end + size
    described = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(described).to_bytes(8, "little") + described)
        file.truncate(8 + len(described) + end)
    return 2 * end


def test_no_model_is_ever_in_memory_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured against the same commands on a model of one layer."""
    sizes = {
        "small": write_zeros(tmp_path / "small", 1),
        "large": write_zeros(tmp_path / "large", 12),
    }
    more = sizes["large"] - sizes["small"]
    assert more > 400e6
    taken, written = {}, {}
    for name in sizes:
        run = tmp_path / f"run-{name}"
        taken[name] = peak("import", tmp_path / name, "--into", run)
        written[name] = peak("export", run, "--out", tmp_path / f"out-{name}")
    assert taken["large"] - taken["small"] < more / 10
    assert written["large"] - written["small"] < more * 3 / 4  # what is exported at once
