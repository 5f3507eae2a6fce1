"""Readiness: checks, within a second and before any rank starts, that a run can begin with its
configuration.

Leaves nothing behind, so that a corrected command starts afresh. The ranks check again what they
read."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from kempner.checkpoint.format.manifest import Identity, read
from kempner.checkpoint.format.names import CheckpointFolder
from kempner.checkpoint.store.commit import judge_room
from kempner.checkpoint.store.selection import (
    MissingError,
    compare_identities,
    find_base,
    newest,
    refuse_if_missing,
)
from kempner.cluster.slurm.job import restart_count
from kempner.config.loading import dumps
from kempner.config.sections import Config
from kempner.data.files.index import (
    Index,
    check_held_out,
    check_samples,
    find_data,
    fingerprint,
    vocabulary,
)
from kempner.model.spec.adapter import Adapter
from kempner.model.spec.memory import checkpoint_bytes
from kempner.model.spec.mesh import check_tensor_degree
from kempner.model.spec.shape import model_record
from kempner.run.process.durable_io import probe_file_system, replace_durable
from kempner.run.process.exit_codes import (
    CheckpointWriteError,
    DataError,
    ExitCode,
    UsageError,
    cannot_write,
)
from kempner.run.process.retry import describe, is_passing, storage_waits
from kempner.run.record.attempts import CURRENT
from kempner.run.record.events import AttemptEnded, AttemptStarted, Completed
from kempner.run.record.history import RunHistory
from kempner.run.record.program import files_of_words, script_of_words
from kempner.run.record.recorded_config import (
    changes_since,
    describe_changes,
    last_config,
    used_before,
)
from kempner.run.record.run_dir import RunDirectory

T = TypeVar("T")

_LONGEST_NAME = 255
"""Bytes of a file's name on any file system of Linux."""


@dataclass(frozen=True)
class Ready:
    vocab_size: int
    warnings: tuple[str, ...] = ()


def check_run_directory(run: RunDirectory, environ: Mapping[str, str] = os.environ) -> None:
    """Raise `UsageError` if the run's directory cannot be created or written. Not if it was written
    before: the error may pass, and writes are retried."""
    advice = "set run.dir and run.name to a folder that can be written"
    if any(len(os.fsencode(name)) > _LONGEST_NAME for name in run.path.parts):
        raise UsageError(f"the run's directory cannot be {run.path}: a name is too long; {advice}")
    for there in (run.path, *run.path.absolute().parents):
        try:
            mode = there.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            if is_passing(error, _began_before(run, environ)):
                return
            raise UsageError(
                f"the run's directory cannot be {run.path} ({error.strerror}); {advice}"
            ) from error
        if not stat.S_ISDIR(mode):
            raise UsageError(
                f"the run's directory cannot be {run.path}: {there} is a file; {advice}"
            )
        if not (os.access(there, os.W_OK | os.X_OK) or _began_before(run, environ)):
            raise UsageError(
                f"the run's directory {run.path} cannot be written: no permission for {there}; "
                f"{advice}"
            )
        break
    _check_inside(run)
    _check_rights(run)


def _check_rights(run: RunDirectory) -> None:
    """Raise `UsageError` if the modes of the run's files keep this user from writing them. A
    permission that is lost for a while, such as with an expired Kerberos ticket, does not show in
    the modes."""
    for path in (run.path, run.ledger, run.metrics, run.attempts, run.supervisors, run.checkpoints):
        found = _look(path.stat, path)
        if found is not None and not (os.access(path, os.W_OK) or _may_write(found)):
            raise UsageError(
                f"{path} belongs to {_name(found.st_uid)} and cannot be written by you: two users "
                "of a group can go on with one run where its files are writable for the group "
                "(umask 002; for this run chmod -R g+w), or set run.name to another run"
            )


def _may_write(found: os.stat_result) -> bool:
    if os.geteuid() in (0, found.st_uid):
        return os.geteuid() == 0 or bool(found.st_mode & stat.S_IWUSR)
    if found.st_gid in (os.getegid(), *os.getgroups()):
        return bool(found.st_mode & stat.S_IWGRP)
    return bool(found.st_mode & stat.S_IWOTH)


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"


def _check_inside(run: RunDirectory) -> None:
    """Raise `UsageError` if a folder is in the place of one of the run's files, or vice versa."""
    for file in (run.ledger, run.metrics, run.gave_up, run.config):
        if _look(file.is_dir, file):
            raise UsageError(f"{file} is a folder, where the run needs a file; move it away")
    for folder in (run.attempts, run.supervisors):
        if _look(folder.is_file, folder):
            raise UsageError(f"{folder} is a file, where the run needs a folder; move it away")


def check_ready(
    config: Config, run: RunDirectory, environ: Mapping[str, str] = os.environ
) -> Ready:
    """Check that data and newest checkpoint fit the configuration, and that there is room for
    checkpoints.

    Raises `DataError` if data or checkpoint do not fit or checkpoints are missing, `UsageError` if
    the model cannot be spread over a tensor group or the file system cannot hold checkpoints,
    `CheckpointWriteError` if there is no room for even one checkpoint, and as
    `StorageWaits.retry`."""
    index = _find_data(run, "data.dataset_path", config.data.dataset_path)
    vocab_size = vocabulary(config, index)
    check_tensor_degree(config, vocab_size)
    check_samples(config, index)
    for held_out in config.eval.due:
        found = _find_data(run, held_out.key, held_out.folder)
        check_held_out(config, index, held_out, found)
    folder = CheckpointFolder(
        Path(config.checkpoint.dir) if config.checkpoint.dir else run.checkpoints
    )
    began_before = _began_before(run, environ)
    _refuse_if_missing(config, run, folder)
    if folder.path.is_dir() and (refusal := probe_file_system(folder.path).refusal(folder.path)):
        raise UsageError(refusal)
    committed = _look(folder.committed, folder.path, began_before) or []
    if config.adapter.rank is not None:
        _look(partial(find_base, folder), folder.path, began_before)
    if (step := _look(partial(newest, folder), folder.path, began_before)) is not None:
        _check_resume(config, run, folder.step(step), index, vocab_size)
    size = checkpoint_bytes(config, vocab_size)
    free = _look(partial(_free_bytes, folder.path), folder.path)
    if free is None or size is None:
        return Ready(vocab_size)
    room = judge_room(free, size, len(committed), config.checkpoint.keep_last)
    if room.refused and not (committed or began_before):
        raise CheckpointWriteError(f"{folder.path}: {room.sentence}")
    return Ready(vocab_size, (f"{folder.path}: {room.sentence}",) if room.sentence else ())


def _refuse_if_missing(config: Config, run: RunDirectory, folder: CheckpointFolder) -> None:
    history = _look(partial(RunHistory.read, run.ledger), run.ledger, worked=True)
    known = None if history is None else history.last_step
    here = used_before(run, "checkpoint.dir", config.checkpoint.dir)
    try:
        storage_waits().retry(partial(refuse_if_missing, folder, known), here, path=folder.path)
    except MissingError as error:
        raise DataError(describe(error)) from error
    except OSError:
        return  # the ranks will report it


def await_script(command: Sequence[str], run: RunDirectory) -> None:
    """Wait for the script of a program that has run before, if it is unavailable for a moment. One
    that never existed is reported by the interpreter. Raises as `StorageWaits.retry`."""
    script = script_of_words(command, Path.cwd())
    if script is not None:
        _look(script.stat, script, _began_before(run, os.environ))


def keep_accepted(run: RunDirectory, config: Config) -> None:
    """Write the accepted configuration, which all ranks read: the user's file may be edited
    meanwhile. A later start whose configuration cannot be used falls back to it. Raises as
    `StorageWaits.retry`."""
    content = dumps(config).encode()

    def write() -> None:
        run.path.mkdir(parents=True, exist_ok=True)
        replace_durable(run.accepted, content, unique=secrets.token_hex(4))

    try:
        storage_waits().retry(write, worked=True, path=run.accepted)  # the lease is beside it
    except OSError as error:
        raise cannot_write(run.accepted, error) from error


def complete_before(config: Config, run: RunDirectory, command: Sequence[str] = ()) -> str:
    """Why there is nothing to start: the run is complete, and nothing has changed. Empty if
    anything may have changed or cannot be read, including the last checkpoint."""
    try:
        if run.gave_up.exists() or not _is_same(config, run):
            return ""
        history = RunHistory.read(run.ledger)
        entries = history.entries(AttemptStarted, AttemptEnded)
        ended = entries[-1] if entries else None
        if ended is None or not isinstance(ended.event, AttemptEnded):
            return ""
        if ended.event.code != ExitCode.COMPLETED or ended.event.left_at is not None:
            return ""
        if command:
            return _WAS_COMPLETE.format(path=run.path) if _older(command, ended.time) else ""
        done = [event.step for event in history.events(Completed)]
        folder = CheckpointFolder(
            Path(config.checkpoint.dir) if config.checkpoint.dir else run.checkpoints
        )
        if (kept := newest(folder)) is not None:
            read(folder.step(kept))
    except (DataError, OSError):
        return ""
    last = config.train.max_steps
    complete = bool(done) and done[-1] >= last and kept is not None and kept >= last
    return _WAS_COMPLETE.format(path=run.path) if complete else ""


_WAS_COMPLETE = (
    "the run in {path} is complete, and nothing has changed since: nothing is started (another "
    "--run.name begins anew)"
)


def _is_same(config: Config, run: RunDirectory) -> bool:
    before = last_config(run)
    return before is not None and before.read_bytes() == dumps(config).encode()


def _older(command: Sequence[str], than: float) -> bool:
    """Whether all files of a command's program that can be found are older than a time."""
    found = files_of_words(command, Path.cwd())
    return bool(found) and all(
        max(path.stat().st_mtime, path.stat().st_ctime) < than for path in found.values()
    )


def _look(work: Callable[[], T], path: Path, worked: bool = False) -> T | None:
    """The result of `work`, retried while errors may pass; None after another error, which the
    ranks will report."""
    try:
        return storage_waits().retry(work, worked, path=path)
    except OSError:
        return None


def _free_bytes(folder: Path) -> int:
    """Free bytes on the disk of a folder that exists or will. Raises `OSError`."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    return shutil.disk_usage(there).free


def _began_before(run: RunDirectory, environ: Mapping[str, str]) -> bool:
    """Whether the run was started before, as far as can be seen."""
    return restart_count(environ) > 0 or os.access(run.attempts / CURRENT, os.R_OK)


def _find_data(run: RunDirectory, key: str, folder: str) -> Index:
    return find_data(key, folder, used_before(run, key, folder))


def _check_resume(
    config: Config, run: RunDirectory, checkpoint: Path, index: Index, vocab_size: int
) -> None:
    """Raise `DataError` if the run cannot resume from a checkpoint with this configuration. A
    damaged checkpoint is ignored: the ranks load the one before."""
    try:
        manifest = read(checkpoint)
    except (DataError, OSError):
        return
    adapter = Adapter.of(config.adapter)
    now = Identity(
        world=manifest.identity.world,
        mesh={},
        seed=config.train.seed,
        data_fingerprint=fingerprint(index, config.train.seq_len),
        model=model_record(config.model, vocab_size),
        optimizer=config.optimizer.name,
        adapter=None if adapter is None else adapter.fixed(),
    )
    judgement = compare_identities(manifest.identity, now, config.checkpoint.accept_changes)
    if judgement.refusals:
        changes = changes_since(run, manifest.attempt, config.model_dump(exclude_none=True))
        raise DataError(judgement.sentence(checkpoint) + describe_changes(changes))
