"""Which nodes are suspect: a pure function of the ledger.

A node is suspect for `resilience.suspect_for` seconds after such evidence:

- an event `suspect` names it (a failed health check, no answer, or another observation);
- a rank on it failed with an error of a broken GPU or memory;
- its ranks were the first to fail in two attempts in a row, or as soon as it was taken back.

Evidence from before the run took the node back does not count.

Also which nodes are not used again after a failure: pure functions, which need positive evidence. A
question that could not be asked is no evidence.

And the suspects that the runs of a group share in a folder, with one file per node. A file says why
the node is suspect and until when; removing it clears the node for all other runs. It is replaced
atomically."""

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
from kempner.run.record.events import (
    AttemptFailed,
    CorruptionFound,
    NodesTakenBack,
    NodeSuspected,
)
from kempner.run.record.history import Entry, RunHistory

NO_ANSWER = "it does not respond"
"""The reason given for a node that is gone."""


@dataclass(frozen=True)
class Diagnosis:
    """The result of a health check. `unfit` has the reason by node; `warnings` are true of all
    nodes alike, so they exclude none. `answered` are the nodes that answered."""

    unfit: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    answered: frozenset[str] = frozenset()


def diagnose(
    nodes: Sequence[str],
    results: Sequence[ProbeResult],
    unseen: Mapping[str, str],
    during: tuple[float, float],
    ranks: int,
) -> Diagnosis:
    """Judge the `nodes` of a world of `ranks` by their `results`, of which some may be missing.

    `unseen` has, for some nodes, why files that they write do not become visible here. `during` are
    the times at which the nodes were asked and the last one had answered, in seconds since the
    epoch by the controller's clock, or ours without a controller."""
    if not results:
        return Diagnosis({}, ("the health check did not run on any node",))
    found = {vitals.node: health_problems(vitals, during, ranks) for vitals in results}
    for node, reason in unseen.items():
        found.setdefault(node, {}).setdefault("shared", reason)
    for node in nodes_off_network({vitals.node: vitals.interface for vitals in results}):
        found[node].setdefault("interface", "it has no interface on the network of the other nodes")
    code = {vitals.node: vitals.code for vitals in results if vitals.code is not None}
    for node, reason in other_code(code, nodes[0]).items():
        found[node]["code"] = reason
    for node in nodes:
        found.setdefault(node, {"answer": NO_ANSWER})
    common = set.intersection(*(set(problems) for problems in found.values()))
    common.discard(SITE_CHECK)  # the site's own check excludes nodes even if it fails on all
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
    # the same in ROCm
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
"""Errors that a faulty program also gets on a sound GPU; twice in a row they count anyway."""


_AT_ONCE = "its ranks failed first as soon as it was taken back"


@dataclass(frozen=True)
class Suspect:
    """A suspect node, with the reason and the time of the evidence (seconds since the epoch).

    `proven`: there is more evidence than that its ranks failed first. `failed`: its ranks failed
    and nothing else explains it, or have wrong bits, which no health check refutes."""

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
    lies = {event.reason for event in history.events(CorruptionFound)}
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
            stays = earlier is not None and earlier.proven and earlier.failed
            failed = failed or stays or evidence in lies
            found[node] = Suspect(node, evidence or reason, entry.time, proven, failed)
    return found


def is_machine_error(words: str) -> bool:
    """Whether an error cannot occur on a sound GPU, whatever the program does."""
    return bool(words and _BROKEN.search(words)) and not _MISTAKEN.search(words)


def _evidence(event: NodeSuspected | AttemptFailed) -> str:
    if isinstance(event, NodeSuspected):
        return event.reason
    return event.raised if is_machine_error(event.raised) else ""


def _habit(failure: Entry[AttemptFailed], before: Entry[AttemptFailed] | None) -> str:
    """A reason if the node's ranks also failed first in the attempt before, whose failure is
    `before`; else empty."""
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
    """The flags in a node's State of `scontrol show node`, such as `IDLE*+CLOUD+POWERING_UP`."""
    words = (word for word in state.upper().split("+") if word)
    found: set[str] = set()
    for word in words:
        found.add(word.rstrip("".join(_SIGNS)))
        found.update(meaning for sign, meaning in _SIGNS.items() if sign in word)
    return frozenset(found)


def still_boots(flags: Collection[str]) -> bool:
    """Whether a node is booting according to Slurm; nodes of a cloud do so for minutes."""
    return not _BOOTING.isdisjoint(flags)


def lost_nodes(
    accused: Collection[str],
    answers: Mapping[str, Sequence[int]],
    slurm: Mapping[str, Collection[str]],
    own: str,
) -> dict[str, str]:
    """Those of the `accused` nodes that cannot be used again, each with the evidence.

    `answers` has the nodes that answered when all were asked at once, each with its processes of
    earlier ranks that still run; `slurm` the flags of silent nodes, if known. A silent node is gone
    if Slurm says so, or if others answered the same question. The supervisor's `own` node is never
    silent."""
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
"""Start of this process. Earlier evidence was shared by an earlier process, and a user may have
removed it since."""


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
    """The suspect nodes by name, of this run and of the group's other runs. Shares this run's
    proven suspects with the group. A folder that cannot be used does not end the run."""
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
    """The shared suspects that have not expired, by node; invalid files are skipped. Raises
    `OSError`."""
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
    """Write this run's suspects into the folder, unless it has evidence as new. Raises
    `OSError`."""
    for name, suspect in own.items():
        if name in known and known[name].since >= suspect.since:
            continue
        shared = SharedSuspect(
            node=name,
            reason=suspect.reason,
            since=suspect.since,
            until=suspect.since + keep_for,
            run=run,
        )
        unique = f"{os.uname().nodename}-{os.getpid()}"
        replace_durable(folder / f"{name}.json", shared.model_dump_json().encode(), unique=unique)


def withdraw(folder: Path, nodes: Collection[str], names: Collection[str]) -> None:
    """Remove those of the `nodes` from the folder that a run with one of these `names` has written.
    Raises `OSError`."""
    for name, suspect in read_shared(folder, 0.0).items():
        if name in nodes and suspect.run in names:
            (folder / f"{name}.json").unlink(missing_ok=True)
