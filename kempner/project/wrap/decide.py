"""Decides how a batch script is changed to survive: edits with reasons, or a refusal."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kempner.cluster.slurm import directives
from kempner.cluster.slurm.directives import Directives, Option
from kempner.project.wrap.launchers import Kind, Start, kind_of, take_apart
from kempner.project.wrap.shell import BACKGROUND, CannotWrapError, Command, Script, Word, parse

WARNING = "B:SIGTERM@120"
"""`--signal` for a script without one: to the batch process, two minutes before the end."""


@dataclass(frozen=True)
class Change:
    """Replace bytes `start` to `end` of the script by `text`, for this `reason`."""

    start: int
    end: int
    text: str
    reason: str


def complete(directives: Directives) -> list[Change]:
    """The options that a script's head lacks for its job to be warned and requeued."""
    changes, missing = list[Change](), list[tuple[str, str]]()
    append_reason = "the job's log goes on where it was; it would be emptied at each start"
    wanted: Mapping[str, tuple[str, str]] = {
        "signal": (f"--signal={WARNING}", "Slurm warns the batch process before the job's time is "
                   "over"),
        "requeue": ("--requeue", "Slurm may put the job back into the queue"),
        "open-mode": ("--open-mode=append", append_reason),
    }  # fmt: skip
    for name, (option, reason) in wanted.items():
        given = directives.last(name)
        against = directives.last("no-requeue") if name == "requeue" else None
        if against is not None and (given is None or given.start < against.start):
            changes.append(Change(against.start, against.end, option, reason))
        elif given is None:
            missing.append((option, reason))
        elif name == "open-mode" and given.value != "append":
            changes.append(Change(given.start, given.end, option, reason))
        elif name == "signal":
            changes += _to_batch(given)
    return [
        *(Change(directives.end, directives.end, f"#SBATCH {o}\n", why) for o, why in missing),
        *changes,
    ]


def _to_batch(given: Option) -> list[Change]:
    """Send a warning for the tasks to the batch process, the supervisor."""
    flags, colon, rest = given.value.rpartition(":")
    if colon and "B" in flags:
        return []
    option = f"--signal={flags}B:{rest}"
    reason = "the warning goes to the batch process, and from there to the program"
    return [Change(given.start, given.end, option, reason)]


STOPS = ("TERM", "INT", "HUP", "USR1", "USR2")
"""Signals, without `SIG`, that make kempner stop."""


def unknown_signal(directives: Directives) -> Option | None:
    """A `--signal` that would not make kempner stop."""
    given = directives.last("signal")
    if given is None:
        return None
    name = given.value.rpartition(":")[2].partition("@")[0].removeprefix("SIG").upper()
    known = name in STOPS or name in ("15", "2", "1", "10", "12")
    return None if known else given


SHELLS = ("bash", "sh", "dash", "ksh")


@dataclass(frozen=True)
class Refused:
    sentence: str


@dataclass(frozen=True)
class Wrapped:
    """The new script; `reasons` are the lines that change, with the reason."""

    text: bytes
    reasons: tuple[tuple[int, str], ...]


def wrap(text: bytes, python: str, file: str, line: int = 0) -> Wrapped | Refused:
    """Change the batch script `text`, whose file is called `file`. `python` is the interpreter with
    kempner, `line` the line of the training command, 0 to find it."""
    try:
        return _wrap(text, python, file, line)
    except CannotWrapError as error:
        return Refused(str(error))


def diff(before: bytes, wrapped: Wrapped, name: str) -> str:
    old, new = (
        text.decode(errors="replace").splitlines(keepends=True) for text in (before, wrapped.text)
    )
    return "".join(difflib.unified_diff(old, new, name, name))


def _wrap(text: bytes, python: str, file: str, line: int) -> Wrapped:
    _check_kind(text, file)
    try:
        asked = directives.read(text)
    except ValueError as error:
        raise CannotWrapError(str(error)) from error
    script = parse(text)
    if script.wrong:
        raise CannotWrapError(f"line {script.wrong} cannot be read as a command of bash")
    _check_job(asked)
    _check_commands(script.commands)
    command = _training(script, line)
    _check_place(command)
    _check_arguments(command, script)
    try:
        start = take_apart(command, asked, script.variables)
    except CannotWrapError as error:
        joined = " " if re.match(r"(starts|gives|has|runs|takes) ", str(error)) else ": "
        raise CannotWrapError(f"line {command.line}{joined}{error}") from error
    name = _run_name(command, start, asked, file)
    changes = complete(asked)
    changes += _supervised(command, start, _supervise(python, name, start), script, text)
    return Wrapped(_apply(text, changes), _reasons(text, changes))


def _check_kind(text: bytes, file: str) -> None:
    first = text.partition(b"\n")[0]
    if first.endswith(b"\r"):
        raise CannotWrapError(
            "line 1 ends as lines of Windows do, which sbatch refuses: "
            f"sed -i 's/\\r$//' {shlex.quote(file)}"
        )
    if not first.startswith(b"#!"):
        raise CannotWrapError(
            "line 1 is not `#!/bin/bash`, without which sbatch refuses the script"
        )
    words = first[2:].decode(errors="replace").split()
    names = [word.rpartition("/")[2] for word in words if not word.startswith("-")]
    shell = next((name for name in names if name != "env"), "")
    if shell not in SHELLS:
        raise CannotWrapError(
            f"line 1 names {shell}, and kempner reads scripts of bash and sh only: write "
            "#!/bin/bash, and the script in its words"
        )


def _check_job(asked: Directives) -> None:
    for name in ("hetjob", "packjob"):
        if found := asked.last(name):
            raise CannotWrapError(
                f"line {found.line} makes the job heterogeneous, and kempner cannot requeue a part "
                "of one: ask for one set of resources"
            )
    if given := unknown_signal(asked):
        raise CannotWrapError(
            f"line {given.line} asks for a signal that stops nothing in kempner: write "
            f"--signal={WARNING}"
        )


def _check_commands(commands: Sequence[Command]) -> None:
    """Refuse commands that would interfere with kempner."""
    for command in commands:
        values = [word.value or word.source for word in command.words]
        if command.name == "trap" and (trapped := _trapped(values)):
            raise CannotWrapError(
                f"line {command.line} traps {trapped}, which is to reach kempner: delete the trap, "
                "since kempner stops the program with a checkpoint and requeues the job"
            )
    for command in commands:
        values = [word.value or word.source for word in command.words]
        if command.name == "scontrol" and "requeue" in values:
            raise CannotWrapError(
                f"line {command.line} requeues the job, as kempner does: delete the line"
            )
        if command.name == "sbatch":
            raise CannotWrapError(
                f"line {command.line} submits a job, and kempner requeues this one: delete the "
                "line, or the program would run twice"
            )
        if "supervise" in values and any(v.endswith("kempner") for v in values):
            raise CannotWrapError(f"line {command.line} starts kempner already: nothing is missing")


def _trapped(values: Sequence[str]) -> str:
    """A stop signal for which `trap` sets a handler; empty if none."""
    if len(values) < 3 or values[1] in ("", "''", '""', "-"):
        return ""
    names = (value.upper().removeprefix("SIG") for value in values[2:])
    numbers = {"15": "TERM", "2": "INT", "1": "HUP", "10": "USR1", "12": "USR2"}
    return next((n for name in names if (n := numbers.get(name, name)) in STOPS), "")


def _training(script: Script, line: int) -> Command:
    """The command to supervise: the one in `line`, or the one that probably trains."""
    if line:
        on_line = [c for c in script.commands if c.line == line]
        if not on_line:
            raise CannotWrapError(f"line {line} does not begin a command")
        return max(on_line, key=lambda c: kind_of(c, script.variables))
    kinds = [(command, kind_of(command, script.variables)) for command in script.commands]
    best = max((kind for _, kind in kinds), default=Kind.OTHER)
    found = [command for command, kind in kinds if kind is best and kind is not Kind.OTHER]
    if not found:
        raise CannotWrapError(
            "none of its lines starts Python, srun, torchrun or accelerate: name the line of the "
            "training command with --line"
        )
    if len(found) > 1:
        *most, last = [str(command.line) for command in found]
        both = "both" if len(found) == 2 else "all"
        raise CannotWrapError(
            f"lines {', '.join(most)} and {last} {both} start a program: name the line of the one "
            "to be supervised with --line, or give each a job of its own"
        )
    return found[0]


def _check_place(command: Command) -> None:
    """Refuse a command in a place where it cannot be supervised."""
    where = f"line {command.line}"
    inside = command.within[-1] if command.within else ""
    if inside == "a pipe":
        raise CannotWrapError(
            f"{where}: what the training command prints goes through a pipe, and so its exit code "
            "is lost: take the pipe away, since --output of the job keeps what it prints"
        )
    if inside == "a loop":
        raise CannotWrapError(
            f"{where} starts the program within a loop, and a job that is started again would "
            "begin with its first turn: make it a job array (#SBATCH --array), with one program in "
            "each job"
        )
    if inside == BACKGROUND:
        raise CannotWrapError(
            f"{where} starts the program in the background, where no signal reaches it: take the & "
            "away"
        )
    if inside:
        raise CannotWrapError(f"{where} starts the program within {inside}: move it out of it")
    if any(redirect.operator.startswith("<<") for redirect in command.redirects):
        raise CannotWrapError(
            f"{where}: {command.name} reads its commands from a here-document, which a supervised "
            "command cannot: write them into a file, and start that"
        )
    if command.guards or not (command.alone or command.last):
        raise CannotWrapError(
            f"{where} has other commands behind the program: write them on lines of their own"
        )


def _check_arguments(command: Command, script: Script) -> None:
    """Refuse arguments that change with each start: kempner identifies a run by its command."""
    for word in _program(command):
        if script.changes(word.source):
            raise CannotWrapError(
                f"line {command.line} gives the program {word.source}, which is another at each "
                "start, so that kempner would take it for another run: take what stays the same "
                "for a job, such as $SLURM_JOB_ID"
            )


def _program(command: Command) -> Sequence[Word]:
    """The words after the script or module that the command starts."""
    for at, word in enumerate(command.words):
        if (word.value or "").endswith(".py") or word.value == "-m":
            return command.words[at + 1 :]
    return ()


def _run_name(command: Command, start: Start, asked: Directives, file: str) -> str:
    """A name for the run if its command has no script to name it after; else empty."""
    kept = [word.value or "" for word in command.words if word.start >= start.kept]
    if any(word.endswith(".py") for word in kept):
        return ""
    name = asked.value("job-name") or file.rpartition("/")[2].rpartition(".")[0] or file
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"


def _supervise(python: str, name: str, start: Start) -> str:
    """kempner's part of the command line, with long options on a line of their own."""
    words = [shlex.quote(python), "-m kempner supervise --launcher srun"]
    if name:
        words.append(f"--run.name={name}")
    if start.procs:
        words.append(f"--slurm.procs={start.procs}")
    if start.hosts:
        words.append(f"--slurm.hosts={start.hosts}")
    if start.srun_args:
        listed = json.dumps(list(start.srun_args), separators=(",", ":"))
        words.append("\\\n    " + shlex.quote(f"--slurm.srun_args={listed}"))
    return " ".join(words) + " --"


WAITING = """) &
kempner=0; wait $! || kempner=$?
while [ $kempner -gt 128 ] && kill -0 $! 2>/dev/null; do kempner=0; wait $! || kempner=$?; done
[ $kempner -eq 0 ] || exit $kempner"""
"""Waits for a program after which the script continues. Each signal ends a `wait`; if the script
ended before kempner, Slurm would kill kempner while it requeues the job."""

EXPLAINED = "kempner starts the ranks, stops them with a checkpoint and has the job requeued"


def _supervised(
    command: Command, start: Start, supervise: str, script: Script, text: bytes
) -> list[Change]:
    """Put kempner before the program: as the batch process, or as a child that gets its
    warnings."""
    traps_exit = any(c.name == "trap" and len(c.words) > 2 for c in script.commands)
    own = "".join(f"{word} " for word in start.command)
    first = command.words[0].start
    changes = _appending(command)
    if command.last and not traps_exit:
        trap = "trap '' TERM  # a warning must not end the job before kempner is there\n"
        return [
            Change(command.head, command.head, trap, ""),
            Change(first, start.kept, f"exec {supervise} \\\n    {own}", EXPLAINED),
            *changes,
        ]
    if not command.alone:
        raise CannotWrapError(
            f"line {command.line} has other commands before the program: write them on lines of "
            "their own"
        )
    opening = "trap 'kill -TERM $!' TERM  # this shell passes the warning on\n(trap '' TERM; "
    wait_reason = "what follows runs once the program is complete"
    return [
        Change(command.head, command.head, opening, ""),
        Change(first, start.kept, f"exec {supervise} \\\n    {own}", EXPLAINED),
        *changes,
        Change(command.tail, command.tail, WAITING, wait_reason),
    ]


def _appending(command: Command) -> list[Change]:
    """Make redirections append, so that output from before a requeue stays."""
    longer = {">": ">>", "&>": "&>>", ">|": ">>"}
    return [
        Change(
            redirect.start,
            redirect.end,
            longer[redirect.operator],
            f"{redirect.file} would be emptied at each start",
        )
        for redirect in command.redirects
        if redirect.operator in longer and redirect.file != "/dev/null"
    ]


def _apply(text: bytes, changes: Sequence[Change]) -> bytes:
    """The script after all changes; those at the same place are applied in order."""
    made, at = b"", 0
    for change in sorted(changes, key=lambda each: (each.start, each.end)):
        made += text[at : change.start] + change.text.encode(errors="surrogateescape")
        at = change.end
    return made + text[at:]


def _reasons(text: bytes, changes: Sequence[Change]) -> tuple[tuple[int, str], ...]:
    reasons = [(text.count(b"\n", 0, change.start) + 1, change.reason) for change in changes]
    return tuple((line, reason) for line, reason in reasons if reason)
