"""`kempner checkpoint list`, `verify` and `prune`, on real checkpoints."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from pathlib import Path

import pytest
import torch
from harness import KEMPNER
from saved import commit_state, small_state

from kempner.checkpoint.format.names import CheckpointFolder
from kempner.cli.entry import main
from kempner.run.record.run_dir import RunDirectory

Captured = pytest.CaptureFixture[str]


def kempner(*arguments: str | Path | int) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        main(["checkpoint", *map(str, arguments)])
    return left.value.code


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run with checkpoints of steps 10, 20 and 30, each by three ranks."""
    run = RunDirectory(tmp_path / "run")
    for step in (10, 20, 30):
        commit_state(run, small_state(), step, world=3)
    return run


def rows(listed: str) -> dict[int, str]:
    return {int(line.split()[0]): line for line in listed.splitlines()[1:]}


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def test_list_tells_what_is_known_without_reading(run: RunDirectory, capsys: Captured) -> None:
    folder = CheckpointFolder(run.checkpoints)
    folder.set_aside(10, "damaged", 3)
    (folder.step(20) / "__1_0.distcp").write_bytes(b"short")
    (folder.step(40)).mkdir()
    (folder.path / "step-best").mkdir()
    assert kempner("list", run.path) == 0
    found = rows(capsys.readouterr().out)
    assert sorted(found) == [10, 20, 30, 40]
    assert "damaged: found damaged by attempt 3" in found[10]
    assert "__1_0.distcp has 5 bytes instead of" in found[20]
    assert re.search(r"30 .* 2\.\d MB +3 +no +latest", found[30])
    assert "no manifest" in found[40]


@pytest.mark.parametrize("where", [".", "checkpoints", "checkpoints/latest"])
def test_a_run_its_folder_and_one_checkpoint_are_found(
    run: RunDirectory, where: str, capsys: Captured
) -> None:
    assert kempner("list", run.path / where) == 0
    assert 30 in rows(capsys.readouterr().out)
    assert kempner("verify", run.path / where) == 0
    assert "step-00000030: ok (world 3, 2." in capsys.readouterr().out


@pytest.mark.parametrize("there", [False, True])
def test_a_link_to_nothing_is_told_and_is_damage(
    run: RunDirectory, there: bool, capsys: Captured
) -> None:
    if there:
        (run.checkpoints / "step-00000099").mkdir()  # emptied, as an rm that was broken off leaves
    (run.checkpoints / "latest").unlink()
    (run.checkpoints / "latest").symlink_to("step-00000099")
    assert kempner("list", run.path) == 0
    assert "`latest` names step 99, which is not committed" in capsys.readouterr().out
    assert kempner("verify", run.path) == 65
    said = capsys.readouterr().out
    assert "`latest` names step 99, which is not committed" in said
    assert said.endswith("3 read, 0 damaged\n")
    assert kempner("verify", run.path, 30) == 0


def test_whoever_may_only_read_is_told_so_once(small_disk: Path, capsys: Captured) -> None:
    run = RunDirectory(small_disk / "run")
    for step in (10, 20):
        commit_state(run, {"model.a": torch.ones(3)}, step)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert kempner("verify", run.path) == 0
    said = capsys.readouterr()
    assert said.out.endswith("2 read, 0 damaged\n")
    assert said.err.startswith(
        f"kempner: {run.checkpoints} cannot be written to (Read-only file system), so `list`"
    )
    assert said.err.count("\n") == 1


def test_verify_names_rank_file_and_block_and_list_remembers(
    run: RunDirectory, capsys: Captured
) -> None:
    before = {path: path.read_bytes() for path in run.checkpoints.glob("step-*/*")}
    damaged = run.checkpoints / "step-00000020" / "__1_0.distcp"
    flip(damaged, 5000)
    assert kempner("verify", run.path) == 65
    said = capsys.readouterr().out
    assert "  rank 1: __1_0.distcp: block 0 (from byte 0) does not match its checksum\n" in said
    assert "  ranks 0, 2: ok\n" in said
    assert said.endswith("3 read, 1 damaged\n")
    damaged.write_bytes(before[damaged])
    assert {path: path.read_bytes() for path in run.checkpoints.glob("step-*/*")} == before
    assert kempner("list", run.path) == 0
    found = rows(capsys.readouterr().out)
    assert " damaged" in found[20]
    assert " ago " in found[30]
    assert kempner("verify", run.path, 20) == 0
    assert capsys.readouterr().out.endswith("1 read, 0 damaged\n")
    kempner("list", run.path)
    assert " damaged" not in rows(capsys.readouterr().out)[20]


def test_a_finding_speaks_of_that_checkpoint_alone(run: RunDirectory, capsys: Captured) -> None:
    assert kempner("verify", run.path, 30) == 0
    commit_state(run, small_state(), 30, world=3)
    capsys.readouterr()
    kempner("list", run.path)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.lstrip()[:2] == "30"]
    assert [" no " in line for line in lines] == ["abandoned" not in line for line in lines]
    assert len(lines) == 2


def test_files_that_belong_to_all_ranks_are_named_so(run: RunDirectory, capsys: Captured) -> None:
    flip(run.checkpoints / "step-00000030" / ".metadata", 50)
    flip(run.checkpoints / "step-00000020" / "manifest.json", 50)
    assert kempner("verify", run.path) == 65
    said = capsys.readouterr().out
    assert "  all ranks: .metadata: checksum does not match\n  ranks 0-2: ok\n" in said
    assert "step-00000020/manifest.json is damaged" in said


def test_verify_shows_how_far_it_is_on_a_terminal(run: RunDirectory) -> None:
    controller, terminal = pty.openpty()
    command = [*KEMPNER, "checkpoint", "verify", str(run.path), "30"]
    done = subprocess.run(command, stderr=terminal, stdout=subprocess.DEVNULL, check=True)
    os.close(terminal)
    assert done.returncode == 0
    assert "reading step-00000030" in os.read(controller, 65536).decode()
    os.close(controller)


def test_prune_says_what_goes_and_keeps_latest(run: RunDirectory, capsys: Captured) -> None:
    folder = CheckpointFolder(run.checkpoints)
    commit_state(run, small_state(), 40)
    folder.set_aside(10, "damaged", 3)
    folder.point_latest(30, "test")
    assert kempner("prune", run.path, "--keep-last=1", "--dry-run") == 0
    assert folder.committed() == [20, 30, 40]
    dry = capsys.readouterr().out
    assert kempner("prune", run.path, "--keep-last=1") == 0
    assert folder.committed() == [30, 40]
    wet = capsys.readouterr().out.splitlines()
    assert [line.split() for line in dry.replace("would go", "gone").splitlines()] == [
        line.split() for line in wet
    ]
    assert [line.split()[:2] for line in wet] == [
        ["stays", "step-00000010.damaged-a3"],
        ["gone", "step-00000020"],
        ["stays", "step-00000030"],
        ["stays", "step-00000040"],
    ]


def test_prune_keeps_multiples(run: RunDirectory) -> None:
    assert kempner("prune", run.path, "--keep-last=1", "--keep-every=20") == 0
    assert CheckpointFolder(run.checkpoints).committed() == [20, 30]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs needs root")
def test_prune_tells_what_it_cannot_delete(run: RunDirectory, capsys: Captured) -> None:
    (run.checkpoints / "step-00000010" / "manifest.json").unlink()
    busy = run.checkpoints / "step-00000020" / "__0_0.distcp"
    busy.unlink()
    busy.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(busy)], check=True)
    try:
        assert kempner("prune", run.path, "--keep-last=1") == 74
        assert "could not delete: step 20 (" in capsys.readouterr().err
    finally:
        (mounted,) = run.checkpoints.glob("*step-00000020*/__0_0.distcp")
        subprocess.run(["umount", str(mounted)], check=True)
    assert CheckpointFolder(run.checkpoints).committed() == [30]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["list", "{run}/nowhere"], "nowhere does not exist; name a run's directory"),
        (["verify", "{run}", "15"], "step 15 is not committed in {run}/checkpoints; these are: 10"),
        (["prune", "{run}"], "--keep-last"),
        (["prune", "{run}", "--keep-last=0"], "--keep-last"),
        (["prune", "{run}/checkpoints/latest", "--keep-last=1"], "is one checkpoint; name"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(
    run: RunDirectory, arguments: list[str], words: str, capsys: Captured
) -> None:
    assert kempner(*(argument.format(run=run.path) for argument in arguments)) == 2
    said = capsys.readouterr().err
    assert words.format(run=run.path) in said
    assert said.count("\n") == 1


def test_without_latest_nothing_is_old(run: RunDirectory, capsys: Captured) -> None:
    (run.checkpoints / "latest").unlink()
    assert kempner("prune", run.path, "--keep-last=1") == 2
    assert "has no `latest`" in capsys.readouterr().err
    assert CheckpointFolder(run.checkpoints).committed() == [10, 20, 30]
