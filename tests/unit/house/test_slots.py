"""What is dear to start has one of as many slots as there are cores."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from harness import ROOT, wait_until
from warm import slots

HOLDS = "import sys, warm\nwith warm.dear(): print('held', flush=True); sys.stdin.read()"


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that no other worker knows of."""
    monkeypatch.setattr(slots.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    monkeypatch.setattr(slots, "cores", lambda: 1)


def other() -> subprocess.Popen[str]:
    """Another process that has a slot."""
    command = ["taskset", "-c", str(min(os.sched_getaffinity(0))), sys.executable, "-c", HOLDS]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize("how", ["let go", "killed"])
def test_a_slot_is_waited_for_until_it_is_let_go_or_its_holder_has_died(how: str) -> None:
    inside = threading.Event()

    def wait_for_it() -> None:
        with slots.dear():
            inside.set()

    with other() as holder:
        waiting = threading.Thread(target=wait_for_it)
        waiting.start()
        assert not inside.wait(0.3)
        if how == "killed":
            holder.kill()
        else:
            holder.communicate()
        wait_until(inside.is_set, "the slot")
        waiting.join()


def test_one_that_has_a_slot_needs_no_other_and_one_that_waits_too_long_goes_on_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ExitStack() as nested:
        for _ in range(3):
            nested.enter_context(slots.dear())
    monkeypatch.setattr(slots, "WAIT", 0.0)
    with other() as holder:
        with slots.dear():
            pass
        holder.communicate()


@pytest.mark.parametrize(
    ("cores", "gib", "workers"), [(1, 24, 1), (2, 24, 2), (2, 4, 1), (2, 1, 1), (64, 24, 8)]
)
def test_as_many_workers_as_cores_and_memory_bear(
    monkeypatch: pytest.MonkeyPatch, cores: int, gib: int, workers: int
) -> None:
    monkeypatch.setattr(slots, "cores", lambda: cores)
    memory = type("Memory", (), {"total": gib << 30})
    monkeypatch.setattr(slots.psutil, "virtual_memory", lambda: memory)
    assert slots.workers() == workers
