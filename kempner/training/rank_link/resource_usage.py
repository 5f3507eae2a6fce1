"""Measures what a rank uses of its node: memory, processes, open files."""

from __future__ import annotations

import resource
from dataclasses import replace

import psutil

from kempner.cluster.machine.cgroup import MemoryGroup, memory_group
from kempner.run.control.protocol import NodeMemory, Usage


def measure() -> Usage:
    """Of this process, those that it has started, and its node at this moment.

    Raises `OSError` or `psutil.Error` if the kernel does not show it.
    """
    process, host = psutil.Process(), psutil.virtual_memory()
    children = [child.memory_info().rss for child in _living(process)]
    files_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    group = memory_group()
    memory = NodeMemory(*_room(group, host.available, host.total))
    if group is not None:
        memory = replace(memory, group=str(group.path), oom_kills=group.oom_kills())
    return Usage(
        rss=process.memory_info().rss,
        children=len(children),
        children_rss=sum(children),
        files=process.num_fds(),
        files_limit=files_limit,
        memory=memory,
    )


def _living(process: psutil.Process) -> list[psutil.Process]:
    return [child for child in process.children() if child.is_running()]


def _room(group: MemoryGroup | None, available: int, total: int) -> tuple[int, int]:
    """Bytes that are left, and of how many: of the node, or of what the job may have of it."""
    limit = None if group is None else group.limit()
    if group is None or limit is None or limit >= total:
        return available, total
    return min(available, max(0, limit - group.used())), limit
