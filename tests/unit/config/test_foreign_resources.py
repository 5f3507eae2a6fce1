"""Resources in the words of other trainers."""

from __future__ import annotations

from pathlib import Path

import pytest

from kempner.config.errors import ConfigError
from kempner.config.loading import load

FORGE = """
[provisioner]
launcher = "slurm"
cpu = 32
memory_mb = 512000
gpus_per_node = 4

[actors.trainer]
procs = 4
hosts = 8
with_gpus = true
"""


def file(folder: Path, text: str) -> Path:
    path = folder / "forge.toml"
    path.write_text(text)
    return path


def test_other_trainers_tables_are_read_and_explained(tmp_path: Path) -> None:
    said: list[str] = []
    slurm = load(file(tmp_path, FORGE), explain=said.append).slurm
    assert (slurm.launcher, slurm.cpus, slurm.memory_mb) == ("srun", 32, 512000)
    assert (slurm.gpus_per_node, slurm.procs, slurm.hosts) == (4, 4, 8)
    assert said == [
        'provisioner.launcher is read as slurm.launcher="srun"',
        "provisioner.cpu is read as slurm.cpus=32",
        "provisioner.memory_mb is read as slurm.memory_mb=512000",
        "provisioner.gpus_per_node is read as slurm.gpus_per_node=4",
        "actors.trainer.procs is read as slurm.procs=4",
        "actors.trainer.hosts is read as slurm.hosts=8",
    ]
    older = "[processes.trainer]\nprocs = 2\nwith_gpus = false\n"
    slurm = load(file(tmp_path, older), ["--slurm.hosts=3"]).slurm
    assert (slurm.procs, slurm.gpus_per_node, slurm.hosts) == (2, 0, 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[provisioner]\nlauncher = "mast"', 'must be slurm, torchrun or local, not "mast"'),
        ("[provisioner]\nimage = 1", "provisioner.image means nothing to kempner; the keys"),
        ("[actors.policy]\nprocs = 1", "actors.policy: kempner starts a trainer and no"),
        ("[actors.trainer]\nprocs = 4\n[slurm]\nprocs = 2", "slurm.procs, which is 2; remove one"),
        ("actors = 4", "actors must be a table of keys, not 4"),
        ("[actors]\ntrainer = 4", "actors.trainer must be a table of keys, not 4"),
        ("[actors.trainer]\nprocs = 0", "slurm.procs must be above 0, not 0"),
    ],
)  # fmt: skip
def test_what_means_nothing_or_contradicts_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(file(tmp_path, text))
    assert said in str(refused.value)
    assert "forge.toml" in str(refused.value)
