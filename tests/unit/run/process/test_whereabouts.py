"""Where a program stands is read from its stack: its own line, and the collective that it is in."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import pytest
from harness import wait_until
from patience import scaled

from kempner.run.process.whereabouts import BUSY, CodePlace, Whereabouts, place_of

TORCH = "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


def compiled(file: str, text: str) -> Callable[..., None]:
    """A function `f` as that file would have it."""
    names: dict[str, Callable[..., None]] = {}
    exec(compile(text, file, "exec"), names)
    return names["f"]


def calls(file: str, line: int) -> Callable[[Callable[[], None]], None]:
    """A function of that file that calls another one in that line."""
    return compiled(file, "def f(then):" + "\n" * (line - 1) + "    then()")


def raised(by: Callable[[], None]) -> TracebackType | None:
    with pytest.raises(ZeroDivisionError) as caught:
        by()
    return caught.value.__traceback__


BARRIER = compiled(TORCH, "def barrier(): 1 / 0\nf = barrier")
WAIT = compiled(TORCH, "def wait(): 1 / 0\ndef barrier(): wait()\nf = barrier")
ELSEWHERE = compiled("/env/lib/python3.11/site-packages/numpy/x.py", "def f(): 1 / 0")


@pytest.mark.parametrize(
    ("within", "collective"), [(BARRIER, "barrier"), (WAIT, "barrier"), (ELSEWHERE, "")]
)
def test_the_line_of_the_user_and_the_collective_are_told(
    within: Callable[[], None], collective: str
) -> None:
    trace = raised(lambda: calls("/home/me/train.py", 9)(within))
    assert place_of(trace) == CodePlace("train.py:9", collective)


def test_a_collective_that_calls_the_user_is_not_waited_in() -> None:
    """As a hook of DistributedDataParallel does."""
    ours = compiled("/home/me/hooks.py", "def f(): 1 / 0")
    trace = raised(lambda: calls(TORCH, 5)(ours))
    assert place_of(trace) == CodePlace("hooks.py:1", "")


EXITS = """
import threading, time
from kempner.run.process.whereabouts import Whereabouts
main, over = Whereabouts(), threading.Event()
def look():
    while not (place := main.look()).line.endswith(":11"):
        time.sleep(0.01)
    print(place.line)
    over.set()
threading.Thread(target=look, daemon=True).start()
threading.Thread(target=lambda: (
    over.wait(60)
)).start()
"""


def test_at_exit_the_thread_for_which_python_waits_is_told(tmp_path: Path) -> None:
    program = tmp_path / "exits.py"
    program.write_text(EXITS.lstrip())
    ended = subprocess.run([sys.executable, program], stdout=subprocess.PIPE, check=True)
    assert ended.stdout == b"exits.py:11\n"


def test_a_thread_that_stands_still_is_told_from_one_that_moves(tmp_path: Path) -> None:
    waits, looks = threading.Event(), list[Whereabouts]()

    def program() -> None:
        looks.append(Whereabouts())
        started.set()
        waits.wait(scaled(20))
        moved.set()
        ends.wait(scaled(20))

    started, moved, ends = threading.Event(), threading.Event(), threading.Event()
    thread = threading.Thread(target=program)
    thread.start()
    assert started.wait(scaled(20))
    (look,) = looks
    stands = standing(look)
    assert Path(__file__).name in look.look().line
    waits.set()
    assert moved.wait(scaled(20))
    assert standing(look) > stands
    ends.set()
    thread.join(scaled(20))


def standing(look: Whereabouts) -> int:
    """Its moves, once it does not move any more."""
    before = -1
    while before != look.moves:
        before = look.moves
        look.look()
    return before


@pytest.mark.parametrize("collective", [False, True])
def test_native_code_that_computes_is_at_work_but_not_in_a_collective(collective: bool) -> None:
    """Some collectives spin while they wait."""
    looks = list[Whereabouts]()
    text = "def f(begin, compute):\n    begin()\n    compute('sha256', b'', b'', 6_000_000)"
    program = compiled(TORCH if collective else "/home/me/train.py", text)
    begin = lambda: looks.append(Whereabouts())  # noqa: E731
    thread = threading.Thread(target=program, args=(begin, hashlib.pbkdf2_hmac), daemon=True)
    thread.start()
    wait_until(lambda: bool(looks), "the thread to compute")
    (look,) = looks
    wait_until(lambda: look.look() == look.look() and look.moves > 0, "it to be in native code")
    clock = time.pthread_getcpuclockid(thread.ident or 0)
    moves, used = look.moves, time.clock_gettime(clock)
    wait_until(lambda: time.clock_gettime(clock) > used + 2 * BUSY, "it to use a processor")
    look.look()
    assert look.moves == moves + (not collective)
    thread.join()
