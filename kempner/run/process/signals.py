"""Signal handling: handlers only record signals, loops read the record.

Python runs a signal's handler only when the main thread gets back to the interpreter, which a
rank inside a rendezvous or a collective may never do. The C-level trampoline, however, writes the
signal's number to a pipe at once (`signal.set_wakeup_fd`), and a thread reads it there.

Nothing beyond the standard library is imported here: this is armed before anything else.
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
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_room))  # signals come until the process has ended


def make_room_for_signals() -> None:
    """Give this thread a stack on which all signals fit. Raises `OSError` if the kernel refuses."""
    stack = _Stack(ctypes.addressof(ctypes.c_char.from_buffer(_room)), 0, SIZE)
    if ctypes.CDLL(None, use_errno=True).sigaltstack(ctypes.byref(stack), None) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"sigaltstack: {os.strerror(error)}")


_PR_SET_PDEATHSIG = 1  # linux/prctl.h

LEFT_AT_ONCE = "exited at once on the second Ctrl-C; the last commit is intact"

INSIST_WITHIN = 2.0
"""Seconds within which a second Ctrl-C means: now."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class ReceivedSignal:
    """A signal that came, and when (`time.monotonic`, seconds)."""

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
        """What `uninstall` brings back; None while the inbox is not installed."""
        self._reader: int | None = None
        self._pressed = -math.inf

    @property
    def installed(self) -> bool:
        return self._before is not None

    def install(self, at_prompt: bool = False) -> None:
        """Take over the stop signals and unblock them; SIGQUIT dumps all stacks to stderr.

        `at_prompt` says that this process reads from a prompt: a second Ctrl-C within
        `INSIST_WITHIN` seconds then raises `KeyboardInterrupt` in the main thread.

        SIGHUP and SIGINT stay ignored where nohup, or a shell's `&`, has this process ignore them.
        A launcher that blocked the signals around the start of this process loses none that came
        before this call. Only the main thread may call it: Python raises `ValueError` in others.
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
        """Give the signals back and forget those that came. Only the main thread may call it."""
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
        """Enter `around()` when the terminal asks to pause (Ctrl-Z), and leave it after `fg`. Where
        it says False, this process goes on as if nothing had been asked for. Nothing is done where
        this process was started with SIGTSTP ignored. Only the main thread may call it."""
        if signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:
            self._around_pause = around
            signal.signal(signal.SIGTSTP, _ignore_here)

    def leave_to_parent(self) -> None:
        """For a forked child: a Ctrl-C, which the terminal sends to all, would be written to the
        parent's pipe again. The handlers stay: no stop signal that they trap ends the process."""
        if self.installed:
            signal.set_wakeup_fd(-1)
            self._before, self._received = None, []
            self._react, self._reader, self._lock = None, None, threading.Lock()

    @property
    def received(self) -> tuple[ReceivedSignal, ...]:
        """All stop signals so far, oldest first."""
        return tuple(self._received)

    def react_with(self, reaction: Callable[[ReceivedSignal], None]) -> None:
        """Call `reaction` from the listening thread for every signal, those that came included;
        also while the main thread sits in native code."""
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
                        # To this thread: it stops with all others before it gets any further.
                        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        os.close(reader)

    def _note(self, received: ReceivedSignal, reader: int) -> None:
        with self._lock:
            if reader != self._reader:
                return  # it came before an `uninstall`, and is not meant for a later `install`
            self._received.append(received)
            reaction = self._react
        if reaction is not None:
            reaction(received)


def follow_parent(parent: int, with_signal: signal.Signals) -> None:
    """As `signal_at_end_of`; if the parent is gone already, the signal is raised here."""
    if not signal_at_end_of(parent, with_signal):
        os.kill(os.getpid(), with_signal)


def signal_at_end_of(parent: int, with_signal: signal.Signals | None) -> bool:
    """Get `with_signal` when the parent process ends, however it ends (prctl(2), PR_SET_PDEATHSIG);
    None takes that back. `parent` is its process id. The kernel sends the signal when the *thread*
    ends that started this process. Returns whether the parent is still there; if not, no signal
    comes. Raises `OSError` if the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(with_signal or 0), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    return os.getppid() == parent


def exit_immediately(received: ReceivedSignal) -> None:
    """The reaction while nothing was done yet and no other process depends on this one: end it."""
    exit_before_training(received.signal.name)


def exit_before_training(why: str) -> NoReturn:
    """End this process, whatever its main thread does: nothing was done yet that could be lost."""
    say(f"kempner: {why} before training began; nothing to save", sys.stderr)
    leave(ExitCode.STOPPED)


def insists(received: Sequence[ReceivedSignal]) -> bool:
    times = [r.at for r in received if r.signal == signal.SIGINT]
    return any(later - earlier <= INSIST_WITHIN for earlier, later in pairwise(times))


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """What is started in this block keeps its stop signals until it unblocks them: a mask outlives
    exec."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def untouched_by_default(number: signal.Signals) -> Iterator[None]:
    """Ignore a signal that has its default action, also in threads, where Python cannot."""
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
    """For a process whose interpreter is about to be torn down: no stop signal ends it any more.
    Python restores the signals' default actions before it has come to its end, but for those that
    are ignored: one that comes too late would turn a good exit code into a death by signal."""
    for stop_signal in STOP_SIGNALS:
        signal.signal(stop_signal, signal.SIG_IGN)


def _not_to_be_ignored() -> list[signal.Signals]:
    """The stop signals without those that this process was started with as ignored. A start that is
    deaf until signals are trapped (`DEAF`) ignores SIGTERM, too."""
    ignored = {number for number in STOP_SIGNALS if signal.getsignal(number) is signal.SIG_IGN}
    if signal.SIGTERM in ignored:
        return list(STOP_SIGNALS)
    return [n for n in STOP_SIGNALS if n not in ignored & {signal.SIGHUP, signal.SIGINT}]


def _ignore_here(signum: int, frame: FrameType | None) -> None:
    """Exists so that the interpreter writes the signal to the pipe."""


_inbox = SignalInbox()
os.register_at_fork(after_in_child=_inbox.leave_to_parent)


def inbox() -> SignalInbox:
    return _inbox
