"""Staging: copies the state to host memory during the next forward and backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from threading import Lock

import psutil
import torch
from torch import Tensor

from kempner.checkpoint.tensors.file_buffer import FileBuffer
from kempner.cluster.machine import MemoryGroup, memory_group
from kempner.config.resilience import FailPoint
from kempner.run.output.logs import logger
from kempner.run.process.fail_points import fail_point


class Stager:
    """A thread that copies tensors into buffers; on CUDA over a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._locked = device, weakref.WeakSet[FileBuffer]()
        self._thread = ThreadPoolExecutor(1, "staging", initializer=_use_device, initargs=(device,))
        self._stream = (
            torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            if device.type == "cuda"
            else None
        )

    def copy(
        self,
        buffers: Sequence[Tensor],
        tensors: Sequence[Tensor],
        step: int,
        complete: Callable[[], None] | None = None,
    ) -> Future[None]:
        """Start to copy the present values of `tensors` into `buffers`; nothing may write to them
        until the result is done. `step` is for fault injection only. `complete` is called after the
        copy, before it is done."""
        stream = torch.cuda.current_stream(self._device) if self._stream else None
        ready = stream.record_event() if stream else None

        def work() -> None:
            fail_point(FailPoint.STAGE, step)
            self._copy(list(buffers), list(tensors), ready)
            if complete is not None:
                complete()

        return self._thread.submit(work)

    def page_lock(self, image: FileBuffer, room: int) -> None:
        """Start to page-lock `image`, once; later copies wait for it. See `page_lock`."""
        if self._device.type == "cuda" and image not in self._locked:
            self._locked.add(image)
            self._thread.submit(page_lock, image, room, self._device)

    def close(self) -> None:
        self._thread.shutdown()

    def _copy(
        self, buffers: list[Tensor], tensors: list[Tensor], ready: torch.cuda.Event | None
    ) -> None:
        if not buffers:
            return  # this rank writes nothing
        if self._stream is None or ready is None:
            torch._foreach_copy_(buffers, tensors)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            torch._foreach_copy_(buffers, tensors, non_blocking=True)
            self._stream.synchronize()


class StagedCopy:
    """A copy under way, which detects writes to the tensors before it is complete.

    `watched` are keys, and tensors whose version counters count the writes to the tensor of that
    key. The counters are read before the copy begins: create this first, then set `done`.

    All in-place operations of torch are counted, in inference mode as well, except those through
    `Tensor.data` or NumPy, the fused optimizers, and `torch._foreach_*` on DTensors."""

    def __init__(self, watched: Sequence[tuple[str, Tensor]]) -> None:
        self.done: Future[None] = Future()
        self._lock = Lock()
        self._watched = watched
        self._versions = _versions(watched)
        self._written: frozenset[str] | None = None

    def settle(self) -> frozenset[str]:
        """Wait for the copy; the keys of tensors that were written to before the first call. The
        training thread calls this before it updates the state, the writing thread before it
        commits; the first call decides. The writing thread does not notice an operation that is
        still under way, and so has taken longer than the file."""
        wait([self.done])
        return self.judge()

    def judge(self) -> frozenset[str]:
        """As `settle`, called by the copying thread after the copy."""
        with self._lock:
            if self._written is None:
                now, self._written = _versions(self._watched), frozenset()
                if now != self._versions:
                    pairs = zip(self._watched, now, self._versions, strict=True)
                    self._written = frozenset(key for (key, _), new, old in pairs if new != old)
                self._watched = ()  # else replaced tensors would stay in memory
            return self._written


def _versions(watched: Sequence[tuple[str, Tensor]]) -> list[int]:
    return [tensor._version for _, tensor in watched]  # fast: thousands of tensors, twice per save


def room_to_lock(
    local_ranks: int, available: int | None = None, group: MemoryGroup | None = None
) -> int:
    """Bytes that each of a node's `local_ranks` may lock: its share of the free memory of the node
    or of the job's cgroup, whichever is less. By default both are read. Call before any rank locks
    memory, or the last ranks count what the first have locked."""
    if available is None:
        available = psutil.virtual_memory().available
        with suppress(OSError):
            group = memory_group()
    with suppress(OSError, KeyError):  # a cgroup that cannot be read does not limit us
        if group is not None and (limit := group.limit()) is not None:
            available = min(available, max(0, limit - group.used()))
    return available // local_ranks


def page_lock(image: FileBuffer, room: int, device: torch.device) -> bool:
    """Page-lock `image` for its lifetime; whether that worked.

    A GPU copies to locked pages without the host. But they can be neither swapped nor reclaimed, so
    nothing is locked that would take more than half of `room`: a slower copy is better than a
    killed job. The range is registered as a whole, to the byte, since PyTorch's own pinned memory
    is rounded up to a power of two, and a copy may not span two registered ranges."""
    address, length = image.address, len(image.content)
    if length == 0:
        return True
    if 2 * length > room:
        _warn_of_pageable(length, f"this rank's share of the free memory is {room / 2**30:.1f} GiB")
        return False
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(cudart.cudaHostRegister(address, length, 0))
    if error != 0:
        with suppress(RuntimeError):  # CUDA raises a thread's last error once more
            torch.zeros(1, device=device)
        _warn_of_pageable(length, f"cudaHostRegister gave error {error}")
        return False
    weakref.finalize(image, cudart.cudaHostUnregister, address)
    return True


def _warn_of_pageable(length: int, why: str) -> None:
    logger().warning(
        f"the checkpoint buffer of {length / 2**30:.1f} GiB is not page-locked, so copies from the "
        f"GPU are slower: {why}"
    )


def _use_device(device: torch.device) -> None:
    """Else the thread would use GPU 0, and every rank would have a context there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
