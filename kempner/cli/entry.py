"""Entry point of `kempner`: installs signal handlers, runs the command, sets the exit code.

Only the standard library is imported before the signals are trapped, so that a stop signal during a
rank's imports is noticed, too.
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
    """Run `kempner` with `arguments` (None: the process's) and exit with its code.

    Raises:
        SystemExit: with the exit code; an unexpected exception passes through. If this process is
            a rank or a supervisor, it exits without finalizing the interpreter, so that a signal
            after the last step does not change the code.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["supervise"] and arguments is None and "SLURM_JOB_ID" in os.environ:
        from kempner.supervisor.watchdog.keeper import split_batch

        split_batch(os.environ)
    armed = _arm(given)
    if given[:1] == ["train"]:
        # A rank's imports make a million objects, which all stay: collecting garbage among them
        # would take a fifth of its start. `build` enables the collector again.
        gc.disable()
    try:
        if armed and arguments is None:
            _run_and_leave(given)
        code = _run(given)
        if arguments is None and "torch" in sys.modules:
            from kempner.run.output.console import leave

            leave(code)  # finalizing torch would take a second
        sys.exit(code)
    finally:
        gc.enable()


def _arm(arguments: Sequence[str]) -> bool:
    """Protect output and trap signals before any slow import; returns whether signals are trapped.

    That is so for `train` and `supervise`, for which failing output is never an error. For other
    commands, standard output is the result, so only stderr is protected.
    """
    from kempner.run.output.console import protect

    must_stop = arguments[:1] in (["train"], ["supervise"])
    if not must_stop:
        # With a closed standard output, only the exit code is wanted.
        protect(["stderr"] if sys.stdout is not None else ["stdout", "stderr"])
        return False
    from kempner.run.process.signals import exit_immediately, inbox

    protect()
    inbox().install()
    inbox().react_with(exit_immediately)
    return True


def _run_and_leave(arguments: Sequence[str]) -> NoReturn:
    """Run the command, and exit without finalizing the interpreter, which would untrap signals."""
    from kempner.run.output.console import leave
    from kempner.run.process.exit_codes import ExitCode
    from kempner.supervisor.watchdog.board import board

    try:
        code = _run(arguments)
        board().settle()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else ExitCode.CRASHED
        board().settle()
    except BaseException:  # noqa: BLE001 - Python prints it, then the process exits
        sys.excepthook(*sys.exc_info())
        code = ExitCode.CRASHED
    leave(code)


def _run(arguments: Sequence[str]) -> int:
    """The exit code of the command; a user's error becomes one line on stderr."""
    from kempner.run.process.exit_codes import ExitCode, RunError, cannot_use

    try:
        return _call(arguments)
    except RunError as error:
        return _complain(str(error), error.code)
    except KeyboardInterrupt:  # also during imports
        return ExitCode.INTERRUPTED
    except OSError as error:
        if error.filename is None and error.errno in _UNWRITABLE:
            return _stop_printing(error)
        if error.filename is None or error.errno is None:
            raise
        refusal = cannot_use(error)
        return _complain(str(refusal), refusal.code)


def _call(arguments: Sequence[str]) -> int:
    """Call the command; prints errors in the command line and the configuration."""
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
"""Error numbers of a standard output that cannot be written any more."""


def _stop_printing(error: OSError) -> ExitCode:
    """Drop further output: its reader is gone (`| head`) or its disk is full."""
    from kempner.run.process.exit_codes import CannotWriteError, ExitCode

    nothing = os.open(os.devnull, os.O_WRONLY)  # for Python's flush at exit
    os.dup2(nothing, 1)
    os.close(nothing)
    if error.errno == errno.EPIPE:
        return ExitCode.CRASHED  # silently, as typer does while the command runs
    return _complain(f"the output cannot be written: {error.strerror}", CannotWriteError.code)


def _complain(sentence: str, code: ExitCode) -> ExitCode:
    with suppress(UnicodeEncodeError):  # undecodable words, in a plain C locale
        sentence = sentence.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in sentence)
    print(f"kempner: {''.join(shown)}", file=sys.stderr)
    return code
