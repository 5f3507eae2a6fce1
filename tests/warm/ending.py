"""What is left of a worker that has died, for one by its time limit, is ended.

All that a session starts carries its mark in the environment that the kernel shows, and all that a
worker starts by a command carries that worker's: so its processes are found wherever they went.
"""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest
from patience import scaled

from warm.template import ENVIRON

MARK = "KEMPNER_TESTS_SESSION"


def mark(config: pytest.Config) -> None:
    """From now on what this process starts carries a mark of this session, or of this worker."""
    worker = getattr(config, "workerinput", {}).get("workerid")
    os.environ[MARK] = f"{os.environ.get(MARK, '')}/{worker or uuid.uuid4().hex}"
    ENVIRON[MARK] = os.environ[MARK]
    if worker:
        _keep_pipes_to_ourselves(config)


def _keep_pipes_to_ourselves(config: pytest.Config) -> None:
    """Have no child that is forked, and becomes no other program, hold this worker's pipes: the
    controller waits for their end.
    """
    (channel,) = (p.channel for p in config.pluginmanager.get_plugins() if hasattr(p, "channel"))
    pipes: Any = channel.gateway._io
    nothing = os.open(os.devnull, os.O_RDWR)

    def let_go() -> None:
        for pipe in (pipes.infile, pipes.outfile):
            os.dup2(nothing, pipe.fileno(), inheritable=False)

    os.register_at_fork(after_in_child=let_go)


def end_left_over(gateway: Any) -> None:
    """Called in the controller: kill all that a worker has left, and what that starts meanwhile."""
    end = time.monotonic() + scaled(10)  # what is stuck in the kernel cannot be ended
    # Its pipes close before its children become orphans, by which those that it forked are known.
    with suppress(subprocess.TimeoutExpired):
        gateway._io.popen.wait(scaled(10))
    while (found := list(_left_over(gateway.id))) and time.monotonic() < end:
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=scaled(1))


def _left_over(worker: str) -> Iterator[psutil.Process]:
    session = os.environ[MARK]
    of_worker = f"{session}/{worker}"
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            carried = process.environ().get(MARK, "")
            if carried == of_worker or carried.startswith(f"{of_worker}/"):
                yield process
            elif carried == session and os.getpid() not in map(_pid, _with_parents(process)):
                yield process  # forked by a worker, and an orphan now


def _with_parents(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.parents()]


def _pid(process: psutil.Process) -> int:
    return int(process.pid)
