"""SIGKILL before each distinct system call of a salvage: the run has the step before, or that one,
and the next salvage finds nothing in its way."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from drilling import ALL, SEED, note
from patience import scaled
from promises import broken, resumable
from tracer import Call, Tracer, supported

from kempner.checkpoint.format.names import CheckpointFolder
from kempner.run.record.run_dir import RunDirectory

pytestmark = [
    pytest.mark.timeout(3000 if ALL else 400),
    pytest.mark.skipif(not supported(), reason="the tracer knows the system calls of x86_64 only"),
]

PROGRAM = Path(__file__).with_name("salvaging.py")
KILLS = None if ALL else 5
CHANGES = {"mkdir", "openat", "fallocate", "pwrite64", "write", "sync_file_range", "fsync"}
CHANGES |= {"rename", "symlink", "unlink", "unlinkat", "rmdir", "close", "readlink", "fcntl"}

Moment = tuple[str, str]
AFTER: Moment = ("write", "/ledger.jsonl")
"""When all is done but told."""


class Salvage:
    """The program at work, traced from where it begins."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDirectory(folder)
        command = [sys.executable, str(PROGRAM), str(folder)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def go(self, kill_at: Moment | None) -> set[Moment]:
        """To its end, or to its death before that call; the calls that it came to."""
        seen: set[Moment] = set()

        def entered(call: Call) -> None:
            if (moment := self._moment(call)) is None:
                return
            if moment == kill_at and moment not in seen:
                os.kill(call.pid, signal.SIGKILL)
            seen.add(moment)

        tracer = Tracer([self.process.pid], entered)
        self.process.communicate("go\n", timeout=scaled(60))
        tracer.join()
        return seen  # only the tracer knows how it has ended

    def _moment(self, call: Call) -> Moment | None:
        """What the call does to which file of the run; the nonces in their names are left out."""
        base = str(self.run.path)
        if call.name not in CHANGES or not (call.path or call.target).startswith(base):
            return None
        path = re.sub(r"-[0-9a-f]{8}", "-N", (call.path or call.target).removeprefix(base))
        return call.name, path


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A run whose first step was salvaged."""
    folder = tmp_path / "begun"
    process = Salvage(folder).process
    process.kill()
    process.communicate()
    return folder


def test_a_kill_before_any_call_of_a_salvage_leaves_what_can_be_resumed(
    begun: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(begun, plain, symlinks=True)
    moments = Salvage(plain).go(None)
    assert CheckpointFolder(RunDirectory(plain).checkpoints).latest() == 2
    plan = sorted(moments - {AFTER})
    Random(SEED).shuffle(plan)
    plan.insert(0, AFTER)
    found: set[int | None] = set()
    for number, moment in enumerate(plan[:KILLS]):
        folder = tmp_path / str(number)
        shutil.copytree(begun, folder, symlinks=True)
        came = Salvage(folder).go(moment)
        assert moment in came <= moments
        checkpoints = RunDirectory(folder).checkpoints
        assert not broken(checkpoints, 1), moment
        best = resumable(CheckpointFolder(checkpoints))
        assert best in (1, 2)
        found.add(best)
        Salvage(folder).go(None)  # what was left is not in its way
        assert not broken(checkpoints, 2), moment
        shutil.rmtree(folder)
    note("kills in a salvage", moments=len(moments), kills=len(plan[:KILLS]), found=len(found))
    assert len(moments) > 20
    assert found == {1, 2}
