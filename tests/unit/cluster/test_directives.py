"""The `#SBATCH` lines of a batch script, in the forms that sbatch takes."""

from __future__ import annotations

import pytest

from kempner.cluster.slurm.directives import read


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("-N2", "nodes", "2"),
        ("-N 2-4", "nodes", "2-4"),
        ("--nodes 2", "nodes", "2"),
        ("--nodes=2 --nodes=3", "nodes", "3"),
        ("--sig USR1@60", "signal", "USR1@60"),
        ("--no-req", "no-requeue", ""),
        ("--exclusive --time 10", "time", "10"),
        ('-J "my run"  # a comment', "job-name", "my run"),
        ("--comment='--nodes=9' -N 1", "nodes", "1"),
    ],
)
def test_an_option_has_its_name_value_and_place(line: str, name: str, value: str) -> None:
    text = f"#!/bin/bash\n\n# SBATCH -N 8\n##SBATCH -N 7\n#SBATCH {line}\necho\n#SBATCH -N 9\n"
    found = read(text.encode())
    option = found.last(name)
    assert option is not None
    assert (option.value, option.line) == (value, 5)
    assert text[option.start : option.end] in line
    assert text[: found.end].endswith(f"{line}\n")
    assert found.late == 7


@pytest.mark.parametrize(
    ("line", "gpus"),
    [
        ("", 0),
        ("--gres=gpu:4", 4),
        ("--gres=gpu:a100:2", 2),
        ("--gres=lustre:1", 0),
        ("--gpus-per-node=h100:8", 8),
        ("-G 8 -N 2", 4),
        ("-G 3 -N 2", None),
        ("--gpus-per-task=1 --ntasks-per-node=4", 4),
        ("--gpus-per-node=$GPUS", None),
    ],
)
def test_the_gpus_of_a_node(line: str, gpus: int | None) -> None:
    assert read(f"#!/bin/bash\n#SBATCH {line}\n".encode()).gpus_per_node == gpus
