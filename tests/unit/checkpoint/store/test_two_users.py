"""Two users of a group go on with one run, in a folder with the setgid bit."""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from test_checkpoint_folder import Store

from kempner.checkpoint.store import commit, retention
from kempner.run.process.exit_codes import UsageError
from kempner.run.record.attempts import Fence, begin_attempt
from kempner.run.record.events import CheckpointCommitted
from kempner.run.record.lease import Lease
from kempner.run.record.ledger import Ledger
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.readiness import check_run_directory

FIRST, SECOND, GROUP, OWN_GROUP = 61001, 61002, 61003, 61004

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two other users")


@pytest.fixture
def shared() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kempner-group-"))
    os.chown(folder, 0, GROUP)
    folder.chmod(0o2775)
    yield folder
    shutil.rmtree(folder)


def as_user(user: int, umask: int, work: Callable[[], None]) -> str:
    """Do it in a process of that user; what it raised."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.setgroups([GROUP])
            os.setresgid(OWN_GROUP, OWN_GROUP, OWN_GROUP)
            os.setresuid(user, user, user)
            os.umask(umask)
            work()
        except BaseException:  # noqa: BLE001 - the parent raises
            os.write(writing, traceback.format_exc().encode()[-2000:])
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as told:
        said = told.read()
    os.waitpid(pid, 0)
    return said


def go_on(run: RunDirectory, *steps: int) -> None:
    """What a start does with the record and the checkpoints."""
    check_run_directory(run, {})
    lease = Lease.acquire(run, 3.0)
    store = Store(run, Fence(run.attempts, begin_attempt(run)), [])
    ledger = Ledger(run.ledger)
    folder = store.folder
    if (newest := max(folder.committed(), default=None)) is not None:
        commit.go_on_from(folder, newest, store.fence, store.reports.append)
    pruner = retention.Pruner(folder, retention.Keep(last=2), store.fence)
    for step in steps:
        pruner.make_room()
        commit.commit(folder, *store.write(step), store.fence, store.reports.append)
        ledger.record(CheckpointCommitted(step, 1), store.fence.attempt.number)
        pruner.request()
        pruner.settle()
    assert ledger.unwritten() == []
    assert folder.committed() == [*steps[-2:]]
    lease.release()


def test_both_go_on_with_it_where_files_are_the_groups(shared: Path) -> None:
    run = RunDirectory(shared / "run")
    assert as_user(FIRST, 0o002, partial(go_on, run, 10, 20, 30)) == ""
    assert as_user(SECOND, 0o002, partial(go_on, run, 40, 50)) == ""
    assert as_user(FIRST, 0o002, partial(go_on, run, 60, 70)) == ""
    files = [path for path in run.path.rglob("*") if not path.is_symlink()]
    assert {path.stat().st_gid for path in files} == {GROUP}
    assert all(path.stat().st_mode & 0o020 for path in files)


def test_a_record_that_is_anothers_alone_is_refused_before_anything(shared: Path) -> None:
    run = RunDirectory(shared / "run")
    assert as_user(FIRST, 0o022, partial(go_on, run, 10, 20)) == ""
    before = sorted(run.path.rglob("*"))
    said = as_user(SECOND, 0o002, partial(go_on, run, 30))
    assert UsageError.__name__ in said
    assert f"belongs to user {FIRST} and cannot be written by you" in said
    assert sorted(run.path.rglob("*")) == before
