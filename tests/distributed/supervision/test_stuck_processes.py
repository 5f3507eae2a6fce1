"""A rank that waits in the kernel: no signal ends it, and nothing else waits for it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness import Run, wait_until

from kempner.probe.processes import still_runs


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own that the test may freeze; it is thawed in the end."""
    if os.geteuid() != 0:
        pytest.skip("to mount and to freeze a file system needs root")
    image, folder = tmp_path / "image", tmp_path / "frozen"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, folder], check=False).returncode:
        pytest.skip("there is no loop device")
    yield folder
    subprocess.run(["fsfreeze", "--unfreeze", folder], check=False, capture_output=True)
    subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def freezing(folder: Path) -> Iterator[None]:
    """A process that writes there waits in the kernel (state D) until the block is over."""
    subprocess.run(["fsfreeze", "--freeze", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", folder], check=True)


def test_a_rank_that_cannot_be_killed_is_left_behind_and_its_node_named(
    run: Run, frozen: Path
) -> None:
    job = run.supervise(
        1,
        "--train.max_steps=100000",
        "--checkpoint.interval=100000",
        f"--checkpoint.dir={frozen / 'checkpoints'}",
        "--supervise.stop_grace=5",
    )
    pid = run.ready_pid(1, 0, job)
    run.reach(3, job)
    with freezing(frozen):
        job.signal()
        assert job.wait(90) == 75, job.output()
        assert still_runs(pid)
        (suspect,) = run.events("suspect")
        assert f"process {pid}, does not end though it was killed" in suspect["reason"]
        assert "in D (disk sleep)" in suspect["reason"]
    wait_until(lambda: not still_runs(pid), "the rank to end once it may")
