"""What retention deletes, what it leaves alone, and what it makes of a deletion that fails."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import wait_until
from patience import scaled

from kempner.checkpoint.format.names import MANIFEST, WITHDRAWN, CheckpointFolder, step_name
from kempner.checkpoint.store import retention
from kempner.checkpoint.store.retention import STALE_AFTER, Keep, Pruner, Readers, expendable, prune
from kempner.run.record.attempts import Fence, SupersededError, begin_attempt
from kempner.run.record.run_dir import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def fence(run: RunDirectory) -> Fence:
    return Fence(run.attempts, begin_attempt(run))


@pytest.fixture
def folder(run: RunDirectory) -> CheckpointFolder:
    """Four checkpoints, of which a `Keep(last=2)` wants two."""
    folder = CheckpointFolder(run.checkpoints)
    for step in (10, 20, 30, 40):
        folder.step(step).mkdir(parents=True)
        (folder.step(step) / "__0_0.distcp").write_bytes(b"data")
        (folder.step(step) / MANIFEST).write_text("{}")
        folder.point_latest(step, "x")
    return folder


def one_pass(folder: CheckpointFolder, readers: Readers | None = None) -> list[int]:
    """Prune once; the steps that could not be deleted."""
    return list(prune(folder, Keep(last=2), readers or Readers(folder), lambda: None))


def names(folder: CheckpointFolder) -> list[str]:
    return sorted(entry.name for entry in folder.path.iterdir())


@pytest.mark.parametrize(
    ("committed", "latest", "keep", "gone"),
    [
        ([10, 20, 30], 30, Keep(2), [10]),
        ([10, 20, 30], 30, Keep(3), []),
        ([10, 20, 30, 40], 20, Keep(2), []),
        ([10, 20, 30, 40], 30, Keep(2), [10]),
        ([10, 20, 30], None, Keep(2), []),
        ([], None, Keep(2), []),
        ([10, 20, 30, 40, 50], 50, Keep(2, every=20), [10, 30]),
        ([10, 20, 30, 40, 50], 50, Keep(2, every=10), []),
        ([7, 20, 30, 40], 40, Keep(2, every=20), [7]),
    ],
)
def test_what_may_go_is_a_pure_choice(
    committed: list[int], latest: int | None, keep: Keep, gone: list[int]
) -> None:
    assert expendable(committed, latest, keep) == gone


@pytest.fixture
def protect(tmp_path: Path) -> Iterator[Callable[[Path], None]]:
    """Makes a path that not even root can change, until `release`."""

    def protect(path: Path) -> None:
        done = subprocess.run(["chattr", "+i", path], capture_output=True, check=False)
        if done.returncode:
            pytest.skip("chattr +i does not work here")

    yield protect
    release(tmp_path)


def release(folder: Path) -> None:
    """Undo `protect` for everything below a folder."""
    subprocess.run(["chattr", "-f", "-R", "-i", folder], check=False)


@pytest.mark.parametrize("inside", ["", "__0_0.distcp"])
def test_a_deletion_that_fails_is_told_and_succeeds_later(
    folder: CheckpointFolder, protect: Callable[[Path], None], inside: str
) -> None:
    protect(folder.step(10) / inside)
    for _ in range(2):
        assert one_pass(folder) == [10]
        assert folder.committed() == ([30, 40] if inside else [10, 30, 40])
    release(folder.path)
    assert one_pass(folder) == []
    assert names(folder) == ["latest", step_name(30), step_name(40)]


def test_a_failure_is_said_once_and_so_is_its_end(
    folder: CheckpointFolder,
    fence: Fence,
    protect: Callable[[Path], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    protect(folder.step(10))
    pruner = Pruner(folder, Keep(last=2), fence)
    for _ in range(3):
        pruner.request()
        wait_until(lambda: pruner._newest.done(), "a pass")  # type: ignore[union-attr]
    assert folder.committed() == [10, 30, 40]
    release(folder.path)
    pruner.request()
    pruner.close()
    said = capsys.readouterr()
    assert (said.out + said.err).count("cannot delete an old checkpoint") == 1
    assert folder.committed() == [30, 40]


def test_a_deletion_that_a_crash_cut_short_is_finished(folder: CheckpointFolder) -> None:
    (folder.step(10) / MANIFEST).rename(folder.step(10) / WITHDRAWN)
    (folder.step(20) / MANIFEST).unlink()
    folder.step(20).rename(folder.path / ".step-00000020.a0-77aa")
    assert one_pass(folder) == []
    assert names(folder) == ["latest", step_name(30), step_name(40)]


def test_a_checkpoint_without_a_manifest_is_not_ours_to_delete(folder: CheckpointFolder) -> None:
    (folder.step(20) / MANIFEST).unlink()
    assert one_pass(folder) == []
    assert (folder.step(20) / "__0_0.distcp").exists()


def test_what_is_being_read_stays_until_it_is_not(folder: CheckpointFolder) -> None:
    readers = Readers(folder)
    with retention.reading(folder, 10):
        assert one_pass(folder, readers) == []
        assert folder.committed() == [10, 30, 40]
    assert one_pass(folder, readers) == []
    assert names(folder) == ["latest", step_name(30), step_name(40)]


def test_a_reader_that_comes_at_the_last_moment_finds_its_files(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest is withdrawn right after the reader has read it."""
    rename = Path.rename
    opened = []

    def read_then_rename(self: Path, target: Path) -> Path:
        if self == folder.step(10) / MANIFEST:
            reader = retention.reading(folder, 10)
            reader.__enter__()
            opened.append(reader)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", read_then_rename)
    readers = Readers(folder)
    assert one_pass(folder, readers) == []
    assert folder.committed() == [30, 40]
    assert (folder.step(10) / "__0_0.distcp").read_bytes() == b"data"
    opened[0].__exit__(None, None, None)
    assert one_pass(folder, readers) == []
    assert not folder.step(10).exists()


def test_the_marker_of_a_reader_that_died_blocks_for_a_while_only(
    folder: CheckpointFolder,
) -> None:
    now = [0.0]
    readers = Readers(folder, clock=lambda: now[0])
    marker = folder.path / ".reading-step-00000010.77aa"
    marker.write_text("host 1 0\n")
    for at, beat, kept in ((0, 0, True), (50, 1, True), (100, 1, True), (100, 1, True)):
        now[0] = at
        marker.write_text(f"host 1 {beat}\n")
        assert one_pass(folder, readers) == []
        assert folder.step(10).exists() == kept
    now[0] = 50 + STALE_AFTER
    assert one_pass(folder, readers) == []
    assert names(folder) == ["latest", step_name(30), step_name(40)]


def test_a_reader_shows_that_it_lives(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "RENEW_EVERY", 0.001)
    with retention.reading(folder, 10):
        [marker] = folder.markers(10)
        first = marker.read_text()
        assert str(os.getpid()) in first
        wait_until(lambda: marker.read_text() not in ("", first), "a sign of life")
    assert folder.markers(10) == []


def test_a_folder_that_cannot_be_written_to_is_read_without_a_marker(
    folder: CheckpointFolder,
    protect: Callable[[Path], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    protect(folder.path)
    with retention.reading(folder, 10):
        assert (folder.step(10) / MANIFEST).read_text() == "{}"
    said = capsys.readouterr()
    assert "cannot mark the checkpoint as being read" in said.out + said.err


def test_a_superseded_attempt_deletes_nothing_more(
    folder: CheckpointFolder, run: RunDirectory, fence: Fence
) -> None:
    begin_attempt(run)
    with pytest.raises(SupersededError):
        prune(folder, Keep(last=2), Readers(folder), fence.check)
    pruner = Pruner(folder, Keep(last=2), fence)
    pruner.request()
    pruner.close()
    assert folder.committed() == [10, 20, 30, 40]


def test_requests_while_a_pass_runs_add_one_more_at_most(
    folder: CheckpointFolder, fence: Fence, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()
    passes = []

    def slow_pass(*_: object) -> dict[int, OSError]:
        passes.append(None)
        begun.release()
        assert go_on.wait(scaled(60))
        return {}

    monkeypatch.setattr(retention, "prune", slow_pass)
    pruner = Pruner(folder, Keep(last=2), fence)
    pruner.request()
    assert begun.acquire(timeout=scaled(60))
    for _ in range(5):
        pruner.request()
    go_on.set()
    pruner.close()
    assert len(passes) == 2


def set_aside(folder: CheckpointFolder, step: int, why: str, attempt: int) -> None:
    folder.step(step).mkdir(exist_ok=True)
    folder.set_aside(step, why, attempt)


def copies(folder: CheckpointFolder) -> set[str]:
    return {path.name for path in folder.copies()}


def test_what_was_set_aside_is_bounded_and_makes_room(
    folder: CheckpointFolder, fence: Fence
) -> None:
    for attempt in (2, 3, 4, 5):
        set_aside(folder, 50, "abandoned", attempt)
        set_aside(folder, 60, "damaged", attempt)
    pruner = Pruner(folder, Keep(last=2, damaged=2), fence)
    pruner.make_room()
    assert copies(folder) == {
        *(step_name(30), step_name(40), "step-00000050.abandoned-a5"),
        *("step-00000060.damaged-a4", "step-00000060.damaged-a5"),
    }
    (folder.path / ".step-00000070.a1-77aa").mkdir()  # a save that failed, and was left
    pruner.make_room()
    assert ".step-00000070.a1-77aa" not in copies(folder)
    pruner.close()


def test_what_is_kept_for_good_or_read_takes_no_room(
    folder: CheckpointFolder, fence: Fence
) -> None:
    set_aside(folder, 50, "abandoned", 2)
    pruner = Pruner(folder, Keep(last=2, every=20), fence)
    with retention.reading_at(folder.path / "step-00000050.abandoned-a2"):
        pruner.make_room()
        assert "step-00000050.abandoned-a2" in copies(folder)
    assert folder.committed() == [10, 20, 30, 40]  # no pass was needed
    pruner.close()


def test_nothing_more_is_written_where_nothing_can_be_deleted(
    folder: CheckpointFolder, fence: Fence, protect: Callable[[Path], None]
) -> None:
    protect(folder.step(10))
    protect(folder.step(20))
    pruner = Pruner(folder, Keep(last=2), fence)
    with pytest.raises(OSError, match="4 copies of steps are there, and those beyond 3 cannot be"):
        pruner.make_room()
    release(folder.path)
    pruner.make_room()
    assert folder.committed() == [30, 40]
    pruner.close()


def test_a_step_that_has_lost_its_manifest_is_damaged_once_room_is_needed(
    folder: CheckpointFolder, fence: Fence
) -> None:
    """As a purge of old files leaves it."""
    for step in (10, 20):
        (folder.step(step) / MANIFEST).unlink()
    pruner = Pruner(folder, Keep(last=2), fence)
    pruner.make_room()
    aside = {"step-00000010.damaged-a1", "step-00000020.damaged-a1"}
    assert copies(folder) == {*aside, step_name(30), step_name(40)}
    pruner.close()
