"""A disk is full, or a quota used up, for all ranks or for one alone: a save fails, and no more."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from drilling import note
from harness import Job, Run, wait_until

from kempner.checkpoint.format.names import CheckpointFolder
from kempner.checkpoint.io.verify import verify
from kempner.checkpoint.store.selection import newest

pytestmark = pytest.mark.timeout(300)

WORLD = 2
ENDLESS = (
    "--train.max_steps=100000",
    "--checkpoint.interval=3",
    "--checkpoint.max_failures=100000",
)


def failures(run: Run, job: Job, more_than: int) -> list[dict[str, dict[str, str]]]:
    """The failed saves in the ledger, once there are more than `more_than`."""
    wait_until(lambda: len(run.events("checkpoint_failed")) > more_than, "a failed save", 60, job)
    return run.events("checkpoint_failed")


def assert_a_failure_costs_nothing(run: Run, job: Job, folder: CheckpointFolder) -> dict[str, str]:
    """While saves fail, training goes on and nothing good goes; the words of the failure."""
    failed = len(failures(run, job, 0))
    good, step = folder.committed(), max(run.steps())
    failures(run, job, failed + 1)
    run.reach(step + 6, job)
    assert folder.committed() == good
    assert good
    assert newest(CheckpointFolder(folder.path)) == good[-1]  # `latest` may find no room
    assert not any(verify(folder.step(step)) for step in good)
    return run.events("checkpoint_failed")[-1]["reasons"]


def assert_it_goes_on(run: Run, reference: Run, job: Job, folder: CheckpointFolder) -> None:
    """The next save succeeds, and the run is as one that had all the space in the world."""
    last = folder.committed()[-1]
    wait_until(lambda: (folder.latest() or 0) > last, "a commit", job=job)
    job.signal()
    assert job.wait(120) == 75, job.output()
    assert not any(verify(folder.step(step)) for step in folder.committed())
    assert folder.latest() == max(run.steps())
    undisturbed = reference.supervise(WORLD, *ENDLESS)
    reference.reach(max(run.steps()), undisturbed)
    undisturbed.signal()
    assert undisturbed.wait(120) == 75, undisturbed.output()
    expected = reference.steps()
    assert run.steps() == {step: expected[step] for step in run.steps()}


@pytest.mark.drill
def test_a_full_disk_on_two_ranks(run: Run, reference: Run, small_disk: Path) -> None:
    """`make check` has the next one; of one rank: distributed/saves/test_commits.py."""
    folder = CheckpointFolder(small_disk / "checkpoints")
    job = run.supervise(WORLD, f'--checkpoint.dir="{folder.path}"', *ENDLESS)
    wait_until(lambda: len(folder.committed()) > 1, "two commits", job=job)
    ballast = small_disk / "ballast"
    with open(ballast, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    assert shutil.disk_usage(small_disk).free == 0
    reasons = assert_a_failure_costs_nothing(run, job, folder)
    assert any("No space left on device" in reason for reason in reasons.values()), reasons
    ballast.unlink()
    assert_it_goes_on(run, reference, job, folder)
    note("full disk", reasons=list(reasons), failed=len(run.events("checkpoint_failed")))


def test_a_limit_that_one_rank_alone_runs_into(run: Run, reference: Run) -> None:
    """RLIMIT_FSIZE refuses, to one process, what a quota would refuse."""
    folder = CheckpointFolder(run.checkpoints)
    job = run.supervise(WORLD, *ENDLESS)
    rank_1 = run.ready_pid(1, 1, job)
    wait_until(lambda: len(folder.committed()) > 1, "two commits", job=job)
    size = (folder.step(folder.committed()[-1]) / "__1_0.distcp").stat().st_size
    before = resource.prlimit(rank_1, resource.RLIMIT_FSIZE, (size // 2, resource.RLIM_INFINITY))
    reasons = assert_a_failure_costs_nothing(run, job, folder)
    assert list(reasons) == ["rank 1"]
    assert "File too large" in reasons["rank 1"]
    assert "__1_0.distcp" in reasons["rank 1"]
    resource.prlimit(rank_1, resource.RLIMIT_FSIZE, before)
    assert_it_goes_on(run, reference, job, folder)
    note("limit of one rank", reasons=list(reasons), failed=len(run.events("checkpoint_failed")))


@pytest.fixture
def quota(tmp_path: Path) -> Iterator[Path]:
    """A folder with a quota of 4 MiB on a disk with room for more: a subvolume of btrfs, whose
    quotas hold for root, too."""
    if lacking := [tool for tool in ("mkfs.btrfs", "btrfs") if shutil.which(tool) is None]:
        pytest.skip(f"a quota needs {lacking[0]}, of btrfs-progs")
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    image, disk = tmp_path / "image", tmp_path / "disk"
    disk.mkdir()
    with open(image, "wb") as file:
        file.truncate(256 << 20)
    _run("mkfs.btrfs", "--quiet", "--metadata", "single", image)
    try:
        _run("mount", "-o", "loop", image, disk)
    except subprocess.CalledProcessError:
        pytest.skip("no loop device, or no btrfs in this kernel")
    try:
        _run("btrfs", "quota", "enable", disk)
        _run("btrfs", "subvolume", "create", disk / "limited")
        _run("btrfs", "qgroup", "limit", "4M", disk / "limited")
        yield disk / "limited"
    finally:
        _run("umount", disk)


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_a_quota_that_is_used_up(run: Run, reference: Run, quota: Path) -> None:
    folder = CheckpointFolder(quota / "checkpoints")
    job = run.supervise(WORLD, f'--checkpoint.dir="{folder.path}"', *ENDLESS)
    wait_until(lambda: len(folder.committed()) > 1, "two commits", job=job)
    ballast = quota / "ballast"
    with open(ballast, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    assert shutil.disk_usage(quota).free > 64 << 20
    reasons = assert_a_failure_costs_nothing(run, job, folder)
    assert any("Disk quota exceeded" in reason for reason in reasons.values()), reasons
    ballast.unlink()
    _run("btrfs", "filesystem", "sync", quota)  # it counts what is free only from time to time
    assert_it_goes_on(run, reference, job, folder)
    note("quota", reasons=list(reasons), failed=len(run.events("checkpoint_failed")))
