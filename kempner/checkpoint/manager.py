"""Saves in the background, commits, and restores checkpoints.

`CheckpointEngine` saves a model and its optimizer, `FolderCheckpoints` what another library writes.
Every method is called on every rank, in the same order. The process group of a context is used for
nothing else: the background half of a save communicates on it while training goes on.

A save ends earlier on one rank than on another. So what a rank knows of it (`in_flight`,
`failures`, `poll`, `committed_step`, `durations`) may only go into votes and rank 0's decisions: no
rank may act on its own knowledge."""

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
from kempner.run.process.retry import StorageUnavailableError, describe, storage_waits
from kempner.run.record.attempts import SupersededError
from kempner.run.record.events import CheckpointFailed, Resumed, StorageWaited
from kempner.run.record.save_times import Durations, SaveSeconds

_READ_BYTES = 4 << 20

_OF_STORAGE = re.compile(r"PytorchStreamWriter|inline_container|I/O error|No space left|quota")
"""Matches storage errors of torch and safetensors that are no `OSError`."""

Write = Callable[[Path], None]
"""Writes this rank's part of the state into a folder; called on every rank at the same time."""


class Checkpoints:
    """The common part of both managers: restore, note the ends of saves, and prune, in the folder
    of `context`. `keep` says which checkpoints stay, `durations` are those of earlier saves."""

    _restorer: Restorer

    def __init__(
        self, context: CheckpointContext, keep: retention.Keep, durations: Durations
    ) -> None:
        self._context, self._folder = context, context.folder
        self._pruner = retention.Pruner(context.folder, keep, context.fence)
        self._failed = SaveFailures()
        self._superseded: str | None = None
        self.committed_step: int | None = None
        """The newest committed step that this rank knows of."""
        self.durations = durations
        """The durations of saves, of this attempt and earlier ones; complete on rank 0."""

    def poll(self) -> tuple[SaveFailures, bool]:
        """Note a save that has ended. Returns the failures since the last commit, and whether a
        newer attempt owns the run, as far as this rank knows without waiting."""
        self.settle(timeout=0)
        return self.failures, self._superseded is not None

    @property
    def in_flight(self) -> tuple[int, float] | None:
        """The step of the save under way and its age in seconds, or None."""
        return None

    @property
    def failures(self) -> SaveFailures:
        """The saves that failed since the last commit; none while another is under way."""
        return self._failed if self.in_flight is None else SaveFailures()

    def settle(self, timeout: float | None = None) -> None:
        """Wait for the save in flight and note its end; a failure is counted. After `timeout`
        seconds it stays in flight; then the ranks' knowledge may differ, and they must vote before
        they act on it."""

    def join(self) -> None:
        """As `settle`, without a timeout. Raises `SupersededError`, on all ranks alike, if a newer
        attempt owns the run."""
        self.settle()
        if self._superseded is not None:
            raise SupersededError(self._superseded)

    def close(self, timeout: float | None = None) -> None:
        self.settle()
        self._pruner.close(timeout)

    def _restore_newest(self, accept: Collection[str]) -> TrainState | None:
        """Load the newest checkpoint that verifies; None if the run has none. Damaged ones are set
        aside, never deleted. Raises `DataError` if there are checkpoints but none can be used."""
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
        """Note a successful save; `took` is None where it is not known."""
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

    def _report_failure(self, step: int, path: Path, reasons: dict[str, str], first: bool) -> None:
        """Rank 0: log and record that the save to `path` failed; `first`: since the last commit."""
        log = logger().warning if first else logger().info  # one warning until the next commit
        log("checkpoint failed; the last one is intact", step=step, **reasons)
        self._context.record(CheckpointFailed(step, reasons))
        retention.discard(path)


class CheckpointEngine(Checkpoints):
    """Saves and restores a model and its optimizer in the folder of `context`.

    `keep` says which checkpoints stay. Without `background`, `save` waits for its end. `durations`
    are those of earlier saves, `registered` is what is saved besides model and optimizer, `memory`
    is where steps are kept in memory, if wanted. `begin` gives what trains its first values, if the
    model's own weights are in a `Base`. Raises `UsageError`, on all ranks alike, if a checkpoint
    cannot hold the state; `check_state` does so for state that appears later."""

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
        self._keep = replace(keep, pinned=pinned)
        super().__init__(context, self._keep, durations)
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
        """Raise `UsageError`, on all ranks alike, if a checkpoint cannot hold the present state.
        What is not sharded must be the same on all ranks, bit for bit. Call after the first step,
        before which optimizers have no state; else the first save does so."""
        self._saver.check(contents=True)

    def check_registered(self) -> None:
        """Raise `UsageError`, on all ranks alike, if the program changes objects that are not
        registered. Waits for the save in flight. Raises as `join`."""
        self.join()
        self._saver.check_registered()

    def restore(self, accept: Collection[str] = ()) -> TrainState | None:
        """Load the newest checkpoint that verifies; None if the run has none. Damaged ones are set
        aside, never deleted. Raises `DataError` if all are damaged, or if it was made with another
        model, other data or another seed (unless `accept` names "data" or "seed"); `NotSharedError`
        on a rank that does not see the checkpoint that rank 0 has chosen."""
        return self._restore_newest(accept)

    def branch(self) -> list[int]:
        """The committed steps of the live branch, ascending; the last one is `latest`."""
        return self._context.broadcast_from_rank0(self._branch)

    def roll_back(self, to: int, accept: Collection[str] = ()) -> TrainState:
        """Load the newest checkpoint up to step `to` that verifies, or else the oldest later one;
        `latest` names it afterwards. Waits for the save in flight. Raises `DataError` if none
        verifies, and as `restore`."""
        self.join()
        train_state = self._load_newest(lambda: choose_to_go_back(self._branch(), to), accept)
        if train_state is None:
            raise DataError(
                f"no checkpoint in {self._folder.path} verifies, so that there is none to go back "
                "to after the loss diverged"
            )
        return train_state

    def go_on_from(self, step: int) -> None:
        """Make a committed `step` the newest of the live branch, for the next attempt to load; what
        is newer is set aside. Raises as `StorageWaits.retry` on rank 0."""
        if self._context.rank == 0:
            self._pruner.settle()
            fence, warn = self._context.fence, logger().warning
            go_on = partial(commit.go_on_from, self._folder, step, fence, warn)
            storage_waits().retry(go_on, worked=True, path=self._folder.path)

    def forget_steps(self) -> None:
        """Invalidate the steps that are kept in memory."""
        self._saver.forget()

    def pin_up_to(self, step: int) -> None:
        """Keep the newest checkpoint up to `step`, instead of the one that was kept by this before.
        On rank 0."""
        try:
            known = [s for s in self._folder.committed() if s <= step]
        except OSError:
            return  # the next call knows
        self._pruner.keep = replace(self._keep, pinned=self._keep.pinned | {*known[-1:]})

    def save(self, train_state: TrainState, counted: int | None = None) -> None:
        """Start to save the state as of `train_state`, after the previous save has ended.

        `counted` is the number of failed saves in a row in the ranks' last vote: if there are more
        by now, nothing is started, since the ranks must first vote on the new failure. None: start
        in any case. Raises as `join`, and `UsageError`, on all ranks alike, if a checkpoint cannot
        hold the state, as the last save may have found."""
        self.join()
        if self._refusal is not None:
            raise UsageError(self._refusal)
        # Compared after the wait: before it, the ranks' knowledge may differ.
        if counted is not None and self._failed.count > counted:
            return
        if not self._saver.checked:
            self.check_state()
        self._in_flight = self._saver.start(train_state)
        if not self._background:
            self.join()

    def hold(self, train_state: TrainState, verdict: Verdict) -> None:
        """Start to keep the state as of `train_state` in memory, if that is configured. The memory
        outlives this process, and becomes a checkpoint if it dies. The copying thread asks
        `verdict` whether the state is sound."""
        self._saver.hold(train_state, verdict)

    def release_staging(self) -> None:
        """Wait until the state is copied; call before anything writes to it."""
        self._saver.release()  # a failure is that of the save, which `join` notes

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
            self._report_failure(save.job.train_state.step, save.job.path, reasons, first)

    def close(self, timeout: float | None = None) -> None:
        super().close(timeout)
        self._saver.close()

    def _load_newest(
        self, choose: Callable[[], int | None], accept: Collection[str]
    ) -> TrainState | None:
        self._saver.forget()  # else the optimizer's state would be in memory twice
        return super()._load_newest(choose, accept)

    def _branch(self) -> list[int]:
        self._pruner.settle()  # else a step may be deleted before it is read
        tip = head(self._folder)
        return [s for s in self._folder.committed() if tip is None or s <= tip]


class FolderCheckpoints(Checkpoints):
    """Commits what another library writes; `restore` returns the folder to load from.

    Each rank of the library writes its files into a given folder. When all files are on disk and
    checksummed, rank 0 commits the folder as it commits kempner's own: a crash leaves the previous
    commit or this one, never a torn one, and a folder that does not verify is set aside. `save`
    returns after the end of the save, since the library may change its state afterwards; so none is
    ever in flight."""

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
        """Save and commit the state as of `train_state`; a failure shows in `failures`. `counted`
        as in `CheckpointEngine.save`. Raises `SupersededError`, on all ranks alike, if a newer
        attempt owns the run."""
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
        outcome = self._context.broadcast_from_rank0(
            partial(self._conclude, train_state, path, [*notes, *sums], started, written)
        )
        self._superseded = outcome.superseded
        if outcome.failed:
            now = time.monotonic()
            took = now - started
            self._failed = self._failed.with_another(now, took, outcome.failed, outcome.passing)
        if outcome.took is not None:
            self._note_commit(step, outcome.took)

    def make_again(self) -> None:
        """Let the next save of the newest committed step replace it: that commit is incomplete."""
        self._unfinished, self.committed_step = self.committed_step, None

    def path(self, step: int) -> Path:
        return self._folder.step(step)

    def keep_only(self, keep: retention.Keep) -> None:
        self._pruner.keep = keep

    def _name(self, step: int) -> tuple[str, _PartReport | None]:
        """The name of a new folder for all ranks' files, and an error if there is no room for
        it."""
        name = in_progress_name(step, self._context.fence.attempt.number, secrets.token_hex(4))
        try:
            self._pruner.make_room()
        except OSError as error:
            return name, _PartReport.failed(error)
        return name, None

    def _write_part(self, path: Path) -> _PartReport:
        """Write this rank's files. An error is returned, since the other ranks wait for this
        one."""
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
        """Rank 0: commit if no part failed; the outcome of the save."""
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
        self._report_failure(train_state.step, path, reasons, first=not self._failed.count)
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
    """Verifies the files of a folder; the ranks share the reading."""

    def _fill(self, path: Path, manifest: Manifest) -> list[Damage]:
        mine = sorted(manifest.files)[self._context.rank :: self._context.world]

        def check() -> None:
            if damages := verify_files(path, manifest, mine):
                raise DataError("; ".join(map(str, damages)))

        return self._together(path, check)[1]


@dataclass(frozen=True)
class _PartReport:
    """A rank's part of a save: the file names that it sees, or checksums; or `why` it failed."""

    names: tuple[str, ...] = ()
    files: tuple[tuple[str, FileEntry], ...] = ()
    why: str = ""
    passing: bool = True

    @classmethod
    def failed(cls, error: Exception) -> _PartReport:
        """The report of an error; `passing` if storage is at fault, which may work again."""
        if isinstance(error, OSError):
            return cls(why=describe(error))
        passing = isinstance(error, StorageUnavailableError) or bool(_OF_STORAGE.search(str(error)))
        return cls(why=f"{type(error).__name__}: {error}", passing=passing)


@dataclass(frozen=True)
class _Outcome:
    """The outcome of a save: its duration, or why there is no commit."""

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
    """Make these files durable; their sizes and checksums."""
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
