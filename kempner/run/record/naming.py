"""Which run directory a command gets that names none: one of its own."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from kempner.run.process.exit_codes import ExitCode, UsageError
from kempner.run.record.events import AttemptEnded, CheckpointCommitted, ProgramAdvanced
from kempner.run.record.history import RunHistory
from kempner.run.record.identity import (
    ACCEPT_CHANGES,
    OUTPUT_DIR,
    Consequence,
    RunIdentity,
    compare,
    describe_refusal,
    read_identity,
)
from kempner.run.record.lease import RELEASED, Holder, holder_lives, look
from kempner.run.record.run_dir import RunDirectory


@dataclass(frozen=True)
class ChosenRun:
    """The directory of a run; `sentence` says why it is not the usual one, where it is not."""

    path: Path
    sentence: str = ""


def choose_run(usual: Path, now: RunIdentity, accepted: Collection[str] = ()) -> ChosenRun:
    """The run of a command: `usual`, or beside it where that is another command's.

    The one that is chosen is claimed, so that of two commands which start at the
    same time each gets its own.
    """
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
    this one's if it has no owner yet.
    """
    if (before := _standing(path, now)) is not None:
        differences = compare(before.only_command(), now.only_command(), accepted)
        if refusal := describe_refusal(differences, path, "give it another --run.name"):
            raise UsageError(refusal)


def command_digest(identity: RunIdentity) -> str:
    """Names a command with its environment."""
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
    """The identity of a run; it becomes `now` where there is none yet, and None is returned.

    That of a command which has begun, and ended before anything came out of it, is none.
    """
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
