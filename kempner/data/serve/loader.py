"""Serves the micro batches of a rank from any position, with or without workers.

What a rank gets at a position follows from (position, seed, world, batch sizes) alone: the same
for any number of workers and however far they read ahead.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kempner.data.files.token_file import Corpus
from kempner.data.order.batch_slices import PADDING, Slicing
from kempner.data.order.shuffle import Order
from kempner.data.serve.token_reader import TokenDataset, TokenReader
from kempner.run.process.exit_codes import UsageError
from kempner.run.process.retry import WaitStoppedError

IGNORE = -100
"""Target of a row without a sample: `torch.nn.functional.cross_entropy` leaves it out."""

_STEPS_AHEAD = 2
_POLL = 0.05  # seconds between two looks at the caller's wish to give up


class MicroBatch(NamedTuple):
    """One forward and backward: inputs and targets [micro_batch_size, seq_len], int64."""

    inputs: Tensor
    targets: Tensor
    """The inputs one token later; IGNORE throughout the rows that are padding."""


@dataclass(frozen=True)
class StepBatch:
    """What one rank consumes in one step."""

    micro: list[MicroBatch]
    positions: list[int]
    """In the endless order, ascending; `Order.locate` gives epoch and sample of each."""
    cursor_after: int
    """The first position of the next step, on every rank."""


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
        self.order = Order(samples, seed)
        self.micro_steps = slicing.micro_steps
        """Micro batches per step, the same on every rank."""
        self._ready: queue.Queue[StepBatch | BaseException] = queue.Queue(_STEPS_AHEAD)
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        self._pin_memory = pin_memory
        self._device = torch.accelerator.current_device_index() if pin_memory else None
        self._corpus = mine
        dataset = TokenDataset(mine, self.order, seq_len)
        self._reader = TokenReader(dataset, slicing.slices_from(cursor), workers)
        atexit.register(self.close)
        self._thread = threading.Thread(target=self._fill, name="data feed", daemon=True)
        self._thread.start()

    def take(self, give_up: Callable[[], bool] = lambda: False) -> StepBatch | None:
        """The next step's batch; None if none has come when `give_up` says that it is enough.

        Raises DataError if a shard is wrong, `StorageUnavailableError` if it cannot be read for too
        long, RunError if a worker was killed, and whatever else went wrong in the thread or in a
        worker.
        """
        while self._failure is None:
            item = self._next_ready()
            if isinstance(item, StepBatch):
                return item
            if isinstance(item, WaitStoppedError) or (item is None and give_up()):
                return None
            self._failure = item or self._reader.lost_worker()
        raise self._failure

    def _next_ready(self) -> StepBatch | BaseException | None:
        try:
            return self._ready.get(timeout=_POLL)
        except queue.Empty:
            return None

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
            while not self._closing.is_set():
                self._ready.put(self._read_step())

    def _hand_over(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """The end of the thread: `take` raises what ended it, unless it was asked to end."""
        if error is not None and not self._closing.is_set():
            self._ready.put(error)
        return True

    def _read_step(self) -> StepBatch:
        micro: list[MicroBatch] = []
        positions: list[int] = []
        while True:
            part, tokens = self._reader.read()
            micro.append(_to_micro_batch(tokens, part.positions, pin_memory=self._pin_memory))
            positions += [position for position in part.positions if position != PADDING]
            if part.last:
                return StepBatch(micro, positions, part.cursor_after)


def shards_per_reader(shards_open: int | None, readers: int, samples: int) -> int | None:
    """The most token files that each reader of a rank keeps open; None for all that it may.

    `shards_open` is for the whole rank. It is rounded up: every reader of every rank keeps as many.
    Raises UsageError if there are fewer samples than that.
    """
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
    max_batches: int,
) -> Iterator[list[MicroBatch]]:
    """The samples in file order, a global batch at a time, read in the calling thread.

    Every rank gets as many batches, and as many micro batches in each; the last is padded, and so
    is what cannot be read when a stop is asked for.
    Raises DataError if the corpus has not one sample, and as `Corpus.read`.
    """
    slicing = Slicing(global_batch_size, micro_batch_size, rank, world)
    count = corpus.samples(seq_len)
    no_tokens = np.zeros(seq_len + 1, corpus.dtype)
    for start in range(0, min(count, max_batches * global_batch_size), global_batch_size):
        batch = []
        for positions in slicing.rows(start):
            rows = [position if position < count else PADDING for position in positions]
            try:
                tokens = [no_tokens if r == PADDING else corpus.sample(r, seq_len) for r in rows]
            except WaitStoppedError:  # nobody uses the loss, but the ranks go on together
                rows, tokens = [PADDING] * len(rows), [no_tokens] * len(rows)
            batch.append(_to_micro_batch(np.stack(tokens), rows))
        yield batch


def _to_micro_batch(
    tokens: NDArray[Any], rows: Sequence[int], *, pin_memory: bool = False
) -> MicroBatch:
    """Tokens [k, seq_len + 1] of k positions, or PADDING, as inputs and targets."""
    shape = (len(rows), tokens.shape[1] - 1)
    inputs = torch.empty(shape, dtype=torch.int64, pin_memory=pin_memory)
    targets = torch.empty(shape, dtype=torch.int64, pin_memory=pin_memory)
    inputs.numpy()[:] = tokens[:, :-1]
    targets.numpy()[:] = tokens[:, 1:]
    targets[[row == PADDING for row in rows]] = IGNORE
    return MicroBatch(inputs, targets)
