"""Pure functions: the outcome of an attempt from its ranks' exits; what the exit of a program that
does not use kempner means, and whether an attempt of it made progress.

What such a program has saved is not known. Its progress is judged by the steps that it reports, or
by its run time if it reports none."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING

from kempner.run.process.exit_codes import ExitCode, StopReason

if TYPE_CHECKING:
    from kempner.config.sections import ProgramSection  # not in a node's agent

NAMED = 8
"""The most ranks that a sentence names."""

PRINTED_LAST = "it printed last: "
"""Prefix of a sentence about a rank that has not reported why it failed; its last output may
explain it."""

OUT_OF_MEMORY = "out of memory: the kernel killed"
"""Prefix of the sentence about a rank that the kernel's out-of-memory killer has killed."""


class ReportedLoop(Enum):
    """The training loop of a user's program that reports to kempner, according to rank 0."""

    UNKNOWN = auto()
    UNDER_WAY = auto()
    COMPLETE = auto()
    """The last step is committed; another loop may follow."""


@dataclass(frozen=True)
class RankExit:
    """How a rank ended.

    `status` is its exit code, or minus the signal that killed it; None if its end was not seen
    because the connection broke. `ended_by_us`: the supervisor killed it. `sentence` is the rank's
    last message, or its launcher's if the rank is gone. `oom_kills` counts the out-of-memory kills
    in the job's control group on its node until then; 0 if the launcher cannot see them. `asked`:
    its launcher had sent it a signal. `means` and `final` are set by `interpret` for a program that
    does not use kempner's codes: what the exit stands for, and that no restart can help.
    `unstarted`: Slurm or the node could not start it; `sentence` says why."""

    rank: int
    status: int | None
    ended_by_us: bool = False
    sentence: str = ""
    oom_kills: int = 0
    asked: bool = False
    means: ExitCode | None = None
    final: bool = False
    unstarted: bool = False

    @property
    def code(self) -> int | None:
        """`means` if set, else `status`."""
        return self.status if self.means is None else self.means

    @property
    def raised(self) -> str:
        """The first line of the rank's own message about its failure; empty if it sent none."""
        first = "" if self.status is None else self.sentence.partition("\n")[0]
        return "" if first.startswith(PRINTED_LAST) else first


@dataclass(frozen=True)
class Decision:
    """The supervisor's exit code, and a sentence that explains it to the user.

    `culprit` is the rank that failed first, if one did. `bad_nodes` are nodes without which there
    are too few to go on. `environment`: a node or the network is at fault. `final`: the program
    itself said that no restart can help. `left_at` is the step after which a user's loop ended with
    0 before its last step. `scheduler`: Slurm or a node did not start the ranks, which says nothing
    about the run."""

    code: ExitCode
    reason: str
    culprit: int | None = None
    bad_nodes: tuple[str, ...] = ()
    environment: bool = False
    final: bool = False
    left_at: int | None = None
    scheduler: bool = False


def decide_outcome(
    exits: Sequence[RankExit], stop_requested: StopReason = StopReason.NONE
) -> Decision:
    """The outcome of an attempt from its ranks' exits, in the order in which they became known.

    `stop_requested` is why the ranks were asked to stop, NONE if they were not. A rank that is lost
    during a stop is a failure only if the stop does not end the run."""
    causes = [e for e in exits if not _harmless(e, stop_requested)]
    if not exits:
        return Decision(ExitCode.CRASHED, "no rank was ever started")
    if all(e.code == ExitCode.COMPLETED for e in exits):
        return Decision(ExitCode.COMPLETED, "completed")
    if refused := next((e for e in exits if e.unstarted), None):
        reason = f"the ranks cannot be started here: {refused.sentence}"
        return Decision(ExitCode.STOPPED, reason, scheduler=True)
    if causes:
        first = causes[0]
        if stop_requested.ends_run and _from_outside(first):
            reason = f"rank {first.rank} {describe_exit(first)} while it stopped"
            return Decision(ExitCode.STOPPED, reason + _go_on(stop_requested), first.rank)
        reason = f"rank {first.rank} {describe_exit(first)}"
        return Decision(_code(first), reason, first.rank, final=first.final)
    if any(e.code == ExitCode.STOPPED for e in exits) or stop_requested:
        return Decision(ExitCode.STOPPED, "stopped" + _go_on(stop_requested) + _outstayed(exits))
    return Decision(ExitCode.PEERS_LOST, _why_a_peer_is_lost(exits))


def _why_a_peer_is_lost(exits: Sequence[RankExit]) -> str:
    """Why ranks have lost a peer although none has failed: one may have exited before the
    others."""
    left = [e.rank for e in exits if e.code == ExitCode.COMPLETED]
    lost = next((e for e in exits if e.code == ExitCode.PEERS_LOST), None)
    error = f": {lost.raised}" if lost is not None and lost.raised else ""
    if not left or lost is None:
        first = f", rank {lost.rank} first{error}" if lost is not None and error else ""
        return f"every rank lost a peer{first or '; cause unknown'}"
    more = f" and {len(left) - 1} more" if len(left) > 1 else ""
    return f"rank {left[0]}{more} left with 0 while rank {lost.rank} waited for it{error}"


def after_training(decision: Decision, exits: Sequence[RankExit]) -> Decision:
    """The outcome of an attempt whose training is complete. A failure after that is the program's,
    and no restart brings more steps; but a rank that was lost or killed from outside may have been
    about to begin another loop."""
    if decision.code in (ExitCode.COMPLETED, ExitCode.STOPPED):
        return decision
    first = next((e for e in exits if failed(e) and not e.ended_by_us), None)
    if first is not None and _from_outside(first):
        return decision
    reason, culprit = decision.reason, decision.culprit
    if decision.code is not ExitCode.HUNG and first is not None:
        reason, culprit = f"rank {first.rank} {describe_exit(first)}", first.rank
    left = [e.rank for e in exits if e.code == ExitCode.COMPLETED]
    others = f" ({'rank' if len(left) == 1 else 'ranks'} {', '.join(map(str, left[:NAMED]))}"
    others = f"{others}{', ...' if len(left) > NAMED else ''} had left with 0)" if left else ""
    reason = f"training is complete, but the program failed after its loop: {reason}{others}"
    return Decision(ExitCode.AFTER_TRAINING, reason, culprit)


def left_early(decision: Decision, step: int) -> Decision:
    """The outcome of an attempt whose ranks all exited with 0, but before their last step."""
    reason = f"the program ended after step {step} with 0, before its last step: not complete"
    return replace(decision, reason=f"{reason}; start it again to go on", left_at=step)


def ended_by_signal(decision: Decision, reason: StopReason) -> Decision:
    """The outcome of an attempt whose ranks all exited with 0 after a signal, as programs that save
    on a signal often do: that does not mean complete."""
    what = "the program ended with 0 after a signal, before its last step: not complete"
    return replace(decision, code=ExitCode.STOPPED, reason=what + _go_on(reason))


def failed(exit_: RankExit) -> bool:
    """Whether the other ranks cannot go on after this exit."""
    return exit_.code not in (ExitCode.COMPLETED, ExitCode.STOPPED)


def is_lost(exit_: RankExit) -> bool:
    """Whether the rank's end was not seen: its node or the network to it is lost."""
    return exit_.status is None and not exit_.ended_by_us


_NAMED_CODES = frozenset(ExitCode)


def describe_exit(exit_: RankExit) -> str:
    status, sentence = exit_.status, exit_.sentence.partition("\n")[0]
    if status is None:
        how = "disappeared without a message"
    elif status < 0:
        how = f"was killed by {signal.Signals(-status).name}"
    else:
        name = f" ({ExitCode(status).name.lower()})" if status in _NAMED_CODES else ""
        how = f"exited with code {status}{name}"
    return f"{how}: {sentence}" if sentence else how


def with_lack_of_memory(end: RankExit, group: str) -> RankExit:
    """The exit of a rank in whose control group the kernel has just killed for want of memory: the
    rank, or another process, such as one that it had started."""
    first, *others = end.sentence.split("\n")
    if end.status == -signal.SIGKILL:
        first = f"{OUT_OF_MEMORY} it (oom_kill of {group})"
    elif end.status not in _SAYS_NOTHING:
        first += f"{'; ' if first else ''}{OUT_OF_MEMORY} a process beside it (oom_kill of {group})"
    return replace(end, sentence="\n".join([first, *others]))


def find_last_words(printed: str, status: int) -> str:
    """Why a process ended with `status`, from the end of its output: an uncaught exception and its
    line, the message of a native crash, or an error message; else the last line. Empty if the
    status alone explains it, or if there is no output."""
    if status in _SAYS_NOTHING:
        return ""
    plain = _ESCAPES.sub("", printed)
    lines = [line.rstrip() for line in plain.splitlines()[-_LAST_LINES:]]
    if status > 0 and (raised := _uncaught(lines, 10 if status > 1 else _LAST_LINES)):
        return raised
    for at in range(len(lines) - 1, -1, -1):
        if (found := _NATIVE.search(lines[at])) is not None:
            message = found["said"].strip()
            below = [f for f in map(_FRAME.match, lines[at : at + _BELOW]) if f is not None]
            own = [f for f in below if not _LIBRARY.search(f["file"])] or below
            where = f" ({_place(own[0])})" if own else ""
            what = next((m[1] for m in map(_WHAT.match, lines[at : at + 3]) if m is not None), "")
            return message + (f": {what}" if what else "") + where
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    if status < 0 or not last:
        return ""
    if ended := _uncaught(lines, _LAST_LINES, threads=True):
        return f"a thread had ended: {ended}"
    return ("" if _COMPLAINT.search(last) else PRINTED_LAST) + last[:_LONGEST]


_SAYS_NOTHING = (0, -signal.SIGKILL, -signal.SIGTERM, ExitCode.STOPPED, ExitCode.PEERS_LOST)
_LAST_LINES, _BELOW, _LONGEST = 400, 40, 300
_FRAME = re.compile(r'\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:,? in (?P<function>.+))?')
_RAISED = re.compile(r"[A-Za-z_][\w.]*(?:: .*)?$")
_LIBRARY = re.compile(r"site-packages/|dist-packages/|/lib/python3|<frozen |<string>")
_GOT_OVER = re.compile(r"Exception (?:ignored )?in |--- Logging error ---|never retrieved")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_IN_THREAD = re.compile(r"Exception in thread ")
_BOX = re.compile(r" *[|+] ?")
_CAUSED = "The above exception was the direct cause"
_WHAT = re.compile(r"\s*what\(\):\s*(.+)")
_NATIVE = re.compile(
    r"(?P<said>Fatal Python error: .+|terminate called .+|.*\bAssertion `.+' failed\b.*"
    r"|(?:free|malloc|realloc|munmap_chunk)\(\): .+|double free .+|corrupted .+"
    r"|\*\*\* stack smashing detected.*|.*error while loading shared libraries: .+"
    r"|.*: command not found|kempner: .+ cannot be started: .+|.*AddressSanitizer: .+)$"
)
_COMPLAINT = re.compile(
    r"(?i)\b(?:error|fail\w*|cannot|can't|could not|fatal|abort\w*|denied|not found|invalid"
    r"|unable|unbound|no such|missing|refused|exceeded)\b"
)


def _uncaught(lines: Sequence[str], within: int, threads: bool = False) -> str:
    """The last uncaught exception in the lines, if at most `within` lines follow it, with the
    innermost frame that is not in a library. If it has a cause, the cause; of a group, also the
    first exception in it. With `threads`, the last one that ended a thread."""
    found, at = "", -1
    frames, caused, quiet, part = list[re.Match[str]](), False, threads, 0
    for number, boxed in enumerate(lines):
        part, line = _unboxed(boxed, part)
        if (frame := _FRAME.match(line)) is not None:
            frames.append(frame)
        elif line.startswith(_CAUSED):
            caused = bool(found)
        elif _GOT_OVER.search(line):
            quiet = not (threads and _IN_THREAD.search(line))
        elif (frames or (part and found)) and line[:1].strip() and not line.startswith("Traceback"):
            if _RAISED.match(line) and not (quiet or caused):
                exception = line[:_LONGEST] + _place_in(frames)
                if part == 0:
                    found, at = exception, number
                elif part == 1:
                    found, at, part = f"{found}, the first is {exception}", number, 2
            frames, quiet, caused = [], threads, False
    return found if len(lines) - 1 - at <= within else ""


def _unboxed(line: str, part: int) -> tuple[int, str]:
    """A line without the box that Python draws around an exception group, and the number of the
    exception in the group (0: none). `part` is that of the line before."""
    box = _BOX.match(line)
    if box is None:
        return 0, line
    inside = line[box.end() :]
    return (part + 1, "") if inside.startswith("-") else (part, inside)


def _place_in(frames: Sequence[re.Match[str]]) -> str:
    own = [f for f in frames if not _LIBRARY.search(f["file"])] or frames
    return f" ({_place(own[-1])})" if own and not own[-1]["file"].startswith("<") else ""


def _place(frame: re.Match[str]) -> str:
    where = f"{frame['file'].rpartition('/')[2]}:{frame['line']}"
    return f"{where} in {frame['function']}" if frame["function"] else where


def _go_on(reason: StopReason) -> str:
    if reason.changes_nodes:
        return " to continue on " + ("more" if reason is StopReason.GROW else "other") + " nodes"
    return (f" ({reason.words})" if reason else "") + "; start again to continue"


def _outstayed(exits: Sequence[RankExit]) -> str:
    killed = sorted(exit_.rank for exit_ in exits if exit_.ended_by_us)
    if not killed:
        return ""
    if len(killed) == 1:
        return f" (rank {killed[0]} did not leave in time and was killed)"
    return f" ({len(killed)} ranks, {killed[0]} among them, did not leave in time and were killed)"


def _harmless(exit_: RankExit, stop_requested: StopReason) -> bool:
    """Whether an exit follows from a stop or from another rank's end, and is no cause itself."""
    if exit_.status == -signal.SIGTERM and stop_requested:
        return True  # the signal came before the interpreter could trap it
    follow = (ExitCode.COMPLETED, ExitCode.STOPPED, ExitCode.PEERS_LOST)
    return exit_.code in follow or exit_.ended_by_us


def _from_outside(exit_: RankExit) -> bool:
    """A lost node or SIGKILL: neither says anything about the program."""
    return exit_.status in (None, -signal.SIGKILL)


def _code(exit_: RankExit) -> ExitCode:
    return next((code for code in ExitCode if code == exit_.code), ExitCode.CRASHED)


def interpret(end: RankExit, codes: ProgramSection, complete: bool) -> RankExit:
    """`end` with its meaning according to the configured `codes`.

    `fail_codes` take precedence. Next, the rank is complete if `complete` (a rank has said that the
    run is) or if its code is in `done_codes`, except 0 after it was asked to stop: programs also
    exit with 0 after saving. A rank that was asked to stop and exits in any other way is stopped.
    The exit of a rank that was killed by us, or was not seen, is left as it is."""
    status = end.status
    if status is None or end.ended_by_us:
        return end
    if status in codes.fail_codes:
        return replace(end, means=_failure(status), final=True)
    if complete or (status in codes.done_codes and not (end.asked and status == 0)):
        return replace(end, means=ExitCode.COMPLETED)
    if status in codes.requeue_codes or (end.asked and not _killed_from_outside(status)):
        return replace(end, means=ExitCode.STOPPED)
    if status in _NO_FAILURES:
        return replace(end, means=ExitCode.CRASHED)  # kempner's meaning of the code does not apply
    return end


_NO_FAILURES = (ExitCode.COMPLETED, ExitCode.STOPPED, ExitCode.PEERS_LOST)
"""Codes with which kempner's own ranks exit without having failed."""


def _killed_from_outside(status: int) -> bool:
    return status == -signal.SIGKILL  # by the kernel, or by Slurm


def _failure(status: int) -> ExitCode:
    known = next((code for code in ExitCode if code == status), ExitCode.CRASHED)
    return ExitCode.CRASHED if known in _NO_FAILURES else known


STARTED = 10.0
"""Seconds after which a program that was asked to stop counts as having made progress. Without a
limit, a job that is always stopped before it begins would be requeued for ever."""


def has_advanced(
    step: int | None, before: int | None, seconds: float, asked_to_stop: bool, long: float
) -> bool:
    """Whether an attempt that ran for `seconds` got further than all before it.

    `step` is the last step that it reported, `before` the last of all earlier attempts; None if
    none was reported. Without a step, an attempt that failed must have run for `long` seconds."""
    if step is not None:
        return step > (before or 0)
    return seconds >= (STARTED if asked_to_stop else long)
