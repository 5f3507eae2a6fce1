"""Saves and restores the place of Lightning's `fit`, which its own checkpoint leaves out.

A batch of Lightning's is followed by a tail: validation, what depends on it, schedulers that wait
for it, and after the last batch the end of the epoch. Lightning counts a batch as done before its
tail. So a checkpoint is made between the two, where all counters agree, and notes that the tail is
due; a resume begins with the tail.

Written against the loops of Lightning 2.5 and 2.6, whose attributes are not public.

The training loader gets a place that a checkpoint can hold: `hold` replaces the step in which
Lightning injects its `DistributedSampler`. What the user's `DataLoader` reads, how, and with how
many workers, stays the same; its order comes from a plan, as with `survive(data=...)`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import Trainer
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import DataLoader, IterableDataset

from kempner.data.serve.places import MappedLoader, refills
from kempner.data.serve.sample_rng import seed_all
from kempner.data.serve.sampler import ResumableDataLoader
from kempner.data.serve.sampling_order import plan_of
from kempner.integrations.lightning_state import ModelFiles, restore_metrics, saved_metrics
from kempner.run.process.exit_codes import MismatchError, UsageError
from kempner.run.process.worker_process import signals_blocked_in_children
from kempner.training.compute.forward_backward import seed_for, set_rng


class HeldLoader:
    """Reads the user's map-style loader from any place in the data; its other attributes are the
    user's. An iterator yields the rest of the epoch, and advances the place with each batch."""

    def __init__(self, loader: DataLoader[Any], mapped: MappedLoader) -> None:
        self._loader, self._mapped = loader, mapped
        self.fits_any_world = mapped.plan.shared
        """Whether the place is valid for any number of ranks."""

    def __iter__(self) -> Iterator[Any]:
        self._mapped.close()
        for number in range(self.left()):
            # The first batch starts the workers.
            with (
                signals_blocked_in_children()
                if self._loader.num_workers and not number
                else nullcontext()
            ):
                batch, _ = self._mapped.take()
            yield batch

    def __len__(self) -> int:
        return self._mapped.plan.of_whole_epoch()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def left(self) -> int:
        return self._mapped.plan.left()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of which the next iterator yields the rest."""
        self._mapped.plan.begin_epoch(epoch)

    def skip(self, batches: int) -> None:
        for _ in range(batches):
            self._mapped.take()

    def state_dict(self) -> dict[str, Any]:
        return self._mapped.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._mapped.close()
        self._mapped.load_state_dict(state)


class StatefulLoader:
    """Wraps a stream with its own state dict, and excludes from the state the batch that Lightning
    has prefetched. A stream with a shuffle buffer, which the state dict lacks, is read again from
    the start of the epoch."""

    def __init__(self, loader: Any, ahead: Callable[[], int]) -> None:
        self._loader, self._ahead = loader, ahead
        self._skips = refills(getattr(loader, "dataset", None))
        self._before: dict[str, Any] | None = None
        self._read = self._skip = 0

    def __iter__(self) -> Iterator[Any]:
        batches, self._read, skip, self._skip = iter(self._loader), 0, self._skip, 0
        while True:
            self._before = copy.deepcopy(self._state())
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._read += 1
            if self._read > skip:
                yield batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"read": self._read} if self._skips else self._loader.state_dict()
        return state

    def state_dict(self) -> dict[str, Any]:
        """The state after the batches that the loop has received; at most one is prefetched."""
        return self._before if self._ahead() and self._before is not None else self._state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._skips:
            self._skip = state["read"]
        else:
            self._loader.load_state_dict(state)


def hold(
    loader: Any,
    seed: int,
    place: tuple[int, int],
    inject: Callable[[Any], Any],
    ahead: Callable[[], int],
) -> Any:
    """Wrap a loader so that a checkpoint can hold its place. `place` is (rank, number of ranks);
    `inject` gives a loader Lightning's sampler for this rank; `ahead` returns the number of
    prefetched batches. Raises `UsageError` for a loader whose place cannot be restored."""
    if isinstance(loader, ResumableDataLoader | HeldLoader | StatefulLoader):
        return loader
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        return _held(loader, seed, place, inject)
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        loader = inject(loader)
        return loader if _has_length(loader) else StatefulLoader(loader, ahead)
    what = loader.dataset if isinstance(loader, DataLoader) else loader
    raise UsageError(
        f"Survive cannot bring {type(what).__name__} back to its place in the data: give "
        "trainer.fit a DataLoader of a data set with a length, or torchdata's StatefulDataLoader"
    )


def _held(
    loader: DataLoader[Any], seed: int, place: tuple[int, int], inject: Callable[[Any], Any]
) -> HeldLoader:
    try:
        plan = plan_of(loader, seed, place)
        if not plan.shared and place[1] > 1:  # the sampler does not divide samples among ranks
            loader = inject(loader)
            plan = plan_of(loader, seed, place)
        return HeldLoader(loader, MappedLoader(loader, plan))
    except UsageError as error:
        raise UsageError(str(error).replace("survive(data=...)", "trainer.fit(loader)")) from None


def _has_length(loader: Any) -> bool:
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return True


BATCH, TAIL, NEXT = 0, 1, 2
"""Stages with their own random numbers: a batch, its tail, and what follows until the next
batch."""


class FitProgress:
    """Drives the loops of one `trainer.fit`, from the start or from a checkpoint.

    `saved` is the result of `state` in the checkpoint, empty in one of an earlier version, None for
    a new run. `attach` takes two callbacks: `after_batch`, called between each batch and its tail
    with whether an evaluation follows, and `when_complete`, called if the checkpoint has nothing
    left to do."""

    def __init__(
        self,
        trainer: Trainer,
        place: tuple[int, int],
        seed: int,
        saved: Mapping[str, Any] | None,
        files: ModelFiles,
    ) -> None:
        self._trainer, self._saved, self._files = trainer, saved, files
        self._rank, self._world = place
        self.seed = seed
        self._undo = contextlib.ExitStack()
        self._lightning_tail: Callable[[Any], None] = trainer.fit_loop.epoch_loop.on_advance_end

    def attach(
        self, after_batch: Callable[[bool], None], when_complete: Callable[[], None]
    ) -> None:
        """Hook into Lightning's loops and its preparation of training loaders."""
        fit, connector = self._trainer.fit_loop, self._trainer._data_connector

        def on_advance_end(fetcher: Any) -> None:
            after_batch(self._evaluation_due(fetcher))
            self._make_tail(fetcher)

        self._replace(fit.epoch_loop, "on_advance_end", on_advance_end)
        self._replace(fit, "_load_combined_loader_states", self._load_loaders)
        prepare = partial(self._prepare_loader, connector._prepare_dataloader)
        self._replace(connector, "_prepare_dataloader", prepare)
        if self._saved is not None:
            self._replace(fit, "run", partial(self._resume, when_complete))
            self._trainer.num_sanity_val_steps = 0  # done at the start of the run

    def detach(self) -> None:
        self._undo.close()

    def _replace(self, owner: Any, name: str, mine: Any) -> None:
        setattr(owner, name, mine)
        self._undo.callback(vars(owner).pop, name, None)

    def seed_generators(self, stage: int) -> None:
        """Seed the random generators for a stage of the current batch."""
        place = self.seed, self._trainer.fit_loop.total_batch_idx, stage, self._rank
        set_rng(*place)  # CUDA's, too, and not noted as the program's own seed
        seed_all(seed_for(*place))

    def state(self, tail_due: bool) -> dict[str, Any]:
        """This rank's state besides Lightning's own checkpoint."""
        trainer, loops = self._trainer, self._trainer.fit_loop
        return {
            "world": self._world,
            "seed": self.seed,
            "tail_due": tail_due,
            "epoch_whole": loops.epoch_loop._num_ready_batches_reached(),
            "should_stop": trainer.should_stop,
            "accumulate": trainer.accumulate_grad_batches,
            "loaders": [loader.state_dict() for loader in self._loaders()],
            "metrics": saved_metrics(trainer),
            "model_files": self._files.state(),
        }

    def is_last_step(self) -> bool:
        """Whether training ends with this step, regardless of its validation."""
        fit, trainer = self._trainer.fit_loop, self._trainer
        if trainer.max_steps not in (-1, None) and trainer.global_step >= trainer.max_steps:
            return True
        epochs = _epochs_done(fit) + 1
        last_epoch = fit.max_epochs not in (-1, None) and epochs >= (fit.max_epochs or 0)
        return last_epoch and fit.epoch_loop._num_ready_batches_reached()

    def begin_epoch(self) -> None:
        """Set the loader's epoch to Lightning's, and Lightning's number of batches to the
        loader's."""
        loaders = self._loaders()
        if len(loaders) == 1 and (loader := _resumable(loaders[0])) is not None:
            loader.set_epoch(_epochs_done(self._trainer.fit_loop))
            self._set_length(loader.left())

    def _evaluation_due(self, fetcher: Any) -> bool:
        if getattr(self._trainer, "_val_check_time_interval", None) is not None:
            return False  # by the clock of each rank
        return self._trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)

    def _make_tail(self, fetcher: Any) -> None:
        self.seed_generators(TAIL)
        self._lightning_tail(fetcher)
        self.seed_generators(NEXT)

    def _loaders(self) -> Sequence[Any]:
        combined = self._trainer.fit_loop._combined_loader
        return combined.flattened if combined is not None else []

    def _prepare_loader(
        self, lightnings: Callable[..., Any], loader: Any, shuffle: bool, mode: RunningStage
    ) -> Any:
        """Replaces Lightning's own, which injects its `DistributedSampler`."""
        if mode != RunningStage.TRAINING:
            return lightnings(loader, shuffle=shuffle, mode=mode)
        inject = partial(lightnings, shuffle=shuffle, mode=mode)
        place = self._rank, self._world
        return hold(loader, self.seed, place, inject, self._fetched_ahead)

    def _fetched_ahead(self) -> int:
        return len(getattr(self._trainer.fit_loop._data_fetcher, "batches", ()))

    def _load_loaders(self) -> None:
        """Replaces Lightning's own; called before it creates an iterator."""
        if self._saved is not None and not self._at_end_of_epoch:
            self._load_places()

    @property
    def _at_end_of_epoch(self) -> bool:
        """Whether the checkpoint's epoch has no batches left."""
        fit = self._trainer.fit_loop
        return fit.epoch_loop.batch_progress.is_last_batch or not _epoch_is_open(fit)

    def _load_places(self) -> None:
        fit, loaders = self._trainer.fit_loop, self._loaders()
        # A checkpoint of an earlier version has only Lightning's own states.
        states = (self._saved or {}).get("loaders", fit._combined_loader_states_to_load)
        for loader in loaders:  # else a sampler would draw the order of the first epoch
            _set_sampler_epoch(loader, _epochs_done(fit))
        fit._combined_loader_states_to_load = []
        if not self._saved and not states:  # an earlier version saved no place of these
            for loader in filter(_resumable, loaders):
                loader.set_epoch(_epochs_done(fit))
                loader.skip(fit.epoch_loop.batch_progress.current.ready)
            return
        if len(states) != len(loaders):
            raise MismatchError(
                f"the checkpoint has places in {len(states)} training loaders, and trainer.fit got "
                f"{len(loaders)}: give it the same ones, or begin a new run"
            )
        for loader, state in zip(loaders, states, strict=True):
            self._refuse_other_world(loader)
            loader.load_state_dict(state)

    def _refuse_other_world(self, loader: Any) -> None:
        was = (self._saved or {}).get("world", self._world)
        if was != self._world and not _fits_any_world(loader):
            raise MismatchError(
                f"the checkpoint is of {was} ranks, and this run has {self._world}: the place in "
                f"the data of {type(loader).__name__} is one for each rank; start as many ranks, "
                "or give trainer.fit a DataLoader of a data set with a length and torch's samplers"
            )

    def _resume(self, when_complete: Callable[[], None]) -> None:
        """Replaces Lightning's `fit_loop.run`: begins within an epoch, or with its end."""
        fit, saved = self._trainer.fit_loop, self._saved or {}
        tail_due = saved["tail_due"] if saved else self._complete_old_batch()
        self._restore()
        if not tail_due and fit.done:
            restore_metrics(self._trainer, saved.get("metrics"), same_world=False)
            when_complete()
            return
        if not tail_due and not saved.get("epoch_whole", True):
            _open_epoch_again(fit)
        fit.setup_data()
        if self._at_end_of_epoch:
            self._load_places()
        if _epoch_is_open(fit):
            self._begin_within_epoch(tail_due)
        else:
            _Loop.restarting.fset(fit, False)  # type: ignore[attr-defined]
            fit._resuming_from_checkpoint = False
        self._run_rest(first=tail_due)

    def _run_rest(self, first: bool) -> None:
        """As Lightning's `fit_loop.run`, but with `first` also makes the end of an epoch that is
        done."""
        fit = self._trainer.fit_loop
        fit.reset()
        fit.on_run_start()
        while first or not fit.done:
            first = False
            try:
                fit.on_advance_start()
                fit.advance()
                fit.on_advance_end()
            except StopIteration:
                break
            finally:
                fit.on_iteration_done()
        fit._restarting = False
        fit.on_run_end()

    def _begin_within_epoch(self, tail_due: bool) -> None:
        """Have the tail made that is due, once the loops are set up, before the next batch."""
        fit, loop = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop
        self._count_batches_of_this_world()
        begin = loop.on_run_start

        def on_run_start(fetcher: Any) -> None:
            del loop.on_run_start  # only once
            begin(fetcher)
            _Loop.restarting.fset(fit, False)  # type: ignore[attr-defined]
            metrics, was = (self._saved or {}).get("metrics"), (self._saved or {}).get("world")
            restore_metrics(self._trainer, metrics, same_world=was == self._world)
            if tail_due:
                self._make_tail(fetcher)
                loop.on_iteration_done()
            else:
                self.seed_generators(NEXT)

        self._replace(loop, "on_run_start", on_run_start)

    def _complete_old_batch(self) -> bool:
        """Count the batch of a checkpoint of an earlier version, made before that, as complete;
        whether its tail is due."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        tail_due = bool(progress.total.completed < progress.total.ready)
        if tail_due:
            progress.increment_completed()
        return tail_due

    def _restore(self) -> None:
        trainer, saved = self._trainer, self._saved or {}
        trainer.should_stop = saved.get("should_stop", False)
        if saved.get("world") == self._world:
            trainer.accumulate_grad_batches = saved["accumulate"]
        self._files.restore(saved.get("model_files", {}))

    def _count_batches_of_this_world(self) -> None:
        """Set the counts of batches as if these ranks had made all batches of the epoch."""
        fit, loaders = self._trainer.fit_loop, self._loaders()
        other_world = (self._saved or {}).get("world", self._world) != self._world
        loader = _resumable(loaders[0]) if len(loaders) == 1 else None
        if self._at_end_of_epoch:
            if other_world:
                self._set_counts(int(fit.max_batches))
            elif loader is not None:  # this epoch may be a batch shorter than others
                self._limit(fit.epoch_loop.batch_progress.current.ready)
        elif loader is not None:
            left = loader.left()
            if other_world:
                self._set_counts(max(0, len(loader) - left))
            self._set_length(fit.epoch_loop.batch_progress.current.ready + left)

    def _set_counts(self, done: int) -> None:
        current = self._trainer.fit_loop.epoch_loop.batch_progress.current
        for name in vars(current):
            setattr(current, name, done)

    def _set_length(self, batches: int) -> None:
        """Set the length of this epoch, which differs from `len(loader)` if the ranks share it
        unevenly."""
        limits = self._trainer.limit_train_batches
        self._limit(_parse_num_batches(RunningStage.TRAINING, batches, limits))

    def _limit(self, limit: int | float) -> None:
        trainer, fit = self._trainer, self._trainer.fit_loop
        if limit == fit.max_batches or fit._combined_loader is None:
            return
        fit._combined_loader.limits = [limit]
        fit.max_batches = limit
        if fit._data_fetcher is not None:
            fit._data_fetcher.length = int(limit)
        if isinstance(trainer.val_check_interval, float):
            trainer.val_check_batch = max(1, int(limit * trainer.val_check_interval))


def _epochs_done(fit: Any) -> int:
    done: int = fit.epoch_progress.current.processed
    return done


def _epoch_is_open(fit: Any) -> bool:
    current = fit.epoch_progress.current
    return bool(current.ready != current.processed)


def _open_epoch_again(fit: Any) -> None:
    """Reopen the epoch in which training ended, which Lightning counts as done: the run has more
    steps now."""
    for progress in (fit.epoch_progress.total, fit.epoch_progress.current):
        progress.processed -= 1
        progress.completed -= 1
    _Loop.restarting.fset(fit, True)  # type: ignore[attr-defined]


def _resumable(loader: Any) -> HeldLoader | ResumableDataLoader[Any] | None:
    """The loader, if kempner determines its order and it has epochs; else None."""
    if isinstance(loader, HeldLoader):
        return loader
    if isinstance(loader, ResumableDataLoader) and not loader.batch_sampler.infinite:  # type: ignore[union-attr]
        return loader
    return None


def _fits_any_world(loader: Any) -> bool:
    if isinstance(loader, HeldLoader):
        return loader.fits_any_world
    return isinstance(loader, ResumableDataLoader)
