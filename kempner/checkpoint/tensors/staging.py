"""Staging: copies the state to host memory during the next forward and backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Lock

import psutil
import torch
from torch import Tensor

from kempner.config.fault_spec import FailPoint
from kempner.run.process.fail_points import fail_point


class Stager:
    """A thread that copies tensors into buffers; on CUDA over a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="staging")
        self._stream = (
            torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            if device.type == "cuda"
            else None
        )

    def copy(self, buffers: Sequence[Tensor], tensors: Sequence[Tensor], step: int) -> Future[None]:
        """Start to copy each tensor into its buffer, as of now; nothing may write it until done.

        `step` is whose state this is; only faults on demand ask for it.
        """
        ready = torch.cuda.current_stream().record_event() if self._stream else None

        def work() -> None:
            fail_point(FailPoint.STAGE, step)
            self._copy(list(buffers), list(tensors), ready)

        return self._thread.submit(work)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _copy(
        self, buffers: list[Tensor], tensors: list[Tensor], ready: torch.cuda.Event | None
    ) -> None:
        if not buffers:
            return  # other ranks write all that there is
        if self._stream is None or ready is None:
            torch._foreach_copy_(buffers, tensors)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            torch._foreach_copy_(buffers, tensors, non_blocking=True)
            self._stream.synchronize()


class StagedCopy:
    """A copy under way, and which of the tensors were written to before it was complete.

    `watched` are keys, and tensors whose version counters tell of writes to what has that key. They
    are read before the copy begins: create this first, and set `done` then.

    Every operation of torch that writes in place counts, in inference mode as well, except: through
    `Tensor.data` or NumPy; the fused optimizers; and `torch._foreach_*` on DTensors.
    """

    def __init__(self, watched: Sequence[tuple[str, Tensor]]) -> None:
        self.done: Future[None] = Future()
        self._lock = Lock()
        self._watched = watched
        self._versions = _versions(watched)
        self._written: frozenset[str] | None = None

    def settle(self) -> frozenset[str]:
        """Wait for the copy; the keys of what was written to before the first call of this.

        The thread that trains calls it before it updates the state, and the one that has written
        the file before it commits: whichever comes first decides. The latter does not see an
        operation that is still under way: one that has taken longer than the file.
        """
        wait([self.done])
        with self._lock:
            if self._written is None:
                now, self._written = _versions(self._watched), frozenset()
                if now != self._versions:
                    pairs = zip(self._watched, now, self._versions, strict=True)
                    self._written = frozenset(key for (key, _), new, old in pairs if new != old)
                self._watched = ()  # or tensors that are replaced would stay in memory
            return self._written


def _versions(watched: Sequence[tuple[str, Tensor]]) -> list[int]:
    return [tensor._version for _, tensor in watched]  # thousands, twice a save


def may_pin(device: torch.device, length: int) -> bool:
    """Whether a buffer of `length` bytes should be page-locked.

    Locked pages count against the job's memory and cannot be swapped: with less than twice that
    much available, a slower copy is better than a killed job.
    """
    return device.type == "cuda" and psutil.virtual_memory().available > 2 * length
