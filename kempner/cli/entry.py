"""Entry point of `kempner`: installs signal handlers, runs the command, sets the exit code.

Nothing but the standard library is imported before the signals are armed: a stop that is asked for
while a rank still imports is noticed as well.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from kempner.run.process.exit_codes import ExitCode


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs `kempner` with `arguments` (the process's own when None) and exits with its code.

    Raises:
        SystemExit: unless the command failed unexpectedly; then its exception. A rank and a
            supervisor that are this process's own command end it at once instead: a signal that
            comes after the last step must not change the code.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["supervise"] and arguments is None and "SLURM_JOB_ID" in os.environ:
        from kempner.supervisor.watchdog.keeper import split_batch

        split_batch(os.environ)
    armed = _arm(given)
    if given[:1] == ["train"]:
        # A rank imports a million objects, which all stay: to look for garbage among them would
        # take a fifth of its start. `build` enables the collector again.
        gc.disable()
    try:
        if armed and arguments is None:
            _run_and_leave(given)
        code = _run(given)
        if arguments is None and "torch" in sys.modules:
            from kempner.run.output.console import leave

            leave(code)  # to tear torch down would keep the shell waiting for a second
        sys.exit(code)
    finally:
        gc.enable()


def _arm(arguments: Sequence[str]) -> bool:
    """Makes ready for what may come before any slow import; whether the command must stop in order.

    Such a command traps the signals, and fails at nothing that it prints. What the others print is
    what they are asked for, on standard output at least.
    """
    from kempner.run.output.console import protect

    must_stop = arguments[:1] in (["train"], ["supervise"])
    if not must_stop:
        # A closed standard output is no full one: the exit code is all that is wanted then.
        protect(["stderr"] if sys.stdout is not None else ["stdout", "stderr"])
        return False
    from kempner.run.process.signals import exit_immediately, inbox

    protect()
    inbox().install()
    inbox().react_with(exit_immediately)
    return True


def _run_and_leave(arguments: Sequence[str]) -> NoReturn:
    """Runs the command; the interpreter is not torn down, as that would untrap the signals."""
    from kempner.run.output.console import leave
    from kempner.run.process.exit_codes import ExitCode
    from kempner.supervisor.watchdog.board import board

    try:
        code = _run(arguments)
        board().settle()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else ExitCode.CRASHED
        board().settle()
    except BaseException:  # noqa: BLE001 - shown as Python shows it; then the process ends
        sys.excepthook(*sys.exc_info())
        code = ExitCode.CRASHED
    leave(code)


def _run(arguments: Sequence[str]) -> int:
    """The exit code of the command; what the user caused is said on stderr in one line."""
    from kempner.run.process.exit_codes import ExitCode, RunError, cannot_use

    try:
        return _call(arguments)
    except RunError as error:
        return _complain(str(error), error.code)
    except KeyboardInterrupt:  # also of one that still imports
        return ExitCode.INTERRUPTED
    except OSError as error:
        if error.filename is None and error.errno in _UNWRITABLE:
            return _stop_printing(error)
        if error.filename is None or error.errno is None:
            raise
        refusal = cannot_use(error)
        return _complain(str(refusal), refusal.code)


def _call(arguments: Sequence[str]) -> int:
    """What the command returns; its own sentences about a wrong command line are said here."""
    import typer

    from kempner.cli.app import app, path_of
    from kempner.cli.usage import explain, help_asked_for, refuse_empty
    from kempner.config.errors import ConfigError
    from kempner.run.process.exit_codes import ExitCode

    refuse_empty(arguments)
    ours = list(arguments[: arguments.index("--")] if "--" in arguments else arguments)
    if "--version" in ours:
        arguments = ["--version"]
    elif ours[:1] == ["help"]:
        arguments = [*ours[1:], "--help"]
    try:
        outcome = app(args=list(arguments), prog_name="kempner", standalone_mode=False)
        sys.stdout.flush()
    except ConfigError as error:
        return _complain(str(error), ExitCode.USAGE)
    except typer.TyperException as error:  # the command line itself
        if (text := help_asked_for(error, arguments)) is not None:
            print(text)
            return ExitCode.COMPLETED
        sentence = explain(error, arguments)
        return _complain(f"{sentence} (see {path_of(arguments)} -h)", ExitCode.USAGE)
    except typer.Abort:
        return ExitCode.INTERRUPTED
    return ExitCode.COMPLETED if outcome is None else outcome


_UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EIO)
"""What a standard output that takes nothing any more fails with."""


def _stop_printing(error: OSError) -> ExitCode:
    """Drop further output, as its reader is gone (`| head`) or its disk is full."""
    from kempner.run.process.exit_codes import CannotWriteError, ExitCode

    nothing = os.open(os.devnull, os.O_WRONLY)  # for what Python flushes as it ends
    os.dup2(nothing, 1)
    os.close(nothing)
    if error.errno == errno.EPIPE:
        return ExitCode.CRASHED  # in silence, as typer does while the command runs
    return _complain(f"the output cannot be written: {error.strerror}", CannotWriteError.code)


def _complain(sentence: str, code: ExitCode) -> ExitCode:
    with suppress(UnicodeEncodeError):  # words that Python could not decode, in a plain C locale
        sentence = sentence.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in sentence)
    print(f"kempner: {''.join(shown)}", file=sys.stderr)
    return code
