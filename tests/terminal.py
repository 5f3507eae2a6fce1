"""A terminal with a command in it, as for a user who types and looks."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import subprocess
import termios
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

CTRL_C, CTRL_Q, CTRL_S, CTRL_Z, ENTER = b"\x03", b"\x11", b"\x13", b"\x1a", b"\n"
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]")


def lines_of(shown: bytes) -> list[str]:
    """The lines that were shown, also those that others have overwritten, without colours, and
    without the echo of a Ctrl-C.
    """
    text = _CONTROLS.sub("", shown.decode(errors="replace")).replace("^C", "\n")
    return [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]


@dataclass
class Terminal:
    """A terminal with a session of its own in it, which runs a command of the shell.

    `silence` is the longest time in seconds in which nothing was shown, as far as `look` has seen;
    `after` is the line that stood there.
    """

    master: int
    shell: subprocess.Popen[bytes]
    shown: bytearray = field(default_factory=bytearray)
    closed: bool = False
    began: float = field(default_factory=time.monotonic)
    last: float = field(default_factory=time.monotonic)
    silence: float = 0.0
    after: str = "(Enter)"
    ended: bool = False

    @property
    def seconds(self) -> float:
        """From Enter to the last that was shown, or to the end of the command."""
        return self.last - self.began

    @classmethod
    def open(
        cls, command: str, cwd: Path | None = None, environ: Mapping[str, str] | None = None
    ) -> Terminal:
        """Start a command of bash; `environ` comes on top of this process's environment."""
        master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (40, 120))

        # A size that is exported, as pytest's workers do, would outlive every resize.
        inherited = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}

        def take_terminal() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a test may run where it is ignored
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

        shell = subprocess.Popen(
            ["bash", "-c", command],
            cwd=cwd,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=take_terminal,
            env={**inherited, "OMP_NUM_THREADS": "1", "TERM": "xterm", **(environ or {})},
        )
        os.close(slave)
        os.set_blocking(master, False)
        return cls(master, shell)

    def look(self) -> bytes:
        """All that was shown until now."""
        seen = len(self.shown)
        with contextlib.suppress(BlockingIOError, OSError):
            while part := os.read(self.master, 65536):
                self.shown += part
        if len(self.shown) > seen:
            self._hear(seen)
        return bytes(self.shown)

    def has_ended(self) -> bool:
        """Whether the command is over, and all of it seen."""
        over = self.shell.poll() is not None
        self.look()  # or it may wait for its output to be read
        if over and not self.ended:
            self.ended = True
            self._hear(len(self.shown))
        return over

    def _hear(self, seen: int) -> None:
        """Something is shown, or the command has ended, after `seen` bytes."""
        now = time.monotonic()
        if now - self.last > self.silence:
            self.silence = now - self.last
            self.after = (lines_of(bytes(self.shown[:seen])) or ["(Enter)"])[-1]
        self.last = now

    def lines(self) -> list[str]:
        """The lines that were shown until now."""
        return lines_of(self.look())

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self.master, keys)

    def resize(self, columns: int) -> None:
        """As a user who drags the window's edge."""
        termios.tcsetwinsize(self.master, (40, columns))

    def close(self) -> None:
        """As a user who closes the window: the kernel hangs up."""
        if not self.closed:
            self.closed = True
            os.close(self.master)

    def end(self) -> None:
        """Kill what is still there."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.shell.pid, signal.SIGKILL)
        self.shell.wait()
        self.close()
