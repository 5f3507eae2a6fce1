"""The training data of a Lightning `Trainer`, with a place that a checkpoint can hold.

`hold` takes the place of the step in which Lightning injects its `DistributedSampler`. What the
user's `DataLoader` reads, how and in how many workers, stays; its order is read by a plan, as that
of `survive(data=...)` is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from kempner.data.serve.places import MappedLoader, refills
from kempner.data.serve.plans import plan_of
from kempner.data.serve.sampler import ResumableDataLoader
from kempner.run.process.exit_codes import UsageError
from kempner.run.process.worker_process import signals_blocked_in_children


class HeldLoader:
    """The user's map-style loader, read from any place on; all else of it is the user's.

    An iterator yields what is left of the epoch. It moves the place with each batch.
    """

    def __init__(self, loader: DataLoader[Any], mapped: MappedLoader) -> None:
        self._loader, self._mapped = loader, mapped
        self.fits_any_world = mapped.plan.shared
        """Whether the place is one for any number of ranks."""

    def __iter__(self) -> Iterator[Any]:
        self._mapped.close()
        for number in range(self.left()):
            # Workers are started with the first batch.
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
        """Batches that are left of the epoch."""
        return self._mapped.plan.left()

    def set_epoch(self, epoch: int) -> None:
        """The next iterator yields what is left of this epoch."""
        self._mapped.plan.begin_epoch(epoch)

    def skip(self, batches: int) -> None:
        """Leave out the next `batches`."""
        for _ in range(batches):
            self._mapped.take()

    def state_dict(self) -> dict[str, Any]:
        """The place after the last batch that was taken."""
        return self._mapped.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the place of a `state_dict()`."""
        self._mapped.close()
        self._mapped.load_state_dict(state)


class StatefulLoader:
    """A stream that tells its own state, less the batch that Lightning has fetched ahead.

    One that is shuffled by a buffer, which no state holds, is read again from the beginning of the
    epoch.
    """

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
        """Of the batches that the loop has received: at most one is fetched ahead."""
        return self._before if self._ahead() and self._before is not None else self._state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the place of a `state_dict()`."""
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
    """The same batches from a loader whose place a checkpoint can hold.

    `place` is (rank, number of ranks); `inject` gives a loader Lightning's sampler for this rank,
    `ahead` is how many batches Lightning has fetched ahead. Raises `UsageError` for what cannot be
    brought back to a place.
    """
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
        if not plan.shared and place[1] > 1:  # a sampler that knows nothing of ranks
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
