"""Entry point of `kempner`: installs signal handlers, runs the command, sets the exit code.

Nothing but the standard library is imported before the signals are armed: a stop that is asked for
while a rank still imports is noticed as well.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from kempner.run.process.exit_codes import ExitCode


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs `kempner` with `arguments` (the process's own when None) and exits with its code.

    Raises:
        SystemExit: always, unless the command failed unexpectedly; then its exception.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    _arm_signals(given)
    if given[:1] == ["train"]:
        # A rank imports a million objects, which all stay: to look for garbage among them would
        # take a fifth of its start. `build` enables the collector again.
        gc.disable()
    try:
        sys.exit(_run(given))
    finally:
        gc.enable()


def _arm_signals(arguments: Sequence[str]) -> None:
    """Installs the handlers of a command that must stop in order, before any slow import."""
    if arguments[:1] in (["train"], ["supervise"]):
        from kempner.run.process.signals import exit_immediately, inbox

        inbox().install()
        inbox().react_with(exit_immediately)


def _run(arguments: Sequence[str]) -> int:
    """The exit code of the command; what the user caused is said on stderr in one line."""
    import typer

    from kempner.cli.app import app
    from kempner.config.errors import ConfigError
    from kempner.run.process.exit_codes import ExitCode, RunError

    try:
        outcome = app(args=arguments, prog_name="kempner", standalone_mode=False)
    except ConfigError as error:
        return _complain(str(error), ExitCode.USAGE)
    except RunError as error:
        return _complain(str(error), error.code)
    except typer.TyperException as error:  # the command line itself
        return _complain(f"{error.format_message()} (see kempner --help)", ExitCode.USAGE)
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    return ExitCode.COMPLETED if outcome is None else outcome


def _complain(sentence: str, code: ExitCode) -> ExitCode:
    line = "".join(c if c.isprintable() else _escape(c) for c in sentence)
    print(f"kempner: {line}", file=sys.stderr)
    return code


def _escape(character: str) -> str:
    """A line break, a control character or a byte that is no text, as Python writes it."""
    return character.encode("unicode_escape").decode()
