"""`FolderCheckpoints`: commits what another library writes.

The library writes its files into a folder that it is given, each rank its own. When all of them are
on disk and summed, rank 0 commits that folder as it commits kempner's own: a crash leaves the
commit before or this one, never a torn one, and what does not verify is set aside and not loaded.

Every method is called on every rank, in the same order. A save ends before `save` returns, since
the library may change its state afterwards.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import xxhash

from kempner.checkpoint.context import CheckpointContext
from kempner.checkpoint.format.manifest import FileEntry, Manifest, TrainState
from kempner.checkpoint.format.names import MANIFEST, in_progress_name
from kempner.checkpoint.io.verify import Damage, verify_files
from kempner.checkpoint.store import commit, retention
from kempner.checkpoint.store.commit import SaveFailures
from kempner.checkpoint.store.selection import choose
from kempner.checkpoint.tensors.restore import Restorer
from kempner.run.output.logs import logger
from kempner.run.process.durable_io import fsync_directory, join_directory
from kempner.run.process.exit_codes import DataError
from kempner.run.process.retry import StorageUnavailableError, describe
from kempner.run.record.attempts import SupersededError
from kempner.run.record.events import CheckpointCommitted, CheckpointFailed, Resumed
from kempner.run.record.save_times import Durations, SaveSeconds

_READ_BYTES = 4 << 20

_OF_STORAGE = re.compile(r"PytorchStreamWriter|inline_container|I/O error|No space left|quota")
"""In the words of errors that are no `OSError` though storage has failed: torch's and safetensors'.
"""

Write = Callable[[Path], None]
"""Writes this rank's part of the state into a folder; called on every rank at once."""


class FolderCheckpoints:
    """Saves by `write` below the folder of `context`; `restore` says which folder to load from.

    `keep` says which checkpoints stay; `keep_only` replaces it. `durations` is what is known of
    earlier saves.
    """

    def __init__(
        self,
        context: CheckpointContext,
        write: Write,
        *,
        keep: retention.Keep,
        durations: Durations = Durations(),  # noqa: B008 - frozen
    ) -> None:
        self._context, self._folder, self._write = context, context.folder, write
        self._restorer = _FolderRestorer(context)
        self._pruner = retention.Pruner(context.folder, keep, context.fence)
        self._failed, self._superseded = SaveFailures(), ""
        self._unfinished: int | None = None
        self.committed_step: int | None = None
        """Step of the newest commit of this run."""
        self.durations = durations
        """How long saves take; rank 0 knows."""

    def restore(self) -> tuple[TrainState, Path] | None:
        """The newest checkpoint that verifies, and its folder; None if the run has none.

        A damaged one is set aside, never deleted. Raises `DataError` if none of those that there
        are can be used.
        """
        self._restorer.prepare_folder()
        train_state = self._restorer.load_newest(self._choose, ())
        if train_state is not None:
            self.committed_step = train_state.step
            self._context.record(Resumed(train_state.step))
            return train_state, self._folder.step(train_state.step)
        if link := self._context.broadcast_from_rank0(self._folder.latest):
            raise DataError(
                f"no checkpoint in {self._folder.path} verifies, although `latest` names step "
                f"{link}; to start over from step 0, remove that link"
            )
        return None

    def save(self, train_state: TrainState, counted: int | None = None) -> None:
        """Save and commit the state as of `train_state`; how it ended, `failures` tells.

        `counted` is as for `CheckpointEngine.save`. Raises `SupersededError`, on all ranks alike,
        if a newer attempt owns the run, and what the library raises that is no `OSError`.
        """
        self.join()
        if counted is not None and self._failed.count > counted:
            return
        started, step = time.monotonic(), train_state.step
        path = self._folder.path / self._context.broadcast_from_rank0(partial(self._name, step))
        notes = self._context.gather(self._write_part(path))
        written = time.monotonic()
        names = sorted({name for note in notes for name in note.names})
        rank, world = self._context.rank, self._context.world
        sums = self._context.gather(
            _sums(path, names[rank::world]) if _good(notes) else _PartReport()
        )
        told = self._context.broadcast_from_rank0(
            partial(self._conclude, train_state, path, [*notes, *sums], started, written)
        )
        self._take_note(train_state, told, time.monotonic() - started)

    def make_again(self) -> None:
        """The newest commit is not all of its step: a save of that step takes its place."""
        self._unfinished, self.committed_step = self.committed_step, None

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` is, or will be."""
        return self._folder.step(step)

    def keep_only(self, keep: retention.Keep) -> None:
        """From the next commit on these stay."""
        self._pruner.keep = keep

    def poll(self) -> None:
        """There is never a save under way."""

    def settle(self, timeout: float | None = None) -> None:
        """There is never a save under way."""

    def join(self) -> None:
        """Raise `SupersededError`, on all ranks alike, if a newer attempt owns the run."""
        if self._superseded:
            raise SupersededError(self._superseded)

    @property
    def in_flight(self) -> tuple[int, float] | None:
        """There is never a save under way."""
        return None

    @property
    def failures(self) -> SaveFailures:
        """The saves that failed since the last commit."""
        return self._failed

    @property
    def superseded(self) -> bool:
        """Whether a newer attempt owns the run."""
        return bool(self._superseded)

    def close(self, timeout: float | None = None) -> None:
        """Wait, `timeout` seconds at most, for deletions."""
        self._pruner.close(timeout)

    def _choose(self) -> int | None:
        return choose(self._folder.committed(), self._folder.latest())

    def _name(self, step: int) -> str:
        """Of a new folder for the files of all ranks."""
        return in_progress_name(step, self._context.fence.attempt.number, secrets.token_hex(4))

    def _write_part(self, path: Path) -> _PartReport:
        """Have this rank's files written. An error is kept: the others wait to be told of it."""
        try:
            join_directory(path)
            self._write(path)
            return _PartReport(names=tuple(_list(path)))
        except Exception as error:  # noqa: BLE001 - counted as a failed save, on all ranks
            return _PartReport.failed(error)

    def _conclude(
        self,
        train_state: TrainState,
        path: Path,
        parts: Sequence[_PartReport],
        started: float,
        written: float,
    ) -> _Outcome:
        """Rank 0: commit, if every part is there; how the save has ended."""
        world = self._context.world
        reasons = {f"rank {at % world}": part.why for at, part in enumerate(parts) if part.why}
        if not reasons:
            files = {name: entry for part in parts for name, entry in part.files}
            try:
                took = self._commit(train_state, path, files, started, written)
                return _Outcome(took=took)
            except SupersededError as error:
                return _Outcome(superseded=str(error))
            except OSError as error:
                reasons = {"rank 0": describe(error)}
        step = train_state.step
        if not self._failed.count:  # once for all that follow
            logger().warning("checkpoint failed; the last one is intact", step=step, **reasons)
        self._context.record(CheckpointFailed(step, reasons))
        retention.discard(path)
        why = "; ".join(f"{who}: {why}" for who, why in reasons.items())
        return _Outcome(failed=why, passing=all(part.passing for part in parts))

    def _commit(
        self,
        train_state: TrainState,
        path: Path,
        files: dict[str, FileEntry],
        started: float,
        written: float,
    ) -> SaveSeconds:
        context, attempt = self._context, self._context.fence.attempt.number
        manifest = Manifest(train_state, context.identity, attempt, time.time(), files)
        again = self._unfinished == train_state.step
        report = logger().info if again else logger().warning
        commit.commit(self._folder, path, manifest, context.fence, report)
        if again:
            aside = f"{self.path(train_state.step).name}.abandoned-a{attempt}"
            retention.discard(self._folder.path / aside)
        took = SaveSeconds(0.0, written - started, time.monotonic() - written)
        size = sum(entry.bytes for entry in files.values())
        event = CheckpointCommitted.of(train_state.step, size, took)
        logger().info("checkpoint committed", **event.to_fields())
        context.record(event)
        return took

    def _take_note(self, train_state: TrainState, told: _Outcome, age: float) -> None:
        self._superseded = told.superseded
        if told.failed:
            now = time.monotonic()
            self._failed = self._failed.with_another(now, age, told.failed, told.passing)
        if told.took is None:
            return
        self.committed_step, self._failed = train_state.step, SaveFailures()
        self.durations = self.durations.with_another(told.took)
        if self._context.rank == 0:
            self._pruner.request()


class _FolderRestorer(Restorer):
    """Finds a folder whose files are all as they were committed; the ranks share the reading."""

    def _fill(self, path: Path, manifest: Manifest) -> list[Damage]:
        mine = sorted(manifest.files)[self._context.rank :: self._context.world]

        def check() -> None:
            if damages := verify_files(path, manifest, mine):
                raise DataError("; ".join(map(str, damages)))

        return self._together(path, check)[1]


@dataclass(frozen=True)
class _PartReport:
    """What a rank has to say of its part: the names that it sees, or sums; or why there is none."""

    names: tuple[str, ...] = ()
    files: tuple[tuple[str, FileEntry], ...] = ()
    why: str = ""
    passing: bool = True

    @classmethod
    def failed(cls, error: Exception) -> _PartReport:
        """Why there is none; `passing` is whether storage is to blame, which may work again."""
        if isinstance(error, OSError):
            return cls(why=describe(error))
        passing = isinstance(error, StorageUnavailableError) or bool(_OF_STORAGE.search(str(error)))
        return cls(why=f"{type(error).__name__}: {error}", passing=passing)


@dataclass(frozen=True)
class _Outcome:
    """How a save has ended: how long it took, or why there is no commit."""

    took: SaveSeconds | None = None
    failed: str = ""
    passing: bool = True
    superseded: str = ""


def _good(parts: Sequence[_PartReport]) -> bool:
    return not any(part.why for part in parts)


def _list(path: Path) -> list[str]:
    """The files below a folder, by their names relative to it."""
    return [
        file.relative_to(path).as_posix()
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name != MANIFEST
    ]


def _sums(path: Path, names: Sequence[str]) -> _PartReport:
    """Make these files durable, and say what is in them."""
    try:
        commit.await_files(path, names)
        files = tuple((name, _sum(path / name)) for name in names)
        for folder in sorted({(path / name).parent for name in names} - {path}):
            fsync_directory(folder)
        return _PartReport(files=files)
    except OSError as error:
        return _PartReport.failed(error)


def _sum(file: Path) -> FileEntry:
    digest, length = xxhash.xxh3_128(), 0
    with open(file, "rb", buffering=0) as opened:
        os.fsync(opened.fileno())
        while block := opened.read(_READ_BYTES):
            digest.update(block)
            length += len(block)
    return FileEntry(bytes=length, xxh3_128=digest.hexdigest())
