"""The command that submits a job again, from the one that Slurm keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from kempner.supervisor.slurm.requeue_job import same_again

COPY = Path("/run/batch.sh")


def shown(script: str, name: str = "kempner", comment: str = "") -> str:
    """What `scontrol show job -o` says, in the words of 22.05 and 26.05 in turn."""
    sluid = " SLUID=s1" if comment else ""
    noted = f"Comment={comment} " if comment else ""
    return (
        f"JobId=7 JobName={name}{sluid} UserId=u(1) JobState=RUNNING Command=/w/{script} c.toml "
        f"WorkDir=/w {noted}StdErr=/w/7.out TresPerNode=gres:gpu:1"
    )


def test_options_and_arguments_stay_as_they_were() -> None:
    line = "sbatch -N 8 --qos=low scripts/slurm/multinode.sh c.toml --data.dataset_path=my tokens"
    arguments = ["c.toml", "--data.dataset_path=my tokens"]
    command = same_again(line, arguments, COPY, shown=shown("scripts/slurm/multinode.sh"))
    options = ["sbatch", "-N", "8", "--qos=low"]
    assert command == [*options, "/run/batch.sh", "c.toml", "--data.dataset_path=my tokens"]


def test_lost_nodes_are_excluded_after_whatever_the_user_excluded() -> None:
    line = "sbatch -x n1 run.sh c.toml"
    command = same_again(line, ["c.toml"], COPY, ["n1", "n2"], shown("run.sh"))
    assert command == ["sbatch", "-x", "n1", "--exclude=n1,n2", "/run/batch.sh", "c.toml"]


@pytest.mark.parametrize(
    ("options", "name", "comment"),
    [
        (["--job-name=my run"], "my run", ""),
        (["-N", "2", "--job-name", "my  run of May", "--requeue"], "my  run of May", ""),
        (["-J", "my run", "--exclusive", "-t", "1-00:00:00"], "my run", ""),
        (["--comment=two words, and more", "-p", "low"], "kempner", "two words, and more"),
        (["--constraint=a b", "--gpus-per-node=4"], "kempner", ""),
        (["--job=my run"], "my run", ""),
    ],
)
def test_words_that_were_between_quotes_are_one_again(
    options: list[str], name: str, comment: str
) -> None:
    line = " ".join(["sbatch", *options, "run.sh", "c.toml"])
    command = same_again(line, ["c.toml"], COPY, shown=shown("run.sh", name, comment))
    assert command == ["sbatch", *options, "/run/batch.sh", "c.toml"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "does not pass its arguments"),
        ("sbatch mine.sh", "does not pass its arguments"),
        ("sbatch mine.sh other.toml", "does not pass its arguments"),
        ("sbatch --array=1-3 run.sh c.toml", "all elements of the array"),
        ("sbatch -a 1-3 run.sh c.toml", "all elements of the array"),
        ("sbatch -N 2 run.sh big c.toml", "does not pass all of its arguments"),  # it shifts
        ("sbatch my scripts/run.sh c.toml", "was between quotes"),
        ("sbatch --job-name=a -N 4 run.sh c.toml", "where --job-name ends"),
        ("sbatch --comment=see -x run.sh c.toml", "where --comment ends"),
        ("sbatch --job-name=a --b run.sh c.toml", "`--b` is no option of sbatch"),
    ],
)
def test_what_would_not_be_the_same_is_refused(line: str, words: str) -> None:
    seen = shown("run.sh", name="a -N 4", comment="see -x")
    with pytest.raises(ValueError, match=words):
        same_again(line, ["c.toml"], COPY, shown=seen)
