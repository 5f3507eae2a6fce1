"""What a run is, what differs when a program goes on with it, and which directory a command gets.

`identity.json` in the run's directory holds the identity as it stands: that of the start before,
with the files of the program as they were when the run began. A run without the file is older than
that; it gets one at its next start.
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
"""Names differences, with commas between them, that are not to be refused."""

OUTPUT_DIR = "output_dir"
"""The fact by which the run of a trainer belongs to a folder of results."""

_SHOWN = 3
"""Parts of a fact whose differences are told one by one."""

_LONGEST = 60
"""Characters of a value that are shown."""


class Consequence(Enum):
    TOLD = "told"
    ACCEPTED = "accepted"
    REFUSED = "refused"


@dataclass(frozen=True)
class Difference:
    """A difference between what a run was and what it is to be; `sentence` says it in one line."""

    name: str
    before: object
    now: object
    verdict: Consequence
    sentence: str


@dataclass(frozen=True)
class RunIdentity:
    """What the result of a run depends on. `command` is the program and its arguments as rank 0 has
    them, `launched` the command that the supervisor was given; `environment` holds the variables
    that the program reads, and `facts` what its loop is told; `surroundings` are its ranks, the
    host of rank 0 and versions: all values are JSON's. `files` has a digest of each file of the
    program, and `claimed_by` the process that began. What is empty or None is not known."""

    command: tuple[str, ...] = ()
    launched: tuple[str, ...] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)
    facts: Mapping[str, object] = field(default_factory=dict)
    surroundings: Mapping[str, object] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    claimed_by: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Fields of another version of kempner are left out. Raises `ValueError` if it is no
        identity."""
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
        """What says whose run it is: a loop is told the rest later."""
        facts = {name: self.facts[name] for name in (OUTPUT_DIR,) if name in self.facts}
        return RunIdentity(self.command, self.launched, self.environment, facts)

    def after(self, before: RunIdentity) -> RunIdentity:
        """What to keep when this one goes on with a run that was `before`."""
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
    """What differs, and what follows from it. What only one of the two knows is no difference,
    unless it is a fact that is not told any more. A difference is refused where the result would be
    another's; `accepted` names those that the user wants all the same: "command", "environment" or
    one of its variables, or a fact."""
    found = [*_of_commands(before, now), *_of_environment(before, now), *_of_facts(before, now)]
    found += _of_surroundings(before, now)
    return [
        replace(each, verdict=Consequence.ACCEPTED)
        if each.verdict is Consequence.REFUSED and _names(each.name) & set(accepted)
        else each
        for each in found
    ]


def describe_refusal(differences: Sequence[Difference], path: Path | str, way_out: str) -> str:
    """Why a start cannot go on with the run in `path`, and what to do (`way_out` names another
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
    """By which names a difference can be accepted: "environment.SEED" by each part, too."""
    first, _, rest = name.partition(".")
    return {name, first, rest}


def _of_commands(before: RunIdentity, now: RunIdentity) -> Iterator[Difference]:
    pairs = [(before.command, now.command), (before.launched, now.launched)]
    known = [pair for pair in pairs if all(pair)]
    if not known:  # a supervisor knows the one, a program that is alone the other
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


_TOLD_FACTS = frozenset({"save_every", "keep_last"})
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
        told = (longer and name == "steps") or name in _TOLD_FACTS
        verdict = Consequence.TOLD if told else Consequence.REFUSED
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
    """Two values without what only one of them has a name for: another version has added it."""
    if isinstance(old, dict) and isinstance(new, dict):
        pairs = {name: known_to_both(old[name], new[name]) for name in old if name in new}
        return {n: a for n, (a, _) in pairs.items()}, {n: b for n, (_, b) in pairs.items()}
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        both = [known_to_both(*pair) for pair in zip(old, new, strict=True)]
        return [a for a, _ in both], [b for _, b in both]
    return old, new


def _changes(name: str, old: object, new: object) -> str:
    """Which parts of a fact differ: "optimizer.lr was 0.1, now it is 0.01"."""
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
    """The directory of a run; `sentence` says why it is not the usual one, where it is not."""

    path: Path
    sentence: str = ""


def choose_run(usual: Path, now: RunIdentity, accepted: Collection[str] = ()) -> ChosenRun:
    """The run of a command: `usual`, or beside it where that is another command's. It is claimed,
    so that of two commands which start at the same time each gets its own."""
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
    """Raise `UsageError` if the run in `path` is that of another command than `now`; it becomes
    this one's if it has no owner yet."""
    if (before := _standing(path, now)) is not None:
        differences = compare(before.only_command(), now.only_command(), accepted)
        if refusal := describe_refusal(differences, path, "give it another --run.name"):
            raise UsageError(refusal)


def command_digest(identity: RunIdentity) -> str:
    told = {name: value for name, value in identity.environment.items() if value is not None}
    said = json.dumps([identity.command or identity.launched, told], sort_keys=True)
    if (folder := identity.facts.get(OUTPUT_DIR)) is not None:
        said += f" {folder}"
    return hashlib.sha256(said.encode()).hexdigest()[:8]


def has_results(run: RunDirectory) -> bool:
    """Whether anything came out of a run, which must not become another one's. Raises `OSError`."""
    if any(run.checkpoints.glob("step-*")):
        return True
    history = RunHistory.read(run.ledger)
    ended = any(
        end.code in (ExitCode.COMPLETED, ExitCode.STOPPED) for end in history.events(AttemptEnded)
    )
    return ended or bool(history.events(CheckpointCommitted, ProgramAdvanced))


def _standing(path: Path, now: RunIdentity) -> RunIdentity | None:
    """The identity of a run; None, and it becomes `now`, where there is none, or its command has
    ended before anything came out of it."""
    run = RunDirectory(path)
    now = replace(now, facts=now.only_command().facts, claimed_by=asdict(Holder.here(0.0)))
    try:
        before = read_identity(run)
        if before is not None and (_is_claimed(run, before) or not _remove_unused(run, before)):
            return before
        claim_identity(run, now)
    except FileExistsError:
        return read_identity(run)
    except OSError:  # whatever it is, it is said when the run is taken
        return None
    return None


def _is_claimed(run: RunDirectory, identity: RunIdentity) -> bool:
    """Whether a run has results, or a process that may be about to make some."""
    if has_results(run):
        return True
    owner = look(run.supervisors) if run.supervisors.is_dir() else None
    released = owner is not None and owner.beat == RELEASED
    holders = [] if owner is None or released else [owner.holder]
    with suppress(TypeError):  # of another version, or not known
        holders.append(Holder(**identity.claimed_by))  # type: ignore[arg-type]  # as it was written
    here = Holder.here(0.0).machine
    return any(
        holder_lives(holder) if holder is not None and holder.machine == here else not released
        for holder in holders
    )


def _remove_unused(run: RunDirectory, identity: RunIdentity) -> bool:
    """Remove an identity that claims nothing; whether it was still there."""
    taken = run.path / f".{run.identity.name}.{secrets.token_hex(4)}"
    run.identity.rename(taken)
    if RunIdentity.from_json(taken.read_text(encoding="utf-8")) == identity:
        taken.unlink()
        return True
    taken.rename(run.identity)  # another start has claimed it in the meantime
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
        with run.identity.open("x", encoding="utf-8") as file:  # without links: all but at once
            file.write(identity.to_json())
    finally:
        with suppress(OSError):
            temporary.unlink()
