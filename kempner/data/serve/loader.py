"""Serves the micro batches of a rank from any position, with or without workers.

What a rank gets at a position follows from (position, seed, world, batch sizes) alone: the same for
any number of workers and however far they read ahead. The DataLoader can be stopped at any moment.
Workers hand over tokens, as compact as they are on disk, through a pipe; shared memory, whose limit
shows as a SIGBUS, is not involved.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from kempner.data.files.token_file import BEGINS, ID, LEARNED, Corpus
from kempner.data.order.batch_slices import PADDING, MicroSlice, Slicing
from kempner.data.order.shuffle import SampleOrder
from kempner.run.process.exit_codes import DataError, RunError, UsageError
from kempner.run.process.retry import WaitStoppedError
from kempner.run.process.worker_process import (
    ignore_stop_signals,
    kill,
    killed_on_error,
    signals_blocked_in_children,
)

REAPED_WITHIN = 1.0  # seconds for a worker that has closed all its files to have ended


class MicroTokens(NamedTuple):
    """The tokens of a micro batch together with the positions that they are from."""

    part: MicroSlice
    tokens: NDArray[Any]
    """[k, seq_len + 1] for the k positions of `part`, as on disk; zeros for PADDING."""


class UnreadBatch(NamedTuple):
    """A micro batch that could not be read; `worked` is whether its file was read before."""

    part: MicroSlice
    worked: bool


class TokenDataset(Dataset[NDArray[Any]]):
    """The endless order as a dataset: position -> tokens [seq_len + 1], PADDING -> zeros."""

    def __init__(self, corpus: Corpus, order: SampleOrder, seq_len: int) -> None:
        self._corpus = corpus
        self._order = order
        self._seq_len = seq_len

    def __getitems__(self, part: MicroSlice) -> MicroTokens | UnreadBatch | DataError:
        """What is asked for, with its tokens, in one try; an error is handed over as a value. A
        DataLoader would hand on an exception as text, its sentence lost in a worker's traceback."""
        length = self._seq_len + 1
        tokens = np.zeros((len(part.positions), length), self._corpus.dtype)
        try:
            for row, position in enumerate(part.positions):
                if position != PADDING:
                    first = self._order.locate(position)[1] * self._seq_len
                    tokens[row] = self._corpus.read_now(first, length)
            return MicroTokens(part, tokens)
        except DataError as error:
            return error
        except OSError:
            return UnreadBatch(part, self._corpus.worked_before())

    def wait_for(self, unread: UnreadBatch, stop: Callable[[], bool]) -> MicroTokens:
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
    """Iterates over the tokens of slice after slice. The worker processes die with the thread that
    creates the reader. `stop` ends them whatever they do; without workers, reading happens in the
    thread that iterates. What a worker cannot read is read there, too: that thread can wait for
    storage, be seen to wait, and be stopped."""

    def __init__(self, dataset: TokenDataset, slices: Iterable[MicroSlice], workers: int) -> None:
        self._dataset, self._stopped = dataset, False
        loader = DataLoader(
            dataset,
            batch_sampler=slices,  # type: ignore[arg-type]  # the dataset takes them as they are
            num_workers=workers,
            collate_fn=_as_it_is,
            worker_init_fn=partial(ignore_stop_signals, os.getpid()),
            multiprocessing_context="spawn" if workers else None,
            # Without a generator of its own the iterator would draw from the global one.
            generator=Generator(),
        )
        if not workers:
            self._iterator, self._pool = iter(loader), None
            return
        with killed_on_error():
            with signals_blocked_in_children():
                iterator = cast(_MultiProcessingDataLoaderIter, iter(loader))
            # When a worker dies, torch would raise in the main thread, whatever that is doing: the
            # thread that iterates is to get the error.
            _remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False
        self._iterator, self._pool = iterator, iterator

    @property
    def _workers(self) -> Sequence[BaseProcess]:
        return self._pool._workers if self._pool is not None else ()

    def read(self) -> MicroTokens:
        """The next slice and its tokens. Raises as `Corpus.read`."""
        read: MicroTokens | UnreadBatch | DataError = next(self._iterator)
        if isinstance(read, UnreadBatch):
            return self._dataset.wait_for(read, stop=lambda: self._stopped)
        if isinstance(read, DataError):
            raise read
        return read

    def lost_worker(self) -> RunError | None:
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
        # No writer is left, so a thread that waits for a batch gets the end of the file.
        self._pool._worker_result_queue._writer.close()  # type: ignore[attr-defined]


def _as_it_is(batch: Any) -> Any:
    return batch


IGNORE = -100  # target of a row without a sample: `torch.nn.functional.cross_entropy` leaves it out
_STEPS_AHEAD = 2
_POLL = 0.05  # seconds between two looks at the caller's wish to give up


class MicroBatch(NamedTuple):
    """One forward and backward: inputs and targets [micro_batch_size, seq_len], int64.

    Attributes:
        inputs: the tokens of the rows.
        targets: the inputs one token later; IGNORE throughout the rows that are padding, and in
            chats where the next token is not learned, as the first one of a document never is.
        documents: int32, [micro_batch_size, seq_len], of chats: the number of each token's
            document in its row, from 0, by which it attends to its own document only; None of text.
            Of preferences the documents 2k and 2k + 1 of a row are the chosen and the rejected
            one of a pair; a last one of an even number, if any, is padding.
    """

    inputs: Tensor
    targets: Tensor
    documents: Tensor | None = None


@dataclass(frozen=True)
class StepBatch:
    micro: list[MicroBatch]
    positions: list[int]
    """In the endless order, ascending; `Order.locate` gives epoch and sample of each."""
    cursor_after: int  # the first position of the next step, on every rank


class Feed:
    """Step after step of one rank, read ahead by a thread and, with `workers`, by processes.

    To be made on the thread that stays until `close`: the processes die with it.

    Args:
        corpus: the tokens, or their directory.
        slicing: which positions this rank takes.
        seq_len: tokens of a sequence.
        seed: of the order.
        cursor: the first position to deliver.
        workers: processes that read; 0 reads in the thread.
        shards_open: the most token files that this rank keeps open, see `shards_per_reader`.
        pin_memory: deliver in page-locked memory (needs an accelerator).

    Raises DataError if the corpus cannot be opened or has not one sample, and as
    `shards_per_reader`.
    """

    def __init__(
        self,
        corpus: Corpus | str | Path,
        slicing: Slicing,
        *,
        seq_len: int,
        seed: int,
        cursor: int = 0,
        workers: int = 0,
        shards_open: int | None = None,
        pin_memory: bool = False,
    ) -> None:
        given = corpus if isinstance(corpus, Corpus) else Corpus.open(corpus)
        # With open files of its own: a corpus belongs to one thread.
        samples = given.samples(seq_len)
        mine = given.reopened(shards_per_reader(shards_open, max(1, workers), samples))
        self.order = SampleOrder(samples, seed)
        self.micro_steps = slicing.micro_steps  # micro batches per step, the same on every rank
        self._ready: queue.Queue[StepBatch | BaseException] = queue.Queue(_STEPS_AHEAD)
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        self._pin_memory = pin_memory
        self._device = torch.accelerator.current_device_index() if pin_memory else None
        self._corpus, self._flagged = mine, mine.index.kind != "text"
        dataset = TokenDataset(mine, self.order, seq_len)
        self._reader = TokenReader(dataset, slicing.slices_from(cursor), workers)
        atexit.register(self.close)
        self._thread = threading.Thread(target=self._fill, name="data feed", daemon=True)
        self._thread.start()

    def take(self, give_up: Callable[[], bool] = lambda: False) -> StepBatch | None:
        """The next step's batch; None if none has come when `give_up` says that it is enough.
        Raises DataError if a shard is wrong, `StorageUnavailableError` if it cannot be read for too
        long, RunError if a worker was killed, and whatever else went wrong in the thread or in a
        worker."""
        while self._failure is None:
            try:
                item: StepBatch | BaseException | None = self._ready.get(timeout=_POLL)
            except queue.Empty:
                item = None
            if isinstance(item, StepBatch):
                return item
            if isinstance(item, WaitStoppedError) or (item is None and give_up()):
                return None
            self._failure = item or self._reader.lost_worker()
        raise self._failure

    def close(self) -> None:
        """Stop reading and end the workers, even stuck ones. May be called again."""
        if self._closing.is_set():
            return
        self._closing.set()
        atexit.unregister(self.close)
        self._failure = self._failure or RuntimeError("the feed is closed")
        self._reader.stop()
        while not self._ready.empty():  # the thread may be waiting to hand something over
            self._ready.get_nowait()
        # Without workers it may be stuck on storage itself, and is left behind then.
        self._thread.join(timeout=0.5)

    def _fill(self) -> None:
        with ExitStack() as stack:
            stack.callback(self._corpus.close)  # here: it belongs to this thread
            stack.push(self._hand_over)
            if self._device is not None:  # otherwise pinning would set up a context on device 0
                torch.accelerator.set_device_index(self._device)
            micro, positions = list[MicroBatch](), list[int]()
            while not self._closing.is_set():
                part, tokens = self._reader.read()
                micro.append(
                    _to_micro_batch(
                        tokens, part.positions, flagged=self._flagged, pin_memory=self._pin_memory
                    )
                )
                positions += [position for position in part.positions if position != PADDING]
                if part.last:
                    self._ready.put(StepBatch(micro, positions, part.cursor_after))
                    micro, positions = [], []

    def _hand_over(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        """The end of the thread: `take` raises what ended it, unless it was asked to end."""
        if error is not None and not self._closing.is_set():
            self._ready.put(error)
        return True


def shards_per_reader(shards_open: int | None, readers: int, samples: int) -> int | None:
    """The most token files that each reader of a rank keeps open; None for all that it may.
    `shards_open` is for the whole rank. It is rounded up: every reader of every rank keeps as many.
    Raises UsageError if there are fewer samples than that."""
    if shards_open is None:
        return None
    if shards_open > samples:
        raise UsageError(
            f"data.num_shards_per_rank={shards_open} is more than the {samples} samples of the "
            "data: leave it out, lower it, or prepare more text"
        )
    return -(-shards_open // readers)


def eval_batches(
    corpus: Corpus,
    *,
    seq_len: int,
    global_batch_size: int,
    micro_batch_size: int,
    rank: int = 0,
    world: int = 1,
    whole_slots: bool = False,
    max_batches: int,
) -> Iterator[list[MicroBatch]]:
    """The samples in file order, a global batch at a time, read in the calling thread. Every rank
    gets as many batches, and as many micro batches in each; the last is padded, and so is what
    cannot be read when a stop is asked for. `whole_slots` as in `Slicing`. Raises DataError if the
    corpus has not one sample, and as `Corpus.read`."""
    slicing = Slicing(global_batch_size, micro_batch_size, rank, world, whole_slots=whole_slots)
    count = corpus.samples(seq_len)
    no_tokens = np.zeros(seq_len + 1, corpus.dtype)
    for start in range(0, min(count, max_batches * global_batch_size), global_batch_size):
        batch = []
        for positions in slicing.rows(start):
            rows = [position if position < count else PADDING for position in positions]
            try:
                tokens = [no_tokens if r == PADDING else corpus.sample(r, seq_len) for r in rows]
            except WaitStoppedError:  # the loss is not used, but the ranks go on together
                rows, tokens = [PADDING] * len(rows), [no_tokens] * len(rows)
            flagged = corpus.index.kind != "text"
            batch.append(_to_micro_batch(np.stack(tokens), rows, flagged=flagged))
        yield batch


def read_step(
    corpus: Corpus, slicing: Slicing, *, seq_len: int, seed: int, cursor: int
) -> list[MicroBatch]:
    """What `Feed` serves first at a cursor, read in the calling thread; of tokens that were read
    before, so that storage which fails is waited for. Raises as `Corpus.read`."""
    dataset = TokenDataset(corpus, SampleOrder(corpus.samples(seq_len), seed), seq_len)
    flagged = corpus.index.kind != "text"
    parts = islice(slicing.slices_from(cursor), slicing.micro_steps)
    found = (dataset.wait_for(UnreadBatch(part, worked=True), lambda: False) for part in parts)
    return [_to_micro_batch(each.tokens, each.part.positions, flagged=flagged) for each in found]


def _to_micro_batch(
    tokens: NDArray[Any], rows: Sequence[int], *, flagged: bool, pin_memory: bool = False
) -> MicroBatch:
    """Tokens [k, seq_len + 1] of k positions, or PADDING, as inputs and targets; `flagged` is
    whether they carry the flags of chats."""
    shape = (len(rows), tokens.shape[1] - 1)
    inputs = torch.empty(shape, dtype=torch.int64, pin_memory=pin_memory)
    targets = torch.empty(shape, dtype=torch.int64, pin_memory=pin_memory)
    ids = tokens & ID if flagged else tokens
    inputs.numpy()[:] = ids[:, :-1]
    targets.numpy()[:] = ids[:, 1:]
    targets[[row == PADDING for row in rows]] = IGNORE
    if not flagged:
        return MicroBatch(inputs, targets)
    targets.numpy()[tokens[:, 1:] & LEARNED == 0] = IGNORE
    documents = torch.empty(shape, dtype=torch.int32, pin_memory=pin_memory)
    np.cumsum(tokens[:, :-1] & BEGINS != 0, axis=1, dtype=np.int32, out=documents.numpy())
    return MicroBatch(inputs, targets, documents.sub_(1))
