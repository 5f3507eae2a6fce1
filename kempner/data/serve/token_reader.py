"""Reads tokens by position through a torch DataLoader that can be stopped at any moment.

Workers hand over tokens, as compact as they are on disk, through a pipe; shared memory, whose
limit shows as a SIGBUS, is not involved.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from torch import Generator
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from kempner.data.files.token_file import Corpus
from kempner.data.order.batch_slices import PADDING, MicroSlice
from kempner.data.order.shuffle import Order
from kempner.run.process.exit_codes import DataError, RunError
from kempner.run.process.worker_process import born_deaf, kill, killed_on_error, stay_deaf

REAPED_WITHIN = 1.0
"""Seconds for a worker that has closed all its files to have ended."""


class MicroTokens(NamedTuple):
    """The tokens of a micro batch together with the positions that they are from."""

    part: MicroSlice
    tokens: NDArray[Any]
    """[k, seq_len + 1] for the k positions of `part`, as on disk; zeros for PADDING."""


class Unread(NamedTuple):
    """A micro batch that could not be read; `worked` is whether its file was read before."""

    part: MicroSlice
    worked: bool


class TokenDataset(Dataset[NDArray[Any]]):
    """The endless order as a dataset: position -> tokens [seq_len + 1], PADDING -> zeros."""

    def __init__(self, corpus: Corpus, order: Order, seq_len: int) -> None:
        self._corpus = corpus
        self._order = order
        self._seq_len = seq_len

    def __getitem__(self, position: int) -> NDArray[Any]:
        """In one try. Raises DataError if the shard is wrong, `OSError` if it cannot be read."""
        if position == PADDING:
            return np.zeros(self._seq_len + 1, self._corpus.dtype)
        first = self._order.locate(position)[1] * self._seq_len
        return self._corpus.read_now(first, self._seq_len + 1)

    def __getitems__(self, part: MicroSlice) -> MicroTokens | Unread | DataError:
        """What is asked for, with its tokens; an error is handed over as a value.

        A DataLoader would hand on an exception as text, its sentence lost in a worker's traceback.
        """
        try:
            return MicroTokens(part, np.stack([self[position] for position in part.positions]))
        except DataError as error:
            return error
        except OSError:
            return Unread(part, self._corpus.worked_before())

    def wait_for(self, unread: Unread, stop: Callable[[], bool]) -> MicroTokens:
        """Read again what could not be read, as long as it takes; see `Corpus.read`."""
        rows = unread.part.positions
        tokens = [self._wait_for(row, unread.worked, stop) for row in rows]
        return MicroTokens(unread.part, np.stack(tokens))

    def _wait_for(self, position: int, worked: bool, stop: Callable[[], bool]) -> NDArray[Any]:
        if position == PADDING:
            return np.zeros(self._seq_len + 1, self._corpus.dtype)
        number = self._order.locate(position)[1]
        return self._corpus.sample(number, self._seq_len, worked=worked, stop=stop)


class TokenReader:
    """Iterates over the tokens of slice after slice.

    The worker processes die with the thread that creates the reader. `stop` ends them whatever
    they do; without workers, reading happens in the thread that iterates. What a worker cannot read
    is read there, too: that thread can wait for storage, be seen to wait, and be stopped.
    """

    def __init__(self, dataset: TokenDataset, slices: Iterable[MicroSlice], workers: int) -> None:
        self._dataset, self._stopped = dataset, False
        loader = DataLoader(
            dataset,
            batch_sampler=slices,  # type: ignore[arg-type]  # the dataset takes them as they are
            num_workers=workers,
            collate_fn=_as_it_is,
            worker_init_fn=partial(stay_deaf, os.getpid()),
            multiprocessing_context="spawn" if workers else None,
            # Without a generator of its own the iterator would draw from the global one.
            generator=Generator(),
        )
        if not workers:
            self._iterator, self._pool = iter(loader), None
            return
        with killed_on_error():
            with born_deaf():
                iterator = cast(_MultiProcessingDataLoaderIter, iter(loader))
            # torch would raise in the main thread, wherever that is, when a worker dies: whoever
            # iterates shall find out.
            _remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False
        self._iterator, self._pool = iterator, iterator

    @property
    def _workers(self) -> Sequence[BaseProcess]:
        return self._pool._workers if self._pool is not None else ()

    def read(self) -> MicroTokens:
        """The next slice and its tokens. Raises as `Corpus.read`."""
        read: MicroTokens | Unread | DataError = next(self._iterator)
        if isinstance(read, Unread):
            return self._dataset.wait_for(read, stop=lambda: self._stopped)
        if isinstance(read, DataError):
            raise read
        return read

    def lost_worker(self) -> RunError | None:
        """The error to raise if a worker has died."""
        ends = {worker.sentinel: worker for worker in self._workers}
        for sentinel in connection.wait(ends, timeout=0):
            worker = ends[cast(int, sentinel)]
            worker.join(REAPED_WITHIN)  # or its exit code is not known yet
            return RunError(
                f"data loader worker {worker.pid} has died with exit code {worker.exitcode} "
                "(-9: killed, often out of memory: try fewer data.num_dataloader_workers)"
            )
        return None

    def stop(self) -> None:
        """Kill the workers, and keep torch from waiting for what they can no longer do."""
        self._stopped = True
        if self._pool is None:
            return
        self._pool._shutdown = True  # its own way takes a lock that a killed worker may have held
        kill(self._workers)
        # Nobody is left to write: a thread that waits for a batch gets the end of the file.
        self._pool._worker_result_queue._writer.close()  # type: ignore[attr-defined]


def _as_it_is(batch: Any) -> Any:
    return batch
