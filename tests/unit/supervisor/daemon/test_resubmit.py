"""The command that submits a job again, from the one that Slurm keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from kempner.supervisor.slurm.requeue_job import same_again

COPY = Path("/run/batch.sh")


def test_options_and_arguments_stay_as_they_were() -> None:
    line = "sbatch -N 8 --qos=low scripts/slurm/multinode.sh c.toml --data.dataset_path=my tokens"
    command = same_again(line, ["c.toml", "--data.dataset_path=my tokens"], COPY)
    options = ["sbatch", "-N", "8", "--qos=low"]
    assert command == [*options, "/run/batch.sh", "c.toml", "--data.dataset_path=my tokens"]


def test_lost_nodes_are_excluded_after_whatever_the_user_excluded() -> None:
    command = same_again("sbatch -x n1 run.sh c.toml", ["c.toml"], COPY, ["n1", "n2"])
    assert command == ["sbatch", "-x", "n1", "--exclude=n1,n2", "/run/batch.sh", "c.toml"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "does not pass its arguments"),
        ("sbatch mine.sh", "does not pass its arguments"),
        ("sbatch mine.sh other.toml", "does not pass its arguments"),
        ("sbatch --array=1-3 run.sh c.toml", "all elements of the array"),
        ("sbatch -a 1-3 run.sh c.toml", "all elements of the array"),
    ],
)
def test_what_would_not_be_the_same_is_refused(line: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        same_again(line, ["c.toml"], COPY)
