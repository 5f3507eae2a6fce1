"""Saves in the background, commits, and finds the way back.

`CheckpointEngine` saves a model and its optimizer, `FolderCheckpoints` what another library writes.
Every method is called on every rank, in the same order. The process group of a context is used for
nothing else: the background half of a save talks on it while training goes on.

A save ends earlier on one rank than on another. So what a rank knows of it (`in_flight`,
`failures`, `poll`, `committed_step`, `durations`) is for votes and for rank 0's choices: no rank
may go another way because of its own.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import xxhash
from torch import nn
from torch.optim import Optimizer

from kempner.checkpoint.context import CheckpointContext
from kempner.checkpoint.format.manifest import FileEntry, Manifest, TrainState
from kempner.checkpoint.format.names import MANIFEST, in_progress_name
from kempner.checkpoint.io.verify import Damage, verify_files
from kempner.checkpoint.registered.composite import plainly_named
from kempner.checkpoint.registered.objects import NOTHING, RegisteredObjects
from kempner.checkpoint.store import commit, retention
from kempner.checkpoint.store.commit import SaveFailures
from kempner.checkpoint.store.selection import choose_to_go_back, head
from kempner.checkpoint.tensors.restore import Restorer, StateRestorer
from kempner.checkpoint.tensors.save import (
    BackgroundSaver,
    RunningSave,
    SaveFailedError,
    commit_files,
)
from kempner.checkpoint.tensors.step_slots import StepMemory, Verdict
from kempner.run.output.logs import logger
from kempner.run.process.durable_io import fsync_directory, join_directory
from kempner.run.process.exit_codes import DataError, UsageError
from kempner.run.process.retry import StorageUnavailableError, describe
from kempner.run.record.attempts import SupersededError
from kempner.run.record.events import CheckpointFailed, Resumed, StorageWaited
from kempner.run.record.save_times import Durations, SaveSeconds

_READ_BYTES = 4 << 20

_OF_STORAGE = re.compile(r"PytorchStreamWriter|inline_container|I/O error|No space left|quota")
"""In the words of errors that are no `OSError` though storage has failed: torch's and safetensors'.
"""

Write = Callable[[Path], None]
"""Writes this rank's part of the state into a folder; called on every rank at once."""


class Checkpoints:
    """What both managers do: find the way back, note how a save has ended, and prune. Below the
    folder of `context`. Every method is called on every rank, in the same order. `keep` says which
    checkpoints stay, `durations` is what is known of earlier saves."""

    _restorer: Restorer

    def __init__(
        self, context: CheckpointContext, keep: retention.Keep, durations: Durations
    ) -> None:
        self._context, self._folder = context, context.folder
        self._pruner = retention.Pruner(context.folder, keep, context.fence)
        self._failed = SaveFailures()
        self._superseded: str | None = None
        self.committed_step: int | None = None
        """Step of the newest commit of this run that this rank knows of."""
        self.durations = durations
        """How long saves take; rank 0 knows, of this attempt and those before."""

    def poll(self) -> tuple[SaveFailures, bool]:
        """Take note of a save that has ended; the saves that failed since the last commit, and
        whether a newer attempt owns the run, as far as this rank knows it without waiting."""
        self.settle(timeout=0)
        return self.failures, self._superseded is not None

    @property
    def in_flight(self) -> tuple[int, float] | None:
        """The step of the save under way and its age in seconds, or None."""
        return None

    @property
    def failures(self) -> SaveFailures:
        """The saves that failed since the last commit; none while another one is under way."""
        return self._failed if self.in_flight is None else SaveFailures()

    def settle(self, timeout: float | None = None) -> None:
        """Wait for the save in flight and take note of how it ended; a failure is counted. After
        `timeout` seconds it stays in flight: what the ranks know may differ then, and what they do
        next must not follow from it before they have voted."""

    def join(self) -> None:
        """Wait for the save in flight and take note of how it ended, as `settle` does. Raises
        `SupersededError`, on all ranks alike, if a newer attempt owns the run."""
        self.settle()
        if self._superseded is not None:
            raise SupersededError(self._superseded)

    def close(self, timeout: float | None = None) -> None:
        self.settle()
        self._pruner.close(timeout)

    def _restore_newest(self, accept: Collection[str]) -> TrainState | None:
        """Load the newest checkpoint that verifies; None if the run has none. A damaged one is set
        aside, never deleted. Raises `DataError` if none of those that there are can be used."""
        self._restorer.prepare_folder()
        if (train_state := self._load_newest(partial(head, self._folder), accept)) is not None:
            self._context.record(Resumed(train_state.step))
            return train_state
        self._restorer.refuse_fresh_start()
        return None

    def _load_newest(
        self, choose: Callable[[], int | None], accept: Collection[str]
    ) -> TrainState | None:
        train_state = self._restorer.load_newest(choose, accept)
        if train_state is not None:
            self.committed_step = train_state.step
        return train_state

    def _note_commit(self, step: int, took: SaveSeconds | None) -> None:
        """A save has worked, and `took` so long where that is known: rank 0 tells of it."""
        self.committed_step = step
        failed, self._failed = self._failed, SaveFailures()
        if failed.count and self._context.rank == 0:
            seconds = round(time.monotonic() - failed.since, 1)
            logger().warning("checkpoints can be written again", failed=failed.count, after=seconds)
            self._context.record(StorageWaited(failed.reason, seconds, failed.count + 1, rank=0))
        if took is not None:
            self.durations = self.durations.with_another(took)
        if self._context.rank == 0:
            self._pruner.request()

    def _tell_of_failure(self, step: int, path: Path, reasons: dict[str, str], first: bool) -> None:
        """Rank 0: the save to `path` has failed; `first` since the last commit or not."""
        say = logger().warning if first else logger().info  # once for all that follow
        say("checkpoint failed; the last one is intact", step=step, **reasons)
        self._context.record(CheckpointFailed(step, reasons))
        retention.discard(path)


class CheckpointEngine(Checkpoints):
    """Saves and restores a model and its optimizer below the folder of `context`.

    `keep` says which checkpoints stay. Without `background` a save is waited for at once.
    `durations` is what is known of earlier saves, `registered` what is saved beside model and
    optimizer, `memory` where steps are kept, if they are to be. `begin` gives what trains its first
    values, where the model's own weights are in a `Base`. Raises `UsageError`, on all ranks alike,
    if a checkpoint cannot hold the state; `check_state` does so for what appears later.
    """

    def __init__(
        self,
        context: CheckpointContext,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        keep: retention.Keep,
        background: bool = True,
        durations: Durations = Durations(),  # noqa: B008 - frozen
        registered: RegisteredObjects = NOTHING,
        memory: StepMemory | None = None,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        base = context.identity.base
        pinned = keep.pinned if base is None else keep.pinned | {base.step}
        super().__init__(context, replace(keep, pinned=pinned), durations)
        self._background = background
        self._restorer = StateRestorer(
            context,
            plainly_named(model),
            optimizer,
            registered,
            None if memory is None else memory.lent,
            begin,
        )
        room = self._pruner.make_room
        self._saver = BackgroundSaver(context, model, optimizer, registered, memory, room)
        self._in_flight: RunningSave | None = None
        self._refusal: str | None = None
        self._saver.check(contents=False)

    def check_state(self) -> None:
        """Raise `UsageError`, on all ranks alike, if a checkpoint cannot hold the state as it is.
        To be called after the first step, since optimizers have no state before it; or else the
        first save does. What is not sharded must be the same on all ranks, bit for bit."""
        self._saver.check(contents=True)

    def check_registered(self) -> None:
        """Raise `UsageError`, on all ranks alike, if a program changes what is not registered. The
        save in flight is waited for. Raises as `join`."""
        self.join()
        self._saver.check_registered()

    def restore(self, accept: Collection[str] = ()) -> TrainState | None:
        """Load the newest checkpoint that verifies; None if the run has none. A damaged one is set
        aside, never deleted. Raises `DataError` if what there is cannot be used: damaged
        throughout, or made with another model, other data or another seed (unless `accept` names
        "data" or "seed"); `NotSharedError` on a rank that does not see what rank 0 has chosen."""
        return self._restore_newest(accept)

    def branch(self) -> list[int]:
        """The steps of the live branch that are committed, ascending; `latest` is the last one."""
        return self._context.broadcast_from_rank0(self._branch)

    def roll_back(self, to: int, accept: Collection[str] = ()) -> TrainState:
        """Load the newest checkpoint up to step `to` that verifies; `latest` names it afterwards.
        The save in flight is waited for. Where none of them verifies, the oldest later one is
        taken. Raises `DataError` if that does not verify either, and as `restore`."""
        self.join()
        train_state = self._load_newest(lambda: choose_to_go_back(self._branch(), to), accept)
        if train_state is None:
            raise DataError(
                f"no checkpoint in {self._folder.path} verifies, so that there is none to go back "
                "to after the loss diverged"
            )
        return train_state

    def save(self, train_state: TrainState, counted: int | None = None) -> None:
        """Start to save the state as of `train_state`; the previous save is waited for.

        `counted` is how many failed saves in a row the ranks have agreed on in their last vote.
        Where there are more by now, nothing is started: they must see this one before there is
        another. Without a vote every call starts a save. Raises as `join`, and `UsageError`, on all
        ranks alike, if a checkpoint cannot hold the state, or the last save found that out.
        """
        self.join()
        if self._refusal is not None:
            raise UsageError(self._refusal)
        # What this rank knew before it waited depends on its pace: no other rank would do the same.
        if counted is not None and self._failed.count > counted:
            return
        if not self._saver.checked:
            self.check_state()
        self._in_flight = self._saver.start(train_state)
        if not self._background:
            self.join()

    def hold(self, train_state: TrainState, verdict: Verdict) -> None:
        """Start to keep the state as of `train_state` in memory, where that was asked for. It
        outlives this process, and becomes a checkpoint should that die. `verdict` is asked, by the
        thread that copies, whether the state is worth it."""
        self._saver.hold(train_state, verdict)

    def release_staging(self) -> None:
        """Wait until the copy of the state is out; call it before anything writes the state."""
        self._saver.release()  # a failure is the save's, and join tells of it

    @property
    def in_flight(self) -> tuple[int, float] | None:
        if self._in_flight is None:
            return None
        job = self._in_flight.job
        return job.train_state.step, job.age

    def settle(self, timeout: float | None = None) -> None:
        if self._in_flight is None:
            return
        if wait([self._in_flight.done], timeout).not_done:
            return
        save, self._in_flight = self._in_flight, None
        error = save.done.exception()
        if error is None:
            self._note_commit(save.job.train_state.step, save.done.result())
            return
        if not isinstance(error, SaveFailedError):
            raise error
        if error.superseded:
            self._superseded = "; ".join(error.reasons.values())
            return
        first, age = not self._failed.count, save.job.age
        self._failed = self._failed.with_another(time.monotonic(), age, str(error), error.passing)
        self._refusal = error.refusal
        if self._context.rank == 0:
            reasons = {f"rank {rank}": why for rank, why in error.reasons.items()}
            self._tell_of_failure(save.job.train_state.step, save.job.path, reasons, first)

    def close(self, timeout: float | None = None) -> None:
        super().close(timeout)
        self._saver.close()

    def _load_newest(
        self, choose: Callable[[], int | None], accept: Collection[str]
    ) -> TrainState | None:
        self._saver.forget()  # or the optimizer's state would be in memory twice
        return super()._load_newest(choose, accept)

    def _branch(self) -> list[int]:
        self._pruner.settle()  # or a step that is named may be gone when it is read
        tip = head(self._folder)
        return [s for s in self._folder.committed() if tip is None or s <= tip]


class FolderCheckpoints(Checkpoints):
    """Commits what another library writes; `restore` says which folder to load from.

    The library writes its files into a folder that it is given, each rank its own. When all of them
    are on disk and summed, rank 0 commits that folder as it commits kempner's own: a crash leaves
    the commit before or this one, never a torn one, and what does not verify is set aside and not
    loaded. A save ends before `save` returns, since the library may change its state afterwards:
    there is never one under way.
    """

    def __init__(
        self,
        context: CheckpointContext,
        write: Write,
        *,
        keep: retention.Keep,
        durations: Durations = Durations(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(context, keep, durations)
        self._write, self._restorer = write, _FolderRestorer(context)
        self._unfinished: int | None = None

    def restore(self) -> tuple[TrainState, Path] | None:
        """The newest checkpoint that verifies, and its folder; None if the run has none."""
        train_state = self._restore_newest(())
        return None if train_state is None else (train_state, self.path(train_state.step))

    def save(self, train_state: TrainState, counted: int | None = None) -> None:
        """Save and commit the state as of `train_state`; how it ended, `failures` tells. `counted`
        is as for `CheckpointEngine.save`. Raises `SupersededError`, on all ranks alike, if a newer
        attempt owns the run, and what the library raises that is no `OSError`."""
        self.join()
        if counted is not None and self._failed.count > counted:
            return
        started, step = time.monotonic(), train_state.step
        name, full = self._context.broadcast_from_rank0(partial(self._name, step))
        path = self._folder.path / name
        notes = self._context.gather(full or self._write_part(path))
        written = time.monotonic()
        names = sorted({name for note in notes for name in note.names})
        rank, world = self._context.rank, self._context.world
        sums = self._context.gather(
            _PartReport() if any(note.why for note in notes) else _sums(path, names[rank::world])
        )
        told = self._context.broadcast_from_rank0(
            partial(self._conclude, train_state, path, [*notes, *sums], started, written)
        )
        self._superseded = told.superseded
        if told.failed:
            now = time.monotonic()
            self._failed = self._failed.with_another(now, now - started, told.failed, told.passing)
        if told.took is not None:
            self._note_commit(step, told.took)

    def make_again(self) -> None:
        """The newest commit is not all of its step: a save of that step takes its place."""
        self._unfinished, self.committed_step = self.committed_step, None

    def path(self, step: int) -> Path:
        return self._folder.step(step)

    def keep_only(self, keep: retention.Keep) -> None:
        self._pruner.keep = keep

    def _name(self, step: int) -> tuple[str, _PartReport | None]:
        """Of a new folder for the files of all ranks; and why there must be none yet."""
        name = in_progress_name(step, self._context.fence.attempt.number, secrets.token_hex(4))
        try:
            self._pruner.make_room()
        except OSError as error:
            return name, _PartReport.failed(error)
        return name, None

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
                return _Outcome(took=self._commit(train_state, path, files, written - started))
            except SupersededError as error:
                return _Outcome(superseded=str(error))
            except OSError as error:
                reasons = {"rank 0": describe(error)}
        self._tell_of_failure(train_state.step, path, reasons, first=not self._failed.count)
        why = "; ".join(f"{who}: {why}" for who, why in reasons.items())
        return _Outcome(failed=why, passing=all(part.passing for part in parts))

    def _commit(
        self, train_state: TrainState, path: Path, files: dict[str, FileEntry], writing: float
    ) -> SaveSeconds:
        again = self._unfinished == train_state.step
        report = logger().info if again else logger().warning
        took = commit_files(self._context, train_state, path, files, 0.0, writing, report)
        if again:
            attempt = self._context.fence.attempt.number
            aside = f"{self.path(train_state.step).name}.abandoned-a{attempt}"
            retention.discard(self._folder.path / aside)
        return took


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
    superseded: str | None = None


def _list(path: Path) -> list[str]:
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
