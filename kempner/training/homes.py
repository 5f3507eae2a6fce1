"""The run and the folder of each loop of this process; and how the process ends: its message to the
supervisor, and its exit status.

A process may have several loops, as in cross-validation. The first one without a run directory uses
the run itself, the second one `loops/2` in it, and so on, in the order of their calls: a program
that is started again passes the complete loops, and resumes the first one that is not.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from kempner.config.sections import SuperviseSection
from kempner.run.control.launch_env import LaunchTerms
from kempner.run.output.console import leave, say
from kempner.run.process.exit_codes import ExitCode, RunError, UsageError
from kempner.run.process.signals import ignore_from_now_on
from kempner.run.process.whereabouts import place_of
from kempner.run.record.attempts import Attempt, Fence, begin_attempt
from kempner.run.record.identity import ChosenRun, RunIdentity, choose_run
from kempner.run.record.run_dir import RunDirectory
from kempner.training.groups.process_groups import Ranks
from kempner.training.main import Ownership, classify, take_run
from kempner.training.rank_link.rank_link import RankLink
from kempner.training.rank_link.shutdown import StopListener


class LastWords:
    """Reports to the supervisor how this process ends: at its exit, or at once for an exception. An
    interpreter that shuts down waits for threads, which may wait for ranks that wait for this
    one."""

    def __init__(self, rank_link: RankLink) -> None:
        self.code: ExitCode | None = None
        """How the loop ended, if it did."""
        self.uncommitted: str | None = None
        """How the loop was left without a commit, to print if the program then ends without an
        error."""
        self._rank_link, self._earlier_hook = rank_link, sys.excepthook
        self._status = ExitCode.COMPLETED
        """The exit status if Python's would be wrong: after an exception that is printed without
        its traceback, and after a loop outside of the main thread."""
        if threading.current_thread() is threading.main_thread():
            sys.excepthook = self._hook
        else:
            self._thread, self._earlier_thread_hook = threading.get_ident(), threading.excepthook
            threading.excepthook = self._thread_hook
        atexit.register(self._say)

    def end_with(self, error: RunError) -> NoReturn:
        """End this process with an error where Python would ignore the exception."""
        self._report(error)
        leave(error.code)

    def _say(self) -> None:
        if self.code is not None:
            self._rank_link.leave(self.code, "")
        elif self.uncommitted is not None:
            say(f"kempner: {self.uncommitted}", sys.stderr)
        if self._status is not ExitCode.COMPLETED:
            leave(self._status)  # otherwise a stopped run would look complete
        ignore_from_now_on()

    def _hook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not self._report(error):
            self._earlier_hook(kind, error, trace)

    def _thread_hook(self, ended: threading.ExceptHookArgs) -> None:
        """Handle an exception that ends the loop's thread, if that is not the main one."""
        error = ended.exc_value
        if threading.get_ident() != self._thread or error is None:
            self._earlier_thread_hook(ended)
        elif isinstance(error, SystemExit):
            self._status = self.code or ExitCode.COMPLETED
        else:
            self._status = _code_of(error, self._rank_link)
            if not self._report(error):
                self._earlier_thread_hook(ended)

    def _report(self, error: BaseException) -> bool:
        """Report to the supervisor; returns whether the user needs no traceback."""
        after_loop, self.code = self.code is ExitCode.COMPLETED, None
        self.uncommitted = None  # the exception says more
        code = _code_of(error, self._rank_link)
        if not isinstance(error, RunError):
            with_place = after_loop or code is ExitCode.PEERS_LOST
            where = f"{place_of(error.__traceback__).words}: " if with_place else ""
            self._rank_link.leave(code, f"{where}{type(error).__name__}: {error}")
            return False
        self._status = code
        self._rank_link.report_unfit_node(error)
        self._rank_link.leave(code, str(error))
        say(f"kempner: {error}", sys.stderr)
        return True


def _code_of(error: BaseException, rank_link: RankLink) -> ExitCode:
    return error.code if isinstance(error, RunError) else classify(error, rank_link)


@dataclass(frozen=True)
class Home:
    """The place of a loop: `run` has attempts and ledger, `folder` the loop's identity and
    checkpoints. A loop that names its folder has `number` 0."""

    run: RunDirectory
    folder: RunDirectory
    number: int = 0

    @property
    def place(self) -> str:
        """The folder in the ledger's form; empty for the run's own."""
        if self.folder == self.run:
            return ""
        path = self.folder.path
        return str(path.relative_to(self.run.path) if self._within else path)

    @property
    def _within(self) -> bool:
        return self.folder.path.is_relative_to(self.run.path)

    def fence(self, ranks: Ranks, attempt: Attempt) -> Fence:
        """The fence against earlier attempts. A folder outside of the supervisor's run has its own
        attempts. Raises `UsageError`, on all ranks, if it cannot be written."""
        if self._within:
            return Fence(self.run.attempts, attempt)
        mine: Attempt | str = ""
        if ranks.world.rank == 0:
            try:
                mine = begin_attempt(self.folder)
            except UsageError as error:
                mine = str(error)
        agreed = ranks.broadcast(mine)
        if not isinstance(agreed, Attempt):
            raise UsageError(str(agreed))
        return Fence(self.folder.attempts, agreed)


@dataclass(frozen=True)
class SupervisedProcess:
    """The connection of this process to its supervisor, which outlives a loop."""

    rank_link: RankLink
    shutdown: StopListener
    last_words: LastWords
    terms: LaunchTerms | None


@dataclass
class Loops:
    """The loops of this process so far."""

    count: int = 0
    """Number of loops without a run directory."""
    chosen: Path | None = None
    """Their run, without a supervisor."""
    supervised: SupervisedProcess | None = None
    _claims: dict[Path, Ownership] = field(default_factory=dict)
    _completed: dict[Path, object] = field(default_factory=dict)

    def find_home(
        self,
        ranks: Ranks,
        link: RankLink,
        named: Path | None,
        program: RunIdentity,
        accepted: Collection[str],
    ) -> Home:
        """The home of the next loop: `named` by the user, or by the order of the calls."""
        if named is not None:
            folder = RunDirectory(named)
            apart = link.launch is not None and named.resolve() != link.run.path.resolve()
            return Home(link.run, folder) if apart else Home(folder, folder)
        if link.launch is None:
            self.chosen = self.chosen or _choose(ranks, link.run.path, program, accepted)
        run = RunDirectory(self.chosen) if link.launch is None and self.chosen else link.run
        self.count += 1
        beside = run.path / "loops" / str(self.count)
        return Home(run, run if self.count == 1 else RunDirectory(beside), self.count)

    def claim(self, ranks: Ranks, link: RankLink, section: SuperviseSection) -> Ownership:
        """Claim the run, unless this process has it already; raises as `take_run`."""
        where = link.run.path.resolve()
        found = self._claims.get(where)
        if found is None or found.users == 0:
            found = self._claims[where] = take_run(link.run, ranks, link.launch, section)
        else:
            found.users += 1
        return found

    def complete(self, home: Home, facts: Mapping[str, object]) -> None:
        self._completed[home.folder.path.resolve()] = facts.get("steps")

    def refuse_completed(self, home: Home, facts: Mapping[str, object]) -> None:
        """Raise `UsageError` if an earlier loop has completed this run with as many steps: this
        loop would get the other one's result."""
        where, steps = home.folder.path.resolve(), facts.get("steps")
        if where in self._completed and self._completed[where] == steps:
            raise UsageError(
                f"the run in {home.folder.path} was completed by a loop before this one in the "
                "same process; give each loop a run_dir of its own, or none"
            )


LOOPS = Loops()


def forget_loops() -> None:
    """Reset to the state of a new process, for a process that runs several programs."""
    LOOPS.__init__()  # type: ignore[misc]


def _choose(ranks: Ranks, usual: Path, program: RunIdentity, accepted: Collection[str]) -> Path:
    chosen: ChosenRun | None = None
    if ranks.world.rank == 0:
        chosen = choose_run(usual, program, accepted)
    agreed = ranks.broadcast(chosen)
    assert isinstance(agreed, ChosenRun)  # rank 0 made one
    if agreed.sentence:
        ranks.say(agreed.sentence)
    return agreed.path
