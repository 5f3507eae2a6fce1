"""The identity of a run, the differences when a program resumes it, and the directory of a command.

`identity.json` in the run's directory holds the identity at the last start, with the files of the
program as they were when the run began. A run that is older than this file gets it at its next
start.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any, Self

from kempner.run.output.logs import redacted
from kempner.run.process.durable_io import replace_durable
from kempner.run.process.exit_codes import ExitCode, UsageError
from kempner.run.record.events import AttemptEnded, CheckpointCommitted, ProgramAdvanced
from kempner.run.record.history import RunHistory
from kempner.run.record.lease import RELEASED, Holder, holder_lives, look
from kempner.run.record.run_dir import RunDirectory

ACCEPT_CHANGES = "KEMPNER_ACCEPT_CHANGES"
"""The variable with the differences to accept, separated by commas."""

OUTPUT_DIR = "output_dir"
"""The fact that ties a trainer's run to its output folder."""

_SHOWN = 3
"""Most parts of a fact whose differences are listed."""

_LONGEST = 60
"""Characters of a value that are shown."""


class Consequence(Enum):
    TOLD = "told"
    ACCEPTED = "accepted"
    REFUSED = "refused"


@dataclass(frozen=True)
class Difference:
    """A difference between a run and the program that resumes it; `sentence` describes it."""

    name: str
    before: object
    now: object
    verdict: Consequence
    sentence: str


@dataclass(frozen=True)
class RunIdentity:
    """What the result of a run depends on; all values are JSON values, and empty or None if
    unknown.

    `command` is the program and its arguments in rank 0, `launched` the command that the supervisor
    got; `environment` holds the variables that the program reads, `facts` the arguments of its
    loop, `surroundings` the number of ranks, the host of rank 0 and versions. `files` has a digest
    of each file of the program, `claimed_by` the process that began the run.
    """

    command: tuple[str, ...] = ()
    launched: tuple[str, ...] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)
    facts: Mapping[str, object] = field(default_factory=dict)
    surroundings: Mapping[str, object] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    claimed_by: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse `text`, ignoring fields of other versions of kempner. Raises `ValueError` if it is
        not an identity."""
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError("not an identity")
        known: dict[str, Any] = {f.name: found[f.name] for f in fields(cls) if f.name in found}
        for name in ("command", "launched"):
            known[name] = tuple(known.get(name, ()))
        return cls(**known)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True, default=str) + "\n"

    def only_command(self) -> RunIdentity:
        """The part that is known at the start, before the loop gets its arguments."""
        facts = {name: self.facts[name] for name in (OUTPUT_DIR,) if name in self.facts}
        return RunIdentity(self.command, self.launched, self.environment, facts)

    def after(self, before: RunIdentity) -> RunIdentity:
        """The identity to store when this program resumes a run whose identity was `before`."""
        kept = {f.name: getattr(self, f.name) or getattr(before, f.name) for f in fields(self)}
        return replace(
            self,
            **kept
            | {
                "environment": {**before.environment, **self.environment},
                "facts": {**before.facts, **self.facts},
                "files": {**self.files, **before.files},
            },
        )


def read_identity(run: RunDirectory) -> RunIdentity | None:
    try:
        return RunIdentity.from_json(run.identity.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return None


def write_identity(run: RunDirectory, identity: RunIdentity) -> None:
    run.path.mkdir(parents=True, exist_ok=True)
    replace_durable(run.identity, identity.to_json().encode(), unique=secrets.token_hex(4))


def accepted_names(given: Collection[str], environ: Mapping[str, str]) -> frozenset[str]:
    """The differences that the user has accepted, in the program and in the environment."""
    words = environ.get(ACCEPT_CHANGES, "").split(",")
    return frozenset({*given, *(word.strip() for word in words)} - {""})


def compare(
    before: RunIdentity, now: RunIdentity, accepted: Collection[str] = ()
) -> list[Difference]:
    """The differences, and what follows from each. What only one side knows is no difference,
    except a fact that is no longer given. A difference is refused if it changes the result, unless
    it is in `accepted`: "command", "environment" or one of its variables, or a fact."""
    found = [*_of_commands(before, now), *_of_environment(before, now), *_of_facts(before, now)]
    found += _of_surroundings(before, now)
    return [
        replace(each, verdict=Consequence.ACCEPTED)
        if each.verdict is Consequence.REFUSED and _names(each.name) & set(accepted)
        else each
        for each in found
    ]


def describe_refusal(differences: Sequence[Difference], path: Path | str, way_out: str) -> str:
    """Why a program cannot resume the run in `path`, and what to do (`way_out`: how to name another
    run); empty if it can."""
    refused = [each for each in differences if each.verdict is Consequence.REFUSED]
    if not refused:
        return ""
    changes = "; ".join(each.sentence for each in refused)
    names = ",".join(dict.fromkeys(each.name.partition(".")[0] for each in refused))
    return (
        f"the run in {path} would not be this program's result: {changes}; {way_out}, or set "
        f"{ACCEPT_CHANGES}={names} to go on with it"
    )


def _names(name: str) -> set[str]:
    """The names that accept a difference: for "environment.SEED" also each part."""
    first, _, rest = name.partition(".")
    return {name, first, rest}


def _of_commands(before: RunIdentity, now: RunIdentity) -> Iterator[Difference]:
    pairs = [(before.command, now.command), (before.launched, now.launched)]
    known = [pair for pair in pairs if all(pair)]
    if not known:  # a supervisor knows `launched`, a program without one `command`
        known = [(before.command or before.launched, now.command or now.launched)]
    for old, new in known:
        if old and new and old != new:
            shown = f"the command was `{_words(old)}`, now it is `{_words(new)}`"
            yield Difference("command", old, new, Consequence.REFUSED, shown)
            return


def _of_environment(before: RunIdentity, now: RunIdentity) -> Iterator[Difference]:
    for name in sorted(before.environment.keys() & now.environment.keys()):
        old, new = before.environment[name], now.environment[name]
        if old != new:
            shown = f"the variable {name} was {_value(name, old)}, now it is {_value(name, new)}"
            yield Difference(f"environment.{name}", old, new, Consequence.REFUSED, shown)


_HARMLESS_FACTS = frozenset({"save_every", "keep_last"})
"""Facts on which the result does not depend."""


def _of_facts(before: RunIdentity, now: RunIdentity) -> Iterator[Difference]:
    for name in sorted(before.facts):
        old, new = known_to_both(plain(before.facts[name]), plain(now.facts.get(name)))
        if old == new:
            continue
        if name not in now.facts:
            shown = f"{name} was {_shorten(old)}, and is not told any more"
            yield Difference(name, old, None, Consequence.TOLD, shown)
            continue
        longer = isinstance(old, int) and isinstance(new, int) and new > old
        harmless = (longer and name == "steps") or name in _HARMLESS_FACTS
        verdict = Consequence.TOLD if harmless else Consequence.REFUSED
        yield Difference(name, old, new, verdict, _changes(name, old, new))


def _of_surroundings(before: RunIdentity, now: RunIdentity) -> Iterator[Difference]:
    for name in sorted(before.surroundings.keys() & now.surroundings.keys()):
        old, new = plain(before.surroundings[name]), plain(now.surroundings[name])
        if old != new:
            yield Difference(name, old, new, Consequence.TOLD, _changes(name, old, new))
    both = before.files.keys() & now.files.keys()
    changed = sorted(name for name in both if before.files[name] != now.files[name])
    if changed:
        more = f", and {len(changed) - 8} more" if len(changed) > 8 else ""
        shown = f"changed since the run began: {', '.join(changed[:8])}{more}"
        old_sums = {name: before.files[name] for name in changed}
        new_sums = {name: now.files[name] for name in changed}
        yield Difference("files", old_sums, new_sums, Consequence.TOLD, shown)


def plain(value: object) -> object:
    return json.loads(json.dumps(value, default=str))


def known_to_both(old: object, new: object) -> tuple[object, object]:
    """Two values without the keys that only one of them has: another version has added those."""
    if isinstance(old, dict) and isinstance(new, dict):
        pairs = {name: known_to_both(old[name], new[name]) for name in old if name in new}
        return {n: a for n, (a, _) in pairs.items()}, {n: b for n, (_, b) in pairs.items()}
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        both = [known_to_both(*pair) for pair in zip(old, new, strict=True)]
        return [a for a, _ in both], [b for _, b in both]
    return old, new


def _changes(name: str, old: object, new: object) -> str:
    """The parts of a fact that differ: "optimizer.lr was 0.1, now it is 0.01"."""
    before, now = dict(_leaves(name, old)), dict(_leaves(name, new))
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    shown = [
        f"{key} was {_shorten(before.get(key))}, now it is {_shorten(now.get(key))}"
        for key in changed[:_SHOWN]
    ]
    more = f" and {len(changed) - _SHOWN} more of its values" if len(changed) > _SHOWN else ""
    return ", ".join(shown) + more


def _leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    elif isinstance(value, list) and value:
        for place, inner in enumerate(value):
            yield from _leaves(f"{name}[{place}]", inner)
    else:
        yield name, value


def _words(words: Sequence[str]) -> str:
    return _cut(" ".join(redacted(words)))


def _value(name: str, value: str | None) -> str:
    return "unset" if value is None else _cut(redacted([f"{name}={value}"])[0].partition("=")[2])


def _shorten(value: object) -> str:
    if value is None:
        return "unset"
    return _cut(value if isinstance(value, str) else json.dumps(value))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


@dataclass(frozen=True)
class ChosenRun:
    """The directory of a run; `sentence` says why, if it is not the usual one."""

    path: Path
    sentence: str = ""


def choose_run(usual: Path, now: RunIdentity, accepted: Collection[str] = ()) -> ChosenRun:
    """The run of a command: `usual`, or a directory beside it if that is another command's. Claims
    it, so that two commands that start at the same time get different ones."""
    before = _standing(usual, now)
    if before is None:
        return ChosenRun(usual)
    differences = compare(before.only_command(), now.only_command(), accepted)
    refused = [each for each in differences if each.verdict is Consequence.REFUSED]
    if not refused:
        return ChosenRun(usual)
    own = usual.with_name(f"{usual.name}-{command_digest(now)}")
    _standing(own, now)
    names = ",".join(dict.fromkeys(each.name for each in refused))
    changes = "; ".join(each.sentence for each in refused)
    return ChosenRun(
        own,
        f"this run has its own directory, {own}, since {usual} is another one: {changes} "
        f"({ACCEPT_CHANGES}={names} goes on with that)",
    )


def refuse_other_command(path: Path, now: RunIdentity, accepted: Collection[str] = ()) -> None:
    """Raise `UsageError` if the run in `path` is another command's; claim it for `now` if it has no
    owner yet."""
    if (before := _standing(path, now)) is not None:
        differences = compare(before.only_command(), now.only_command(), accepted)
        if refusal := describe_refusal(differences, path, "give it another --run.name"):
            raise UsageError(refusal)


def command_digest(identity: RunIdentity) -> str:
    variables = {name: value for name, value in identity.environment.items() if value is not None}
    text = json.dumps([identity.command or identity.launched, variables], sort_keys=True)
    if (folder := identity.facts.get(OUTPUT_DIR)) is not None:
        text += f" {folder}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def has_results(run: RunDirectory) -> bool:
    """Whether a run has results, which another command must not take over. Raises `OSError`."""
    if any(run.checkpoints.glob("step-*")):
        return True
    history = RunHistory.read(run.ledger)
    ended = any(
        end.code in (ExitCode.COMPLETED, ExitCode.STOPPED) for end in history.events(AttemptEnded)
    )
    return ended or bool(history.events(CheckpointCommitted, ProgramAdvanced))


def _standing(path: Path, now: RunIdentity) -> RunIdentity | None:
    """The identity of a run. If it has none, or its command ended without results, claim it for
    `now` and return None."""
    run = RunDirectory(path)
    now = replace(now, facts=now.only_command().facts, claimed_by=asdict(Holder.here(0.0)))
    try:
        before = read_identity(run)
        if before is not None and (_is_claimed(run, before) or not _remove_unused(run, before)):
            return before
        claim_identity(run, now)
    except FileExistsError:
        return read_identity(run)
    except OSError:  # taking the lease will report it
        return None
    return None


def _is_claimed(run: RunDirectory, identity: RunIdentity) -> bool:
    """Whether a run has results, or a process that may still make some."""
    if has_results(run):
        return True
    owner = look(run.supervisors) if run.supervisors.is_dir() else None
    released = owner is not None and owner.beat == RELEASED
    holders = [] if owner is None or released else [owner.holder]
    with suppress(TypeError):  # another version, or unknown
        holders.append(Holder(**identity.claimed_by))  # type: ignore[arg-type]  # as it was written
    here = Holder.here(0.0).machine
    return any(
        holder_lives(holder) if holder is not None and holder.machine == here else not released
        for holder in holders
    )


def _remove_unused(run: RunDirectory, identity: RunIdentity) -> bool:
    """Remove an unused identity; False if another start has claimed the run meanwhile."""
    taken = run.path / f".{run.identity.name}.{secrets.token_hex(4)}"
    run.identity.rename(taken)
    if RunIdentity.from_json(taken.read_text(encoding="utf-8")) == identity:
        taken.unlink()
        return True
    taken.rename(run.identity)  # another start has claimed it
    return False


def claim_identity(run: RunDirectory, identity: RunIdentity) -> None:
    """Write the identity of a run that has none. Raises `FileExistsError` if it has one."""
    run.path.mkdir(parents=True, exist_ok=True)
    temporary = run.path / f".{run.identity.name}.{secrets.token_hex(4)}"
    temporary.write_text(identity.to_json(), encoding="utf-8")
    try:
        os.link(temporary, run.identity)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK):
            raise
        with run.identity.open("x", encoding="utf-8") as file:  # without links: not quite atomic
            file.write(identity.to_json())
    finally:
        with suppress(OSError):
            temporary.unlink()
