"""What a node says of itself, measured on a machine that really is in trouble."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kempner.cluster.slurm.node_step import whole_answers
from kempner.probe import node as probe
from kempner.probe.node import (
    MARK,
    ProbeQuestion,
    ProbeResult,
    measure,
    question_text,
    read_result,
)

NONCE = "12345678"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in which the supervisor has written its nonce."""
    folder = tmp_path / "run" / "health"
    folder.mkdir(parents=True)
    (folder / MARK).write_text(NONCE)
    return folder


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "SHARED_WITHIN", 0.0)


def ask(*folders: Path, **changes: object) -> ProbeQuestion:
    whole = ProbeQuestion(NONCE, tuple(map(str, folders)), None, on_one_node=True)
    return replace(whole, **changes)  # type: ignore[arg-type]


def test_a_node_that_is_well_has_no_troubles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    before = time.time()
    told = measure(ask(folder))
    assert told.troubles == {}
    assert told.node == "node7"
    assert (folder / "node7").read_text() == NONCE
    assert before <= told.time <= time.time()
    assert 0 < told.memory.free <= told.memory.total
    assert set(told.disk_free) == {os.environ.get("TMPDIR") or "/tmp", "/dev/shm"}


def test_a_folder_of_the_same_name_that_is_another_one(tmp_path: Path, folder: Path) -> None:
    elsewhere = tmp_path / "other" / "health"
    (folder / MARK).write_text("what another one wrote")
    expected = "is not the same folder as on the supervisor's node"
    told = measure(ask(folder, elsewhere)).troubles
    assert told == {str(f): f"{f.parent} {expected}" for f in (folder, elsewhere)}


def test_a_full_file_system(small_disk: Path) -> None:
    (small_disk / MARK).write_text(NONCE)
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "ballast").write_bytes(bytes(8 << 20))
    told = measure(ask(small_disk)).troubles
    assert told[str(small_disk)].endswith("cannot be used: No space left on device")


def test_a_file_system_that_is_read_only(small_disk: Path) -> None:
    (small_disk / MARK).write_text(NONCE)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    told = measure(ask(small_disk)).troubles
    assert told[str(small_disk)].endswith("cannot be used: Read-only file system")


def test_temporary_files_on_a_small_disk(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(small_disk))
    assert measure(ask()).disk_free[str(small_disk)] <= 4 << 20
    monkeypatch.setenv("TMPDIR", str(small_disk / "absent"))
    told = measure(ask()).troubles
    assert told[str(small_disk / "absent")].endswith("cannot be used: No such file or directory")


def test_an_interface_that_is_not_there() -> None:
    told = measure(ask(interface="ib7"))
    assert told.interface is None
    assert "distributed.interface=ib7 does not exist on this node" in told.troubles["interface"]


def in_a_process(question: ProbeQuestion, prepare: Callable[[], None] | None = None) -> ProbeResult:
    """The vitals as a node's own process prints them."""
    done = subprocess.run(
        [sys.executable, "-m", probe.__name__, question_text(question)],
        preexec_fn=prepare,
        capture_output=True,
        text=True,
        check=True,
    )
    (answer,) = whole_answers(done.stdout.splitlines())
    told = read_result(answer)
    assert told is not None
    return told


def test_the_command_prints_what_can_be_read_again(folder: Path) -> None:
    limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (64, 64))
    told = in_a_process(ask(folder), limit)
    assert told.open_files == 64
    assert told.troubles == {}
    assert (folder / told.node).read_text() == NONCE


@pytest.mark.parametrize("line", ["", "srun: error: node2", "{}", "[1]", '{"node": "x"}'])
def test_a_line_of_anything_else_is_no_answer(line: str) -> None:
    assert read_result(line) is None
