"""Signal handling: handlers only record signals, loops read the record.

Python runs a signal's handler only when the main thread gets back to the interpreter, which a rank
inside a rendezvous or a collective may never do. The C-level trampoline, however, writes the
signal's number to a pipe at once (`signal.set_wakeup_fd`), and a thread reads it there.

Imports only the standard library and `console`: signals are trapped before all else.
"""

from __future__ import annotations

import ctypes
import faulthandler
import math
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import FrameType
from typing import NoReturn

from kempner.run.output.console import leave, say
from kempner.run.process.exit_codes import ExitCode

SIZE = 1 << 20
"""Bytes: 16 KiB for each of 64 signals."""


class _Stack(ctypes.Structure):
    """`stack_t` of sigaltstack(2)."""

    _fields_ = (
        ("ss_sp", ctypes.c_void_p),
        ("ss_flags", ctypes.c_int),
        ("ss_size", ctypes.c_size_t),
    )


_room = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_room))  # signals arrive until the process has ended


def make_room_for_signals() -> None:
    """Give this thread a stack on which all signals fit. Raises `OSError` if the kernel refuses."""
    stack = _Stack(ctypes.addressof(ctypes.c_char.from_buffer(_room)), 0, SIZE)
    if ctypes.CDLL(None, use_errno=True).sigaltstack(ctypes.byref(stack), None) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"sigaltstack: {os.strerror(error)}")


_PR_SET_PDEATHSIG = 1  # linux/prctl.h

LEFT_AT_ONCE = "exited at once on the second Ctrl-C; the last commit is intact"

INSIST_WITHIN = 2.0
"""Seconds within which a second Ctrl-C means: exit at once."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class ReceivedSignal:
    """A signal, and when it arrived (`time.monotonic`, seconds)."""

    signal: signal.Signals
    at: float


@dataclass(frozen=True)
class _ReplacedHandlers:
    """What an inbox has replaced: handlers (None: not one of Python's) and the wakeup descriptor.
    `writer` is the descriptor to which the signals are written meanwhile."""

    handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], object] | int | None]
    wakeup: int
    writer: int


class SignalInbox:
    """Collects the signals that ask for a stop. One per process: use `inbox()`."""

    def __init__(self) -> None:
        self._received: list[ReceivedSignal] = []
        self._lock = threading.Lock()
        self._react: Callable[[ReceivedSignal], None] | None = None
        self._around_pause: Callable[[], AbstractContextManager[bool]] | None = None
        self._before: _ReplacedHandlers | None = None
        """What `uninstall` restores; None while the inbox is not installed."""
        self._reader: int | None = None
        self._pressed = -math.inf

    @property
    def installed(self) -> bool:
        return self._before is not None

    def install(self, at_prompt: bool = False) -> None:
        """Take over the stop signals and unblock them; SIGQUIT dumps all stacks to stderr.

        With `at_prompt` (an interactive prompt), a second Ctrl-C within `INSIST_WITHIN` seconds
        raises `KeyboardInterrupt` in the main thread. SIGHUP and SIGINT stay ignored if nohup, or a
        shell's `&`, made this process ignore them. Signals that the launcher blocked until this
        call are not lost. Only the main thread may call it: Python raises `ValueError` in others.
        """
        if self.installed:
            return
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(writer, False)
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._reader = reader
        threading.Thread(target=self._listen, args=(reader,), name="signals", daemon=True).start()
        handlers = {number: signal.signal(number, _ignore_here) for number in _not_to_be_ignored()}
        if at_prompt and signal.SIGINT in handlers:
            signal.signal(signal.SIGINT, self._raise_if_insisted)
        self._before = _ReplacedHandlers(handlers, wakeup, writer)
        if sys.__stderr__ is not None:
            faulthandler.register(signal.SIGQUIT, file=sys.__stderr__, all_threads=True)
        make_room_for_signals()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def uninstall(self) -> None:
        """Restore the handlers and forget received signals. Only the main thread may call it."""
        before, self._before = self._before, None
        if before is None:
            return
        for number, handler in before.handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(before.wakeup)
        faulthandler.unregister(signal.SIGQUIT)
        os.close(before.writer)  # which ends the thread
        with self._lock:
            self._received, self._react, self._reader = [], None, None

    def pause_within(self, around: Callable[[], AbstractContextManager[bool]]) -> None:
        """Enter `around()` on Ctrl-Z, and leave it after `fg`. If it yields False, this process
        does not pause. Does nothing if this process was started with SIGTSTP ignored. Only the main
        thread may call it."""
        if signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:
            self._around_pause = around
            signal.signal(signal.SIGTSTP, _ignore_here)

    def leave_to_parent(self) -> None:
        """In a forked child, stop recording: a Ctrl-C, which the terminal sends to all processes,
        would be written to the parent's pipe again. The handlers stay, so that no stop signal ends
        the child."""
        if self.installed:
            signal.set_wakeup_fd(-1)
            self._before, self._received = None, []
            self._react, self._reader, self._lock = None, None, threading.Lock()

    @property
    def received(self) -> tuple[ReceivedSignal, ...]:
        """All stop signals so far, oldest first."""
        return tuple(self._received)

    def react_with(self, reaction: Callable[[ReceivedSignal], None]) -> None:
        """Call `reaction` from the listening thread for every signal, including earlier ones; also
        while the main thread is in native code."""
        with self._lock:
            self._react = reaction
            waiting = self.received
        for received in waiting:
            reaction(received)

    def _raise_if_insisted(self, signum: int, frame: FrameType | None) -> None:
        earlier, self._pressed = self._pressed, time.monotonic()
        if self._pressed - earlier <= INSIST_WITHIN:
            raise KeyboardInterrupt

    def _listen(self, reader: int) -> None:
        while number := os.read(reader, 1):
            if number[0] in STOP_SIGNALS:
                self._note(ReceivedSignal(signal.Signals(number[0]), time.monotonic()), reader)
            elif number[0] == signal.SIGTSTP and self._around_pause is not None:
                with self._around_pause() as may_pause:
                    if may_pause:
                        # To this thread: the whole process stops before it gets any further.
                        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        os.close(reader)

    def _note(self, received: ReceivedSignal, reader: int) -> None:
        with self._lock:
            if reader != self._reader:
                return  # received before an `uninstall`: not for a later `install`
            self._received.append(received)
            reaction = self._react
        if reaction is not None:
            reaction(received)


def follow_parent(parent: int, with_signal: signal.Signals) -> None:
    """As `signal_at_end_of`; if the parent is gone already, the signal is raised here."""
    if not signal_at_end_of(parent, with_signal):
        os.kill(os.getpid(), with_signal)


def signal_at_end_of(parent: int, with_signal: signal.Signals | None) -> bool:
    """Have the kernel send `with_signal` when the process `parent` ends, however it ends (prctl(2),
    PR_SET_PDEATHSIG); None cancels that. The signal comes when the *thread* ends that started this
    process. Returns whether the parent still exists; if not, no signal comes. Raises `OSError` if
    the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(with_signal or 0), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    return os.getppid() == parent


def exit_immediately(received: ReceivedSignal) -> None:
    """The reaction to a signal before training, while no other process depends on this one."""
    exit_before_training(received.signal.name)


def exit_before_training(why: str) -> NoReturn:
    """End this process, whatever its main thread does: there is no progress to lose yet."""
    say(f"kempner: {why} before training began; nothing to save", sys.stderr)
    leave(ExitCode.STOPPED)


def insists(received: Sequence[ReceivedSignal]) -> bool:
    times = [r.at for r in received if r.signal == signal.SIGINT]
    return any(later - earlier <= INSIST_WITHIN for earlier, later in pairwise(times))


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Block the stop signals. Processes started in this block inherit the mask, also across exec:
    the signals stay pending for them until they unblock them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def untouched_by_default(number: signal.Signals) -> Iterator[None]:
    """Ignore a signal during the block if it has its default action; works in any thread, unlike
    `signal.signal`."""
    if signal.getsignal(number) is not signal.SIG_DFL:
        yield
        return
    libc = ctypes.CDLL(None)
    libc.signal(int(number), ctypes.c_void_p(int(signal.SIG_IGN)))
    try:
        yield
    finally:
        libc.signal(int(number), ctypes.c_void_p(int(signal.SIG_DFL)))


def ignore_from_now_on() -> None:
    """Ignore the stop signals before the interpreter is finalized. Python then restores the default
    action of signals that are not ignored, so that a late one would turn a good exit code into a
    death by signal."""
    for stop_signal in STOP_SIGNALS:
        signal.signal(stop_signal, signal.SIG_IGN)


def _not_to_be_ignored() -> list[signal.Signals]:
    """The stop signals, without SIGHUP and SIGINT where the starter of this process had them
    ignored. If SIGTERM is ignored as well, kempner did that itself to protect the start (`DEAF`):
    then all."""
    ignored = {number for number in STOP_SIGNALS if signal.getsignal(number) is signal.SIG_IGN}
    if signal.SIGTERM in ignored:
        return list(STOP_SIGNALS)
    return [n for n in STOP_SIGNALS if n not in ignored & {signal.SIGHUP, signal.SIGINT}]


def _ignore_here(signum: int, frame: FrameType | None) -> None:
    """Does nothing: with a handler, the interpreter writes the signal to the pipe."""


_inbox = SignalInbox()
os.register_at_fork(after_in_child=_inbox.leave_to_parent)


def inbox() -> SignalInbox:
    return _inbox
