"""A configuration in YAML is refused with the command that converts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kempner.cli.entry import main
from kempner.config.errors import ConfigError
from kempner.config.loading import load

FORGE = """\
# A fine-tuning run of 128 GPUs, as torchforge has it.
comm:
  trace_buf_size: 0
provisioner:
  launcher: slurm
  cpu: 128
  memory_mb: 1655502
  gpus_per_node:          # inferred from Slurm
actors:
  trainer:
    procs: 4
    hosts: 32
    with_gpus: true
    mesh_name: trainer
model:
  name: qwen3
  flavor: 32B
  hf_assets_path: hf://${model}
optimizer:
  name: AdamW
  lr: 1e-5
  eps: 1.5e-8
lr_scheduler:
  warmup_steps: 200
training:
  local_batch_size: 8
  seq_len: 2048
  max_norm: 1.0
  steps: 5000
  compile: false
  dataset: c4
data:
  num_shards_per_rank: 64
  num_dataloader_workers: 0
parallelism:
  data_parallel_shard_degree: 32
  tensor_parallel_degree: 4
  pipeline_parallel_degree: 1
  context_parallel_degree: 2
checkpoint:
  folder: ./checkpoints
  interval: 500
  async_mode: async
activation_checkpoint:
  mode: selective
"""

REMARKS = """\
left out comm.trace_buf_size = 0: kempner has nothing like it
left out actors.trainer.mesh_name = "trainer": means nothing to kempner; the keys here are procs
left out model.name = "qwen3": a published model is named by model.preset: kempner config explain
left out model.flavor = "32B": a published model is named by model.preset: kempner config explain
left out model.hf_assets_path = "hf://${model}": refers to another value; write that
left out training.dataset = "c4": tokens are written once, by kempner prepare, and named
left out parallelism.context_parallel_degree = 2: unknown key parallelism.context_parallel_degree
train.global_batch_size is not in the file: set it to the sequences of all ranks in a step
"""


def convert(path: Path) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        main(["config", "convert", str(path)])
    return left.value.code


def test_a_configuration_of_torchforge_becomes_toml_and_the_rest_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, made = tmp_path / "forge.yaml", tmp_path / "forge.toml"
    path.write_text(FORGE)
    assert convert(path) == 0
    said = capsys.readouterr()
    made.write_text(said.out)
    config = load(made)
    slurm, train, parallel = config.slurm, config.train, config.parallelism
    assert (slurm.launcher, slurm.procs, slurm.hosts, slurm.cpus) == ("srun", 4, 32, 128)
    assert (slurm.memory_mb, slurm.gpus_per_node) == (1655502, None)
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.eps) == (
        "adamw", 1e-5, 1.5e-8,
    )  # fmt: skip
    assert (train.max_steps, train.seq_len, train.micro_batch_size) == (5000, 2048, 8)
    assert (train.compile, train.activation_checkpointing) == (False, "selective")
    assert (parallel.data_parallel_shard_degree, parallel.tensor_parallel_degree) == (32, 4)
    assert (config.scheduler.warmup_steps, config.data.num_shards_per_rank) == (200, 64)
    assert (config.checkpoint.dir, config.checkpoint.async_save) == ("./checkpoints", True)

    remarks = said.err.splitlines()
    assert len(remarks) == len(REMARKS.splitlines())
    for remark, begins in zip(remarks, REMARKS.splitlines(), strict=True):
        assert remark.startswith(f"kempner: {begins}")
        assert f"# {remark.removeprefix('kempner: ')}\n" in said.out


def test_the_keys_of_kempner_stay_what_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.yml"
    path.write_text(
        "train: {max_steps: 7, seq_len: 64}\n"
        "optimizer: {betas: [0.9, 0.99]}\n"
        "model: {factory: 'ours:build', options: {width: 8, names: [a, b]}}\n"
        "processes: {procs: 2, with_gpus: false}\n"
        "resilience: {hang_timeout_max_of: {load: 60}}\n"
    )
    assert convert(path) == 0
    said = capsys.readouterr()
    assert said.err == ""
    (tmp_path / "own.toml").write_text(said.out)
    config = load(tmp_path / "own.toml")
    assert (config.train.max_steps, config.optimizer.betas) == (7, [0.9, 0.99])
    assert config.model.options == {"width": 8, "names": ["a", "b"]}
    assert (config.slurm.procs, config.slurm.gpus_per_node) == (2, 0)
    assert config.resilience.hang_timeout_max_of.load == 60


@pytest.mark.parametrize("name", ["my run.yaml", "x.yml"])
def test_yaml_is_refused_with_the_command_that_converts_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with pytest.raises(ConfigError, match="does not exist"):
        load(path)
    path.write_text(FORGE)
    with pytest.raises(ConfigError) as refused:
        load(path)
    assert str(refused.value).startswith(f"{path} is YAML, and kempner reads TOML; write `kempner ")
    assert path.stem in str(refused.value).partition(" > ")[2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train:\n  seed: 1\n  seed: 2\n", "line 2: not valid YAML: seed is given twice"),
        ("train: [1\n", "not valid YAML: "),
        ("- 1\n", "holds no keys"),
        ("", "holds no keys"),
        ("run: {name: 2026-02-30}\n", "not valid YAML: day is out of range"),
        ("!!python/object:os.system {}\n", "not valid YAML: could not determine a constructor"),
        (b"# M\xfcller", "not UTF-8"),
    ],
)
def test_what_is_no_yaml_is_said_in_a_sentence(
    tmp_path: Path, text: str | bytes, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert convert(path) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert (told.err.count("\n"), told.out) == (1, "")
