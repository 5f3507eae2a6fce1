"""What the kernel counts of a rank's processes, and what that says."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import wait_until
from tracing import can_trace

from kempner.probe.activity import (
    POLLS,
    TRANSFERS,
    WORKS,
    ActivityWatch,
    StackReader,
    Stillness,
    TreeUsage,
    main_place,
    share_at_work,
)
from kempner.run.process.whereabouts import CodePlace

COMPUTES = "print(flush=True)\nwhile True: pass"
KINDS = {
    "waits": ("import threading; print(flush=True); threading.Event().wait()", True, True),
    "is stopped": (
        "import os, signal; print(flush=True); os.kill(os.getpid(), signal.SIGSTOP)",
        True,
        True,
    ),
    "polls": ("import time; print(flush=True)\nwhile True: time.sleep(0.02)", True, False),
    "computes": (COMPUTES, False, False),
    "reads": (
        "import os, time; print(flush=True); zero = os.open('/dev/zero', 0)\n"
        "while True: os.read(zero, 1 << 20); time.sleep(0.05)",
        False,
        False,
    ),
    "waits for a child that computes": (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {COMPUTES!r}])",
        False,
        False,
    ),
}
"""Each with whether it is idle, and still."""


@contextmanager
def program(text: str) -> Iterator[int]:
    """A process that has begun."""
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_that_does_nothing_is_told_from_one_that_works(kind: str) -> None:
    text, *told = KINDS[kind]
    with program(text) as pid:
        watch = ActivityWatch(time.monotonic)
        watch.look({3: pid})

        def is_seen() -> bool:
            found = watch.look({3: pid})[3]
            return [found.idle > 0, found.still > 0] == told

        time_passes = time.monotonic() + 0.5  # the first look after it says something
        wait_until(lambda: time.monotonic() > time_passes, "half a second")
        wait_until(is_seen, f"a process that {kind} to be seen so", interval=0.5)


COUNTS = st.floats(0.0, 1e6)


@given(COUNTS, COUNTS, COUNTS, st.floats(0.1, 100.0))
def test_idle_is_what_uses_little_and_still_what_does_not_even_wake(
    cpu: float, moved: float, woken: float, seconds: float
) -> None:
    before = TreeUsage(5.0, 5, {1: 5})
    now = TreeUsage(5.0 + cpu, 5 + int(moved), {1: 5 + int(woken)})
    found = Stillness(7.0, 7.0).after(before, now, seconds)
    works = now.cpu - 5.0 > WORKS * seconds or int(moved) > TRANSFERS * seconds
    assert found.idle == (0.0 if works else 7.0 + seconds)
    assert found.still == (0.0 if works or int(woken) > POLLS * seconds else 7.0 + seconds)


def test_on_a_crowded_machine_less_is_work() -> None:
    assert share_at_work(2, 0.0) == share_at_work(2, 10.0) == WORKS
    assert share_at_work(2, 100.0) == 0.01
    before, now = TreeUsage(5.0, 5, {1: 5}), TreeUsage(5.2, 5, {1: 5})
    assert Stillness().after(before, now, 10.0, share_at_work(2, 100.0)).works
    assert Stillness().after(before, now, 10.0).idle == 10.0


@pytest.mark.parametrize(("woken", "works"), [(5, True), (2810, False)])
def test_to_wait_for_a_processor_is_work_but_not_of_what_polls(woken: int, works: bool) -> None:
    """As a rank that polls torch's store was seen, on two cores with a load of seven."""
    before = TreeUsage(5.0, 5, {1: 5}, waited={1: 3.0})
    now = TreeUsage(5.14, 5, {1: 5 + woken}, waited={1: 3.4})
    assert Stillness().after(before, now, 10.0).works == works


LOOKS = """
import os, sys
from kempner.probe.activity import tree_usage
assert tree_usage(int(sys.argv[1])) is not None
os.setresuid(65534, 65534, 65534)
assert tree_usage(int(sys.argv[1])) is None
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_what_may_not_be_read_is_not_taken_for_idle() -> None:
    with program(KINDS["waits"][0]) as pid:
        subprocess.run([sys.executable, "-c", LOOKS, str(pid)], check=True)


def test_a_process_that_comes_or_goes_is_work() -> None:
    one, two = TreeUsage(1.0, 1, {1: 1}), TreeUsage(1.0, 1, {1: 1, 2: 0})
    for before, now, works in ((one, two, True), (two, one, True), (None, one, False)):
        assert Stillness(7.0, 7.0).after(before, now, 10.0) == Stillness(works=works)


@pytest.mark.skipif(not can_trace(), reason="no process may be traced here")
def test_where_python_stands_is_read_from_outside_through_a_wrapper(tmp_path: Path) -> None:
    there = tmp_path / "there.py"
    there.write_text("import threading\nprint(flush=True)\nthreading.Event().wait()\n")
    with program(f"import os; os.system('{sys.executable} {there}; true')") as pid:
        shell = psutil.Process(pid).children()[0].pid
        assert StackReader().place(shell) == CodePlace(line="there.py:3")


@pytest.mark.parametrize("told", [b"", b"[]", b"{}", b"[{}]", b"[7]", b'[{"os_thread_id": 5}]'])
def test_no_stack_is_no_place(told: bytes) -> None:
    assert main_place(told, 5) is None
