"""File systems that cannot do something, or not now, at each moment of a run.

It goes on, or says one sentence before the first step; and there are never more copies of steps
than are allowed.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from drilling import ALL, SMALLEST_MODEL
from faulty_storage.matrix import RUN
from faulty_storage.mount import Mount, mounted
from faulty_storage.rules import EMPTY, READS, WRITES, Match, Rule
from harness import Job, Run, end_jobs, made_once

from kempner.checkpoint.format.names import MANIFEST, CheckpointFolder
from kempner.checkpoint.store.selection import newest
from kempner.run.process.durable_io import await_entry
from kempner.run.record.attempts import Fence, SupersededError, begin_attempt, read_current
from kempner.run.record.lease import Lease, is_owned
from kempner.run.record.run_dir import RunDirectory

STEPS, KEEP, STOP_AFTER = 40, 2, 9
LASTS = 15.0 if ALL else 3.0
"""Seconds of what passes."""

PATIENCE = 4 * LASTS
"""Of which a fifth goes to files that were deleted."""

OVERRIDES = (
    *SMALLEST_MODEL,
    "--train.global_batch_size=4",
    "--train.micro_batch_size=2",
    f"--train.max_steps={STEPS}",
    "--checkpoint.interval=4",
    f"--checkpoint.keep_last={KEEP}",
    "--checkpoint.max_failures=1000",
    f"--resilience.patience={PATIENCE:g}",
    "--supervise.lease=3",
)

HERE = f"{RUN}/checkpoints"
ALL_OF_IT = (f"{HERE}/*",)
FIRST, SAVE, COMMITTED, RESUME, REQUEUE = "first start", "save", "committed", "resume", "requeue"
AFTER = {
    SAVE: Match((f"{HERE}/.step-*",), ("mkdir",)),
    COMMITTED: Match((f"{HERE}/step-*",), ("rename",)),
}
"""What the file system sees when a moment begins; the others begin with a start."""

COPY = re.compile(r"\.?step-\d")

NEW = ("create", "write", "mkdir", "symlink")
CHANGES = tuple(name for name in WRITES if name not in ("fsync", "flush"))


NOTHING = Match(())


@dataclass(frozen=True)
class Kind:
    """A file system: what it answers to which operations, and for how long; how a run that meets it
    ends, and what it says then. `purges` deletes files before a start instead."""

    fault: str = ""
    match: Match = NOTHING
    seconds: float | None = None
    code: int = 0
    says: str = ""
    moments: tuple[str, ...] = (FIRST, SAVE, COMMITTED, RESUME, REQUEUE)
    purges: bool = False

    def rule(self, moment: str) -> Rule:
        return Rule("kind", self.fault, self.match, self.seconds, after=AFTER.get(moment))


GONE = "although the ledger says that step"
KINDS = {
    **{
        f"no links ({code})": Kind(code, Match(ALL_OF_IT, ("symlink",)))
        for code in ("EPERM", "EOPNOTSUPP", "ENOSYS")
    },
    "late links": Kind(EMPTY, Match((f"{HERE}/latest",), ("stat", "readlink", "open")), LASTS),
    "no swap": Kind("EIO", Match((f"{HERE}/latest",), ("rename",))),
    "no commit": Kind("EIO", Match((f"{HERE}/step-*",), ("rename",)), LASTS),
    "no deletion": Kind("EIO", Match(ALL_OF_IT, ("unlink",)), LASTS),
    "quota": Kind("EDQUOT", Match(ALL_OF_IT, NEW), LASTS),
    "full": Kind("ENOSPC", Match(ALL_OF_IT, NEW), LASTS),
    "read-only": Kind("EROFS", Match(ALL_OF_IT, CHANGES), LASTS, moments=(SAVE, COMMITTED, RESUME)),
    "unmounted": Kind(
        EMPTY,
        Match((f"{HERE}/", *ALL_OF_IT), (*READS, *CHANGES)),
        LASTS,
        moments=(SAVE, COMMITTED, RESUME, REQUEUE),
    ),
    "purged": Kind(code=65, says=GONE, moments=(RESUME, REQUEUE), purges=True),
    "no renames of folders": Kind(
        "EPERM",
        Match((f"{HERE}/.kempner-probe-*/here",), ("rename",)),
        code=2,
        says="cannot rename folders",
        moments=(FIRST, RESUME),
    ),
}

CELLS = [(kind, moment) for kind in KINDS for moment in KINDS[kind].moments]
FEW = [("no links (EPERM)", FIRST), ("no swap", REQUEUE), ("purged", RESUME), ("no deletion", SAVE)]


@dataclass
class Watched:
    """Counts the copies of steps all the time, as they are on the disk."""

    folder: CheckpointFolder
    most: int = 0

    def __enter__(self) -> Watched:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            with suppress(FileNotFoundError), os.scandir(self.folder.path) as found:
                # By number: while a folder is renamed, both of its names may be listed.
                ours = [e for e in found if COPY.match(e.name) and ".damaged-" not in e.name]
                self.most = max(self.most, len({entry.inode() for entry in ours}))


@pytest.fixture(scope="session")
def undisturbed(shared: Path, tokens: Path) -> Run:
    complete = lambda folder: Run(folder, tokens).complete(1, *OVERRIDES)  # noqa: E731
    return Run(made_once(shared / "storages-undisturbed", complete), tokens)


@pytest.fixture
def run(storage: Mount, tokens: Path) -> Iterator[Run]:
    run = Run(storage.path / "a", tokens)
    yield run
    storage.clear()
    end_jobs(run)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "moment"), CELLS if ALL else FEW)
def test_each_file_system_at_each_moment(
    kind: str, moment: str, storage: Mount, run: Run, undisturbed: Run
) -> None:
    what, folder = KINDS[kind], CheckpointFolder(storage.folder / HERE)
    with Watched(folder) as watched:
        if moment in (RESUME, REQUEUE):
            begin = lambda: meet(what, moment, storage, folder)  # noqa: E731
            stop(run, begin if moment == REQUEUE and not what.purges else None)
            if moment == RESUME or what.purges:
                begin()
        else:
            meet(what, moment, storage, folder)
        before = len(run.steps())
        job = run.supervise(1, *OVERRIDES)
        assert job.wait(120 + 4 * LASTS) == what.code, job.output()
    assert watched.most <= KEEP + 2
    if what.code:
        assert what.says in job.output()
        assert len(run.steps()) == before
        return
    assert what.purges or storage.faults("kind")
    storage.clear()
    assert newest(folder) == STEPS
    assert run.weights() == undisturbed.weights()
    assert run.steps().keys() == undisturbed.steps().keys()


def stop(run: Run, meanwhile: Callable[[], None] | None) -> Job:
    """Stop a run after a few steps, and commit the last of them."""
    job = run.supervise(1, *OVERRIDES, '--resilience.faults=["slow rank 0 by 9 from step 9"]')
    run.reach(STOP_AFTER, job)
    if meanwhile is not None:
        meanwhile()
    job.signal()
    assert job.wait(120 + 4 * LASTS) == 75, job.output()
    return job


def meet(what: Kind, moment: str, storage: Mount, folder: CheckpointFolder) -> None:
    if not what.purges:
        storage.add(what.rule(moment))
        return
    for path in folder.path.rglob("*"):
        if path.is_symlink() or not path.is_dir():
            path.unlink()


LATE = 30.0
"""Seconds for which a client believes what it has seen; no test waits for that."""


def test_a_second_client_that_sees_files_late_finds_what_another_host_has_made(
    fuse: None, tmp_path: Path
) -> None:
    """By opening folders anew: its kernel still answers that the names are not there."""
    with mounted(tmp_path / "storage", LATE) as client:
        there, here = (RunDirectory(path / "run") for path in (client.folder, client.path))
        attempt = begin_attempt(there)
        folder = CheckpointFolder(here.checkpoints)
        committed = client.folder / "run" / "checkpoints" / "step-00000010"
        committed.mkdir(parents=True)
        assert folder.committed() == []
        assert not (folder.step(10) / MANIFEST).exists()
        (committed / MANIFEST).write_text("{}")
        assert not (folder.step(10) / MANIFEST).exists()  # which is the fault
        assert folder.committed() == [10]
        assert await_entry(folder.step(10) / MANIFEST, 0.0)
        assert newest(folder) == 10
        assert Fence(here.attempts, attempt).check() is None
        following = begin_attempt(there)
        with pytest.raises(SupersededError):
            Fence(here.attempts, attempt).check()
        lease = Lease.acquire(there, 2.0)
        assert is_owned(here.supervisors)
        lease.release()
        assert not is_owned(here.supervisors)
        assert read_current(here.attempts) == following
