"""`kempner init`: what it asks of Slurm's answers, what it writes, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from harness import KEMPNER, ROOT

from kempner.config.loading import load
from kempner.project.site import (
    Account,
    Environment,
    NodeKind,
    Request,
    Site,
    choose,
    parse_limit,
    read_accounts,
    read_kinds,
)
from kempner.project.write import project_files, read_templates

LAB = "high|up|infinite|8|8|gpu:4\nlow*|up|infinite|6|8|gpu:4\nlow*|up|infinite|2|8|gpu:4\n"
UNIVERSITY = (
    "cpu*|up|1-00:00:00|200|128|(null)\n"
    "gpu|up|2-00:00:00|3|64|gpu:v100:2(S:0-1)\n"
    "gpu|up|2-00:00:00|12|96|gpu:h100:8(S:0-1),shard:h100:64\n"
    "test|up|2:00:00|2|64+|gpu:h100:4\n"
    "old|drain|infinite|90|96|gpu:h100:8\n"
)


def site_of(answer: str, *accounts: Account, default: str = "") -> Site:
    kinds = read_kinds(answer)
    assert kinds is not None
    return Site(Environment("/envs/it/bin/python"), "", kinds, accounts, default)


def request_of(answer: str, *accounts: Account, default: str = "") -> Request:
    request = choose(site_of(answer, *accounts, default=default))
    assert request is not None
    return request


def options(script: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if "#SBATCH" in line]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_the_default_partition_is_chosen_and_its_nodes_are_counted_once() -> None:
    request = request_of(LAB)
    assert request.kind == NodeKind("low", True, True, "infinite", 8, 8, 4)
    assert [kind.partition for kind in request.others] == ["high"]
    assert (request.ranks_per_node, request.cpus_per_rank, request.time) == (4, 2, "24:00:00")


def test_a_default_partition_without_gpus_gives_way_to_the_most_nodes_with_some() -> None:
    request = request_of(UNIVERSITY)
    assert (request.kind.partition, request.kind.count, request.kind.gpus) == ("gpu", 12, 8)
    assert request.cpus_per_rank == 12
    assert request_of("cpu*|up|1:00:00|9|64|(null)\n").ranks_per_node == 1


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("30:00", 1800),
        ("2:00:00", 7200),
        ("7-00:00:00", 604800),
        ("1-12:00", 129600),
        ("infinite", None),
    ],
)
def test_a_limit_is_read_and_a_short_one_obeyed(limit: str, seconds: int | None) -> None:
    assert parse_limit(limit) == seconds
    short = seconds is not None and seconds < 86400
    request = request_of(f"p*|up|{limit}|1|8|gpu:1\n")
    assert request.time == (limit if short else "24:00:00")


def test_the_account_is_slurms_choice_if_it_is_good_there() -> None:
    both = (Account("physics"), Account("cs"), Account("guest", "high"))
    assert request_of(LAB, *both, default="cs").account == "cs"
    assert request_of(LAB, *both, default="cs").other_accounts == ("physics",)
    assert request_of(LAB, *both, default="guest").account == "physics"
    assert request_of(LAB).account == ""
    assert read_accounts("physics|\ncs|\nphysics|\nguest|high\n") == both


@pytest.mark.parametrize("answer", ["", "low*|up|infinite|8|8", "low*|up|infinite|?|8|gpu:4\n"])
def test_an_answer_that_is_cut_off_is_none(answer: str) -> None:
    assert read_kinds(answer) is None


def test_the_scripts_ask_for_what_was_found_and_name_the_rest() -> None:
    site = site_of(UNIVERSITY, Account("physics"), Account("cs"), default="cs")
    files = project_files(site, read_templates())
    multinode = files["scripts/slurm/multinode.sh"]
    found = options(multinode)
    untouched = options((ROOT / "scripts/slurm/multinode.sh").read_text())
    asked = {
        "partition": "gpu",
        "account": "cs",
        "ntasks-per-node": "8",
        "gpus-per-node": "8",
        "cpus-per-task": "12",
    }
    assert found == untouched | asked
    assert "# Others: test: 2 nodes of 4 GPUs and 64 CPUs, at most 2:00:00\n" in multinode
    assert "# Other accounts: physics\n" in multinode
    assert "multinode.sh train.toml" in multinode
    assert "configs/" not in "".join(files.values())
    torchrun = options(files["scripts/slurm/torchrun.sh"])
    assert (torchrun["ntasks-per-node"], torchrun["cpus-per-task"]) == ("1", "96")


def test_without_gpus_none_are_asked_for() -> None:
    files = project_files(site_of("cpu*|up|1:00:00|1|64|(null)\n"), read_templates())
    found = options(files["scripts/slurm/multinode.sh"])
    assert "gpus-per-node" not in found
    asked = [found[name] for name in ("ntasks-per-node", "cpus-per-task", "nodes", "time")]
    assert asked == ["1", "64", "1", "1:00:00"]


def test_the_scripts_find_the_python_that_wrote_them(tmp_path: Path) -> None:
    """Whatever is in its path; one that is not there is named."""
    python = tmp_path / "it's here" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    files = project_files(Site(Environment(str(python))), read_templates())
    script = files["scripts/slurm/environment.sh"]
    (tmp_path / "environment.sh").write_text(f'{script}echo "$KEMPNER_PYTHON"\n')
    environ = {name: value for name, value in os.environ.items() if name != "KEMPNER_PYTHON"}

    def sourced() -> subprocess.CompletedProcess[str]:
        command = ["bash", "-euo", "pipefail", tmp_path / "environment.sh"]
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)

    assert sourced().stdout == f"{python}\n"
    python.unlink()
    missing = sourced()
    assert missing.returncode == 2
    assert missing.stderr.startswith(f"{python} cannot run kempner on ")
    assert "No such file or directory" in missing.stderr
    environ["KEMPNER_PYTHON"] = Path(sys.executable).name  # a name is looked up
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    assert sourced().stdout == f"{Path(sys.executable).name}\n"


def test_an_interface_of_this_machine_is_named_where_one_could_be_set() -> None:
    config = project_files(Site(Environment("python"), fabric="hsn0"), read_templates())[
        "train.toml"
    ]
    assert '# interface = "hsn0" ' in config
    tomllib.loads(config)


def init(folder: Path | str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [*KEMPNER, "init", str(folder)]
    # What Slurm there may be on this machine is none of these tests' business.
    environ = os.environ | {"PATH": "/nowhere"}
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True)


def test_a_project_is_written_and_never_overwritten(tmp_path: Path) -> None:
    done = init("new/project", tmp_path)
    project = tmp_path / "new" / "project"
    assert (done.returncode, done.stderr) == (0, "")
    assert "for any cluster, since there is no Slurm here" in done.stdout
    assert done.stdout.splitlines()[-1] == "  kempner supervise train.toml"
    config = load(project / "train.toml", [])
    assert (config.model.vocab_size, config.data.dataset_path) == (None, "data/train")
    assert (project / "logs").is_dir()
    assert os.access(project / "scripts/slurm/interactive.sh", os.X_OK)
    assert "/runs/" in (project / ".gitignore").read_text()

    before = {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
    again = init("new/project", tmp_path)
    assert again.returncode == 2
    assert again.stderr == (
        "kempner: new/project is not empty: 7b.toml is there; name a new or an empty one\n"
    )
    assert {path: path.read_bytes() for path in project.rglob("*") if path.is_file()} == before


def test_a_folder_with_hidden_files_counts_as_empty_and_keeps_them(tmp_path: Path) -> None:
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".gitignore").write_text("mine\n")
    done = init(".", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "left as it was: .gitignore" in done.stdout
    assert "  kempner prepare" in done.stdout  # and no cd
    assert (tmp_path / ".gitignore").read_text() == "mine\n"
    assert (tmp_path / "train.toml").exists()


@pytest.mark.parametrize(
    ("folder", "words"),
    [("file", "file is not a folder"), ("file/below", "Not a directory"), ("x" * 300, "too long")],
)
def test_what_cannot_be_written_is_said_in_a_sentence(
    folder: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    done = init(folder, tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_half_a_project_is_taken_away_again(small_disk: Path) -> None:
    with open(small_disk / ".ballast", "wb") as ballast:
        size = 4 * 2**20 - 3 * 4096  # room for a page or two
        os.posix_fallocate(ballast.fileno(), 0, size)
    done = init("p", small_disk)
    assert done.returncode == 74
    assert "No space left on device" in done.stderr
    assert [path.name for path in small_disk.iterdir()] == [".ballast"]
