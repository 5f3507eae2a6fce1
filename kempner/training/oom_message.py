"""Error message for running out of memory, with the relevant numbers."""

from __future__ import annotations

import psutil
import torch

from kempner.run.control.heartbeat import Progress

_NO_HOST_MEMORY = ("DefaultCPUAllocator", "not enough memory")
"""What torch says when the host has none to give; it has no exception type for that."""


def describe_shortage(error: BaseException, progress: Progress) -> str | None:
    """A sentence if `error` means that memory ran out, on a GPU or on the host; else None."""
    said = str(error)
    where = f"in phase {progress.phase} after step {progress.step}"
    if isinstance(error, torch.OutOfMemoryError):
        free, total = torch.cuda.mem_get_info()
        return (
            f"out of GPU memory {where}: tensors have {_gib(torch.cuda.memory_allocated())}, "
            f"PyTorch reserved {_gib(torch.cuda.memory_reserved())}, {_gib(free)} of {_gib(total)} "
            "are free; lower train.micro_batch_size or train.seq_len, shard over more ranks, or "
            "set parallelism.reduce_gradients to micro_batch and reshard_after_forward to always"
        )
    if isinstance(error, MemoryError) or any(words in said for words in _NO_HOST_MEMORY):
        host = psutil.virtual_memory()
        return (
            f"out of memory {where}: this rank has {_gib(psutil.Process().memory_info().rss)}, "
            f"{_gib(host.available)} of the host's {_gib(host.total)} are available; ask for more "
            "memory, or lower train.micro_batch_size or data.num_dataloader_workers"
        )
    return None


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
