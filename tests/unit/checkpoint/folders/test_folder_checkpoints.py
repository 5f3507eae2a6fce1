"""Folders that another library writes: committed or not there, whatever fails meanwhile."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from kempner.checkpoint.context import CheckpointContext
from kempner.checkpoint.format.manifest import Identity, TrainState
from kempner.checkpoint.io.verify import verify
from kempner.checkpoint.manager import FolderCheckpoints
from kempner.checkpoint.store.retention import Keep
from kempner.run.process.exit_codes import DataError
from kempner.run.record.attempts import Fence, SupersededError, begin_attempt
from kempner.run.record.run_dir import RunDirectory


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def write(path: Path) -> None:
    """As a library does: a file, and one in a folder below."""
    (path / "model.bin").write_bytes(b"weights" * 1000)
    (path / "optimizer").mkdir()
    (path / "optimizer" / "rank-0.bin").write_bytes(b"moments" * 1000)


def begin(
    folder: Path, writing: Callable[[Path], None] = write, last: int = 2
) -> FolderCheckpoints:
    """In a new attempt of the run in `folder`."""
    run = RunDirectory(folder)
    identity, fence = (
        Identity(1, {"ranks": 1}, 0, "", {}, None),
        Fence(run.attempts, begin_attempt(run)),
    )
    context = CheckpointContext(run.checkpoints, identity, fence, dist.group.WORLD)
    checkpoints = FolderCheckpoints(context, writing, keep=Keep(2))
    checkpoints.restore()
    return checkpoints


def committed(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


def test_what_was_committed_is_found_again_file_by_file(tmp_path: Path) -> None:
    first = begin(tmp_path)
    for step in (5, 10, 15):
        first.save(TrainState(step))
    first.close()
    assert committed(tmp_path) == ["step-00000010", "step-00000015"]
    assert first.durations.quantile(0.5) is not None
    found = begin(tmp_path).restore()
    assert found is not None
    assert (found[0].step, found[1].name) == (15, "step-00000015")
    assert (found[1] / "optimizer" / "rank-0.bin").read_bytes() == b"moments" * 1000
    assert verify(found[1]) == []


def test_one_flipped_bit_anywhere_and_the_one_before_is_taken(tmp_path: Path) -> None:
    checkpoints = begin(tmp_path)
    checkpoints.save(TrainState(5))
    checkpoints.save(TrainState(10))
    file = checkpoints.path(10) / "optimizer" / "rank-0.bin"
    content = bytearray(file.read_bytes())
    content[777] ^= 1
    file.write_bytes(content)
    found = begin(tmp_path).restore()
    assert found is not None
    assert found[0].step == 5
    assert committed(tmp_path) == ["step-00000005", "step-00000010.damaged-a2"]


def test_none_that_verifies_is_an_error_and_no_new_beginning(tmp_path: Path) -> None:
    checkpoints = begin(tmp_path)
    checkpoints.save(TrainState(5))
    (checkpoints.path(5) / "model.bin").unlink()
    with pytest.raises(DataError, match=r"no checkpoint in .* verifies"):
        begin(tmp_path)


@pytest.mark.parametrize(
    ("error", "passing"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (RuntimeError("[enforce fail at inline_container.cc:672] unexpected pos 64 vs 0"), True),
        (ValueError("a state that this library cannot write"), False),
    ],
)
def test_a_save_that_fails_is_counted_and_the_next_one_works(
    tmp_path: Path, error: Exception, passing: bool
) -> None:
    failing = [error]

    def hiccup(path: Path) -> None:
        (path / "half.bin").write_bytes(b"half")
        if failing:
            raise failing.pop()
        write(path)

    checkpoints = begin(tmp_path, hiccup)
    checkpoints.save(TrainState(5))
    assert (checkpoints.failures.count, checkpoints.failures.passing) == (1, passing)
    assert str(error.args[-1]) in checkpoints.failures.reason
    assert list((tmp_path / "checkpoints").iterdir()) == []
    checkpoints.save(TrainState(6), counted=0)  # the others do not know of the failure yet
    assert committed(tmp_path) == []
    checkpoints.save(TrainState(6), counted=1)
    assert (checkpoints.failures.count, checkpoints.committed_step) == (0, 6)


def test_what_an_attempt_left_half_written_is_gone_in_the_next(tmp_path: Path) -> None:
    def die(path: Path) -> None:
        write(path)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begin(tmp_path, die).save(TrainState(5))
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1
    assert begin(tmp_path).restore() is None
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_superseded_attempt_commits_nothing(tmp_path: Path) -> None:
    old = begin(tmp_path)
    begin(tmp_path)
    old.save(TrainState(5))
    assert committed(tmp_path) == []
    assert old.poll()[1]
    with pytest.raises(SupersededError):
        old.save(TrainState(6))


def test_a_pinned_checkpoint_outlives_its_time(tmp_path: Path) -> None:
    checkpoints = begin(tmp_path)
    checkpoints.keep_only(Keep(2, pinned=frozenset([5])))
    for step in (5, 10, 15, 20):
        checkpoints.save(TrainState(step))
    checkpoints.close()
    assert committed(tmp_path) == ["step-00000005", "step-00000015", "step-00000020"]
