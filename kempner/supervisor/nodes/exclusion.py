"""Decides which nodes are suspect: a pure function of the ledger.

A node is suspect by evidence, for as long as `resilience.suspect_for` says:

- an event `suspect` names it (a failed health check, no answer, or another observation);
- a rank on it failed with words that speak of a broken GPU or memory;
- its ranks were the first to fail in two attempts running, or as soon as it was taken back.

What was said before the run took it back does not count.

Decides which nodes are not to be used again after a failure: pure, and only by a positive sign.

A question that could not be put says nothing about a node.

Suspect nodes that the runs of a group tell each other of, in a folder: one file per node.

A file says why the node is suspect and until when; removing it ends that for all other runs. It is
replaced at one go, so that a reader never sees half of it."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from kempner.cluster.machine import (
    MEMORY,
    ROOM,
    SKEW,
    clock_skew,
    open_files_needed,
)
from kempner.cluster.network.interfaces import nodes_off_network
from kempner.config.resilience import ResilienceSection
from kempner.probe.node import SITE_CHECK, ProbeResult, other_code
from kempner.run.output.logs import logger
from kempner.run.process.durable_io import replace_durable
from kempner.run.process.threads import steady_time
from kempner.run.record.events import AttemptFailed, NodesTakenBack, NodeSuspected
from kempner.run.record.history import Entry, RunHistory

NO_ANSWER = "it does not respond"
"""What is wrong with a node that is gone."""


@dataclass(frozen=True)
class Diagnosis:
    """What the check found. `unfit` says why, by node; `warnings` are true of every node alike, and
    no reason to leave one out. `answered` are the nodes that gave an answer."""

    unfit: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    answered: frozenset[str] = frozenset()


def diagnose(
    nodes: Sequence[str],
    told: Sequence[ProbeResult],
    unseen: Mapping[str, str],
    during: tuple[float, float],
    ranks: int,
) -> Diagnosis:
    """Compare what the `nodes` told, which may be fewer, of a world of `ranks`.

    `unseen` says of some of them why what they wrote cannot be trusted to arrive; `during` is when
    the first was asked and the last had answered, in seconds since the epoch by the clock that
    counts: the controller's, or our own."""
    if not told:
        return Diagnosis({}, ("the health check did not run on any node",))
    found = {vitals.node: health_problems(vitals, during, ranks) for vitals in told}
    for node, reason in unseen.items():
        found.setdefault(node, {}).setdefault("shared", reason)
    for node in nodes_off_network({vitals.node: vitals.interface for vitals in told}):
        found[node].setdefault("interface", "it has no interface on the network of the other nodes")
    code = {vitals.node: vitals.code for vitals in told if vitals.code is not None}
    for node, reason in other_code(code, nodes[0]).items():
        found[node]["code"] = reason
    for node in nodes:
        found.setdefault(node, {"answer": NO_ANSWER})
    common = set.intersection(*(set(ailment) for ailment in found.values()))
    common.discard(SITE_CHECK)  # the site knows what its nodes must be like
    first = found[nodes[0]]
    unfit = {
        node: "; ".join(words for about, words in its.items() if about not in common)
        for node, its in found.items()
        if set(its) - common
    }
    return Diagnosis(unfit, tuple(first[about] for about in sorted(common)))


def health_problems(vitals: ProbeResult, during: tuple[float, float], ranks: int) -> dict[str, str]:
    found = dict(vitals.troubles)
    if vitals.memory.free < MEMORY * vitals.memory.total:
        found["memory"] = (
            f"{_mib(vitals.memory.free)} of its {_mib(vitals.memory.total)} memory is free"
        )
    for folder, free in vitals.disk_free.items():
        if free < ROOM:
            found[folder] = f"{folder} has {_mib(free)} left"
    needed = open_files_needed(ranks)
    if vitals.open_files is not None and vitals.open_files < needed:
        found["open files"] = (
            f"a process may open {vitals.open_files} files (`ulimit -Hn`), and a rank of {ranks} "
            f"needs {needed}"
        )
    skew = clock_skew(vitals.time, during)
    if abs(skew) > SKEW:
        found["clock"] = f"its clock is {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}"
    return found


def _mib(size: int) -> str:
    return f"{size >> 20} MiB"


_BROKEN = re.compile(
    r"\bXid\b|\bECC\b|uncorrectable|fallen off the bus|GPU is lost"
    r"|hardware (?:error|stack)|NVLink|CUDA error|CUDA driver|cudaError|machine check"
    # ROCm's words for the same
    r"|HIP error|hipError|\bHSA_STATUS_ERROR|HW Exception by GPU|\bRAS\b.*error|GPU Hang",
    re.IGNORECASE,
)
_MISTAKEN = re.compile(
    r"out of memory|device-side assert|invalid (?:argument|configuration|device|resource)"
    r"|illegal memory access|no kernel image|driver version is insufficient"
    r"|(?:unspecified )?launch (?:failure|timed out)|misaligned address|illegal instruction"
    r"|hipError(?:OutOfMemory|Invalid|Illegal|LaunchFailure|NoBinary|Assert)"
    r"|HSA_STATUS_ERROR_(?:OUT_OF_RESOURCES|INVALID|EXCEPTION|ILLEGAL|MEMORY_APERTURE)"
    r"|Memory access fault by GPU",
    re.IGNORECASE,
)
"""What CUDA and ROCm say of a program as well, on a GPU that is sound; twice in a row it counts all
the same."""


_AT_ONCE = "its ranks failed first as soon as it was taken back"


@dataclass(frozen=True)
class Suspect:
    """A node, why it is suspect, and since when (seconds since the epoch).

    `proven` says that there is more against it than that its ranks failed first, `failed` that its
    ranks failed, and nothing else explains it: no health check refutes that."""

    node: str
    reason: str
    since: float
    proven: bool
    failed: bool = False


def suspects(history: RunHistory, now: float, keep_for: float) -> dict[str, Suspect]:
    """The suspect nodes by name, each with the last evidence of the last `keep_for` seconds.

    `now` is in seconds since the epoch."""
    found: dict[str, Suspect] = {}
    before: Entry[AttemptFailed] | None = None
    back: dict[str, int] = {}
    for entry in history.entries(NodeSuspected, AttemptFailed, NodesTakenBack):
        if entry.time < now - keep_for:
            continue
        event, reason = entry.event, ""
        if isinstance(event, NodesTakenBack):
            found = {node: s for node, s in found.items() if node not in event.nodes}
            back |= dict.fromkeys(event.nodes, entry.attempt + 1)
            continue
        evidence, at_once = _evidence(event), False
        if isinstance(event, AttemptFailed):
            failure = Entry(event, entry.time, entry.attempt)
            reason, before = _habit(failure, before), failure
            at_once = not reason and back.get(event.node) == entry.attempt
            reason = _AT_ONCE if at_once else reason
        if (evidence or reason) and (node := event.node):
            earlier = found.get(node)
            proven = bool(evidence) or (earlier is not None and earlier.proven)
            failed = isinstance(event, AttemptFailed) and (bool(evidence) or not at_once)
            failed = failed or (earlier is not None and earlier.proven and earlier.failed)
            found[node] = Suspect(node, evidence or reason, entry.time, proven, failed)
    return found


def is_machine_error(words: str) -> bool:
    """Whether an error is one that a sound GPU does not have, whatever the program."""
    return bool(words and _BROKEN.search(words)) and not _MISTAKEN.search(words)


def _evidence(event: NodeSuspected | AttemptFailed) -> str:
    if isinstance(event, NodeSuspected):
        return event.reason
    return event.raised if is_machine_error(event.raised) else ""


def _habit(failure: Entry[AttemptFailed], before: Entry[AttemptFailed] | None) -> str:
    """Says if the node's ranks failed first once more; `before` is the failure before."""
    if before is None or before.attempt != failure.attempt - 1:
        return ""
    if before.event.node != failure.event.node:
        return ""
    return f"its ranks failed first in attempts {before.attempt} and {failure.attempt}"


_GONE = frozenset(
    ("DOWN", "FAIL", "FAILING", "NOT_RESPONDING", "NO_RESPOND", "POWERED_DOWN", "POWERING_DOWN")
)
_BOOTING = frozenset(("POWERING_UP", "POWER_UP", "REBOOT_ISSUED", "REBOOT", "BOOT"))
_SIGNS = {"*": "NOT_RESPONDING", "~": "POWERED_DOWN", "#": "POWERING_UP", "%": "POWERING_DOWN"}


def node_flags(state: str) -> frozenset[str]:
    """The words of a node's State in `scontrol show node`: `IDLE*+CLOUD+POWERING_UP`."""
    words = (word for word in state.upper().split("+") if word)
    found: set[str] = set()
    for word in words:
        found.add(word.rstrip("".join(_SIGNS)))
        found.update(meaning for sign, meaning in _SIGNS.items() if sign in word)
    return frozenset(found)


def still_boots(flags: Collection[str]) -> bool:
    """Whether Slurm says that a node is on its way up, as those of a cloud are for minutes."""
    return not _BOOTING.isdisjoint(flags)


def lost_nodes(
    accused: Collection[str],
    answers: Mapping[str, Sequence[int]],
    slurm: Mapping[str, Collection[str]],
    own: str,
) -> dict[str, str]:
    """Those of the `accused` nodes that cannot be used again, each with the sign against it.

    `answers` has the nodes that answered when all were asked at once, each with the processes of
    earlier ranks that still run there; `slurm` the flags of silent ones, as far as Slurm said
    anything. A silent node is gone if Slurm says so, or if others answered the same question. The
    supervisor's `own` node answers by running it."""
    found = {}
    for node in sorted(accused):
        if left := answers.get(node, ()):
            one = len(left) == 1
            listed = ", ".join(map(str, left))
            found[node] = f"process{'' if one else 'es'} {listed} of an earlier attempt still run"
            found[node] += "s" if one else ""
        elif node not in answers and node != own and _is_gone(slurm.get(node, ()), answers):
            found[node] = NO_ANSWER
    return found


def _is_gone(flags: Collection[str], answers: Collection[str]) -> bool:
    if still_boots(flags):
        return False
    return bool(answers) or not _GONE.isdisjoint(flags)


BEGAN = steady_time()
"""When this process started. Evidence from before was shared by an earlier process, and may have
been removed by a user since."""


class SharedSuspect(BaseModel):
    model_config = ConfigDict(frozen=True)

    node: str
    reason: str
    since: float
    until: float
    run: str


def known_suspects(
    history: RunHistory, section: ResilienceSection, run: str = ""
) -> dict[str, Suspect]:
    """The suspect nodes by name: those of this run, and of the group's others.

    Others are told of those of this run that there is proof against. A folder that cannot be used
    is no reason to end a run."""
    now = steady_time()
    own = suspects(history, now, section.suspect_for)
    if section.suspects_dir is None:
        return own
    folder = Path(section.suspects_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        theirs = read_shared(folder, now)
        news = {name: s for name, s in own.items() if s.proven and s.since >= BEGAN}
        share(folder, news, theirs, section.suspect_for, run)
    except OSError as error:
        logger().warning(f"resilience.suspects_dir={folder} cannot be used: {error.strerror}")
        return own
    shared = {
        name: Suspect(name, f"{s.reason} (seen by run {s.run})", s.since, proven=True)
        for name, s in theirs.items()
    }
    return {**shared, **own}


def read_shared(folder: Path, now: float) -> dict[str, SharedSuspect]:
    """What the files say that are still true; one that cannot be understood is passed over.

    Raises `OSError`."""
    found = {}
    for path in sorted(folder.glob("[!.]*.json")):
        try:
            suspect = SharedSuspect.model_validate_json(path.read_bytes())
        except FileNotFoundError:  # it has just been removed
            continue
        except ValueError:
            logger().warning("names no suspect node", file=str(path))
            continue
        if suspect.until > now:
            found[suspect.node] = suspect
    return found


def share(
    folder: Path,
    own: Mapping[str, Suspect],
    known: Mapping[str, SharedSuspect],
    keep_for: float,
    run: str,
) -> None:
    """Tell the group of suspects of our own, unless it knows as much. Raises `OSError`."""
    for name, suspect in own.items():
        if name in known and known[name].since >= suspect.since:
            continue
        told = SharedSuspect(
            node=name,
            reason=suspect.reason,
            since=suspect.since,
            until=suspect.since + keep_for,
            run=run,
        )
        unique = f"{os.uname().nodename}-{os.getpid()}"
        replace_durable(folder / f"{name}.json", told.model_dump_json().encode(), unique=unique)


def withdraw(folder: Path, nodes: Collection[str], names: Collection[str]) -> None:
    """Tell the group that nodes are well again which a run with one of these `names` has accused.

    Raises `OSError`."""
    for name, suspect in read_shared(folder, 0.0).items():
        if name in nodes and suspect.run in names:
            (folder / f"{name}.json").unlink(missing_ok=True)
