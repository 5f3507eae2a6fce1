"""Signal handling: handlers only record signals, loops read the record.

Python runs a signal's handler only when the main thread gets back to the interpreter, which a
rank inside a rendezvous or a collective may never do. The C-level trampoline, however, writes the
signal's number to a pipe at once (`signal.set_wakeup_fd`), and a thread reads it there.

Nothing beyond the standard library is imported here: this is armed before anything else.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from kempner.run.process.exit_codes import ExitCode

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Received:
    """A signal that came, and when (`time.monotonic`, seconds)."""

    signal: signal.Signals
    at: float


class SignalInbox:
    """Collects the signals that ask for a stop.

    `install` may be called twice; later signals only add to the record. One inbox per process:
    use `inbox()`.
    """

    def __init__(self) -> None:
        self._received: list[Received] = []
        self._lock = threading.Lock()
        self._react: Callable[[Received], None] | None = None
        self._installed = False

    def install(self) -> None:
        """Take over the stop signals and unblock them; SIGQUIT dumps all stacks to stderr.

        A launcher that blocked the signals around the start of this process loses none that came
        before this call.
        """
        if self._installed:
            return
        self._installed = True
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(reader,), name="signals", daemon=True).start()
        for stop_signal in STOP_SIGNALS:
            signal.signal(stop_signal, _ignore_here)
        if sys.__stderr__ is not None:
            faulthandler.register(signal.SIGQUIT, file=sys.__stderr__, all_threads=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    @property
    def received(self) -> tuple[Received, ...]:
        """All stop signals so far, oldest first."""
        return tuple(self._received)

    def react_with(self, reaction: Callable[[Received], None]) -> None:
        """Call `reaction` from the listening thread for every signal, those that came included.

        It runs even while the main thread sits in native code.
        """
        with self._lock:
            self._react = reaction
            waiting = self.received
        for received in waiting:
            reaction(received)

    def _listen(self, reader: int) -> None:
        while number := os.read(reader, 1):
            if number[0] in STOP_SIGNALS:
                self._note(Received(signal.Signals(number[0]), time.monotonic()))

    def _note(self, received: Received) -> None:
        with self._lock:
            self._received.append(received)
            reaction = self._react
        if reaction is not None:
            reaction(received)


def follow_parent(parent: int, with_signal: signal.Signals) -> None:
    """As `signal_at_end_of`; if the parent is gone already, the signal is raised here."""
    if not signal_at_end_of(parent, with_signal):
        os.kill(os.getpid(), with_signal)


def signal_at_end_of(parent: int, with_signal: signal.Signals) -> bool:
    """Get `with_signal` when the parent process ends, however it ends (prctl(2), PR_SET_PDEATHSIG).

    `parent` is its process id. The kernel sends the signal when the *thread* ends that started this
    process. Returns whether the parent is still there; if not, no signal comes. Raises `OSError` if
    the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(with_signal), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    return os.getppid() == parent


def exit_immediately(received: Received) -> None:
    """A reaction for as long as nothing was done and nobody depends on this process: end it."""
    exit_before_training(received.signal.name)


def exit_before_training(why: str) -> NoReturn:
    """End this process, whatever its main thread does: nothing was done yet that could be lost."""
    print(f"kempner: {why} before training began; nothing to save", file=sys.stderr, flush=True)
    os._exit(ExitCode.STOPPED)


def _ignore_here(signum: int, frame: FrameType | None) -> None:
    """Exists so that the interpreter writes the signal to the pipe."""


_inbox = SignalInbox()


def inbox() -> SignalInbox:
    """The inbox of this process."""
    return _inbox
