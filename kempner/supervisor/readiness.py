"""Readiness: checks in a second, before any rank starts, what a configuration asks for.

Nothing is written, so that a corrected command starts as if there had been no other. The ranks
check what they read again, for themselves.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from kempner.checkpoint.format.manifest import Identity, read
from kempner.checkpoint.format.names import CheckpointFolder
from kempner.checkpoint.store.commit import judge_room
from kempner.checkpoint.store.selection import choose, compare_identities
from kempner.cluster.slurm.job import restart_count
from kempner.config.sections import Config
from kempner.data.files.index import (
    Index,
    check_held_out,
    check_samples,
    find_data,
    fingerprint,
    vocabulary,
)
from kempner.model.spec.memory import checkpoint_bytes
from kempner.model.spec.mesh import check_tensor_degree
from kempner.model.spec.shape import model_record
from kempner.run.process.exit_codes import CheckpointWriteError, DataError, UsageError
from kempner.run.process.retry import is_passing, storage_waits
from kempner.run.record.attempts import CURRENT
from kempner.run.record.recorded_config import changes_since, describe_changes, used_before
from kempner.run.record.run_dir import RunDirectory

T = TypeVar("T")

_LONGEST_NAME = 255
"""Bytes of a file's name on any file system of Linux."""


@dataclass(frozen=True)
class Ready:
    """What was found: how many token ids the model has, and what is worth a warning."""

    vocab_size: int
    warnings: tuple[str, ...] = ()


def check_run_directory(run: RunDirectory, environ: Mapping[str, str] = os.environ) -> None:
    """Raise `UsageError` if the run's directory cannot be created or written.

    A directory that was written before raises nothing here: the error may pass, and writes retry.
    """
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


def _check_inside(run: RunDirectory) -> None:
    """Raise `UsageError` if something else is in the place of what the run has there."""
    for file in (run.ledger, run.metrics, run.gave_up, run.config):
        if _look(file.is_dir, file):
            raise UsageError(f"{file} is a folder, where the run needs a file; move it away")
    for folder in (run.attempts, run.supervisors):
        if _look(folder.is_file, folder):
            raise UsageError(f"{folder} is a file, where the run needs a folder; move it away")


def check_ready(
    config: Config, run: RunDirectory, environ: Mapping[str, str] = os.environ
) -> Ready:
    """Check data, the newest checkpoint and the room for others against a configuration.

    Raises `DataError` if data or checkpoint do not fit, `UsageError` if the model cannot be spread
    over a tensor group, `CheckpointWriteError` if not even one checkpoint has room, each saying
    what to do, and as `StorageWaits.retry` where it cannot be seen now.
    """
    index = _find_data(run, "data", config.data.dataset_path)
    vocab_size = vocabulary(config, index)
    check_tensor_degree(config, vocab_size)
    check_samples(config, index)
    if config.eval.interval is not None and config.eval.dataset_path is not None:
        check_held_out(config, index, _find_data(run, "eval", config.eval.dataset_path))
    folder = CheckpointFolder(
        Path(config.checkpoint.dir) if config.checkpoint.dir else run.checkpoints
    )
    began_before = _began_before(run, environ)
    committed = _look(folder.committed, folder.path, began_before) or []
    latest = _look(folder.latest, folder.path, began_before)
    if (step := choose(committed, latest)) is not None:
        _check_resume(config, run, folder.step(step), index, vocab_size)
    size = checkpoint_bytes(config, vocab_size)
    free = _look(partial(_free_bytes, folder.path), folder.path)
    if free is None or size is None:
        return Ready(vocab_size)
    room = judge_room(free, size, len(committed), config.checkpoint.keep_last)
    if room.refused and not (committed or began_before):
        raise CheckpointWriteError(f"{folder.path}: {room.sentence}")
    return Ready(vocab_size, (f"{folder.path}: {room.sentence}",) if room.sentence else ())


def _look(work: Callable[[], T], path: Path, worked: bool = False) -> T | None:
    """What `work` finds; None where it fails in another way than for now: the ranks will see."""
    try:
        return storage_waits().retry(work, worked, path=path)
    except OSError:
        return None


def _free_bytes(folder: Path) -> int:
    """On the disk where a folder is or will be. Raises `OSError`."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    return shutil.disk_usage(there).free


def _began_before(run: RunDirectory, environ: Mapping[str, str]) -> bool:
    """Whether this is not the run's first start, as far as that can be seen."""
    return restart_count(environ) > 0 or os.access(run.attempts / CURRENT, os.R_OK)


def _find_data(run: RunDirectory, section: str, folder: str) -> Index:
    worked = used_before(run, section, "dataset_path", folder)
    return find_data(section, folder, worked)


def _check_resume(
    config: Config, run: RunDirectory, checkpoint: Path, index: Index, vocab_size: int
) -> None:
    """Raise `DataError` if the run cannot go on from a checkpoint, configured so.

    Of one that is damaged nothing is said: the ranks go on to the next.
    """
    try:
        manifest = read(checkpoint)
    except (DataError, OSError):
        return
    now = Identity(
        world=manifest.identity.world,
        mesh={},
        seed=config.train.seed,
        data_fingerprint=fingerprint(index, config.train.seq_len),
        model=model_record(config.model, vocab_size),
        optimizer=config.optimizer.name,
    )
    judgement = compare_identities(manifest.identity, now, config.checkpoint.accept_changes)
    if judgement.refusals:
        changes = changes_since(run, manifest.attempt, config.model_dump(exclude_none=True))
        raise DataError(judgement.sentence(checkpoint) + describe_changes(changes))
