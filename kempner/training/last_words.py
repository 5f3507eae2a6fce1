"""How a process with a loop of the user's ends: told to the supervisor, and as an exit status."""

from __future__ import annotations

import atexit
import sys
import threading
from types import TracebackType
from typing import NoReturn

from kempner.run.output.console import leave, say
from kempner.run.process.exit_codes import ExitCode, RunError
from kempner.run.process.signals import ignore_from_now_on
from kempner.run.process.whereabouts import place_of
from kempner.training.main import classify
from kempner.training.rank_link.rank_link import RankLink


class LastWords:
    """Tells the supervisor how this process ends: at its exit, or with the exception that ends it.

    At once in the latter case: an interpreter that goes down waits for threads, and those may wait
    for ranks that wait for this one.
    """

    def __init__(self, rank_link: RankLink) -> None:
        self.code: ExitCode | None = None
        """How the loop ended, if it did; without that the exit status says more."""
        self.uncommitted: str | None = None
        """How the loop was left without a commit, for a program that ends as if all were well."""
        self._rank_link, self._earlier_hook = rank_link, sys.excepthook
        self._status = ExitCode.COMPLETED
        """The exit status, where Python would leave with another: after an exception that is told
        without its traceback, and after a loop that is not in the main thread."""
        if threading.current_thread() is threading.main_thread():
            sys.excepthook = self._hook
        else:
            self._thread, self._earlier_thread_hook = threading.get_ident(), threading.excepthook
            threading.excepthook = self._thread_hook
        atexit.register(self._say)

    def end_with(self, error: RunError) -> NoReturn:
        """End this process where Python would not pass the exception on."""
        self._told(error)
        leave(error.code)

    def _say(self) -> None:
        if self.code is not None:
            self._rank_link.leave(self.code, "")
        elif self.uncommitted is not None:
            say(f"kempner: {self.uncommitted}", sys.stderr)
        if self._status is not ExitCode.COMPLETED:
            leave(self._status)  # or a run that was stopped would pass for one that is complete
        ignore_from_now_on()

    def _hook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not self._told(error):
            self._earlier_hook(kind, error, trace)

    def _thread_hook(self, ended: threading.ExceptHookArgs) -> None:
        """What a thread ends with that is not the main one goes no further than this."""
        error = ended.exc_value
        if threading.get_ident() != self._thread or error is None:
            self._earlier_thread_hook(ended)
        elif isinstance(error, SystemExit):
            self._status = self.code or ExitCode.COMPLETED
        else:
            self._status = _code_of(error, self._rank_link)
            if not self._told(error):
                self._earlier_thread_hook(ended)

    def _told(self, error: BaseException) -> bool:
        """Tell the supervisor; whether there is nothing more to be told to the user."""
        after_loop, self.code = self.code is ExitCode.COMPLETED, None
        self.uncommitted = None  # the exception says more
        code = _code_of(error, self._rank_link)
        if not isinstance(error, RunError):
            where = f"{place_of(error.__traceback__).words}: " if after_loop else ""
            self._rank_link.leave(code, f"{where}{type(error).__name__}: {error}")
            return False
        self._status = code
        self._rank_link.report_unfit_node(error)
        self._rank_link.leave(code, str(error))
        say(f"kempner: {error}", sys.stderr)
        return True


def _code_of(error: BaseException, rank_link: RankLink) -> ExitCode:
    return error.code if isinstance(error, RunError) else classify(error, rank_link)
