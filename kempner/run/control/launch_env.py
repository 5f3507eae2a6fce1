"""Environment variables with which the supervisor configures its ranks.

The rank's place in the world travels under torch's own names (RANK, WORLD_SIZE, ...); these are
the rest.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from kempner.run.control.heartbeat_file import HEARTBEAT_FILE
from kempner.run.control.trackers import TRACKERS, Trackers
from kempner.run.link.auth import Secret
from kempner.run.link.messages import Message
from kempner.run.record.attempts import Attempt
from kempner.run.record.run_dir import RunDirectory

_ATTEMPT = "KEMPNER_ATTEMPT"
_NONCE = "KEMPNER_ATTEMPT_NONCE"
_PARENT = "KEMPNER_SUPERVISOR_PID"
_SOCKET = "KEMPNER_CONTROL_SOCKET"
_TOKEN = "KEMPNER_CONTROL_TOKEN"
_JOB = "KEMPNER_BATCH_JOB"
_RUN = "KEMPNER_RUN_DIR"
_SILENCE = "KEMPNER_SILENCE_LIMIT"
_GRACE = "KEMPNER_STOP_GRACE"
_PATIENCE = "KEMPNER_STORAGE_PATIENCE"
_NETWORK = "KEMPNER_NETWORK"
_FORKED = "KEMPNER_FORKED"

_IN_MEMORY = "KEMPNER_IN_MEMORY"
"""Says to a rank that it keeps its last steps in memory."""

AS_FORKED = {_FORKED: "1"}
"""What a fork server adds to the environment of a rank."""

FORK_SERVER = "KEMPNER_FORK_SERVER"
"""Is in the environment of a fork server. The kernel shows that as the environment of all that it
forks, too."""
EXPORT_FOR = "KEMPNER_EXPORT_FOR"
"""The process id of the supervisor, for an exporter of metrics that is to end with it."""


SUPERVISED = "KEMPNER_SUPERVISED"
"""Is in the environment of all that a supervisor has started, on every node: which one, and the
directory of its run, as `mark_of` reads it."""


@dataclass(frozen=True)
class SupervisorMark:
    """Which supervisor has started a process, and in which run."""

    supervisor: str
    run: Path

    def variables(self) -> dict[str, str]:
        """The variable by which it is handed on."""
        return {SUPERVISED: f"{self.supervisor}:{os.path.realpath(self.run)}"}


def mark_of(environ: Mapping[str, str]) -> SupervisorMark | None:
    """Of which supervisor and run a process with this environment is; None if of none."""
    supervisor, _, run = environ.get(SUPERVISED, "").partition(":")
    return SupervisorMark(supervisor, Path(run)) if run else None


@dataclass(frozen=True)
class LaunchTerms(Message):
    """What a rank must know that is not told by a configuration: the run's directory, after how
    many seconds without a heartbeat it exits, how many it has after a stop request, and how many it
    waits for storage. `network` is the configuration's section `distributed` in JSON, `trackers`
    the text of `Trackers`, empty if kempner is not to tell them which run it is.
    """

    run: Path
    supervisor_timeout: float
    stop_grace: float
    patience: float
    network: str = "{}"
    trackers: str = ""


@dataclass(frozen=True)
class BuddyTerms:
    """How nodes keep copies for each other: in which share of the time a node sends, and on which
    network interface, if one is configured.
    """

    share: float
    interface: str | None = None


@dataclass(frozen=True)
class Launch:
    """The attempt that a rank belongs to, and how to talk to its supervisor: by way of the agent
    that listens at a `socket`, and believes only those that know the `secret`.

    `parent` is the supervisor's process id where the ranks are its children, or those of its fork
    server (`forked`); a rank that does not see it, in a container, does without. `job` is the Slurm
    job whose batch process the supervisor is: if it dies, a rank has to requeue that job. `terms`
    are there for a program of the user's own. With `in_memory` the process that starts a rank keeps
    memory for its last steps; `buddy` is for launchers that know of other nodes.
    """

    attempt: Attempt
    secret: Secret
    socket: str = ""
    parent: int | None = None
    job: str | None = None
    terms: LaunchTerms | None = None
    forked: bool = False
    in_memory: bool = False
    buddy: BuddyTerms | None = None

    def environment(self) -> dict[str, str]:
        """The variables to add to a rank's environment. One of them is secret: keep them out of
        command lines and logs."""
        followed = {} if self.parent is None else {_PARENT: f"{self.parent}@{_namespace()}"}
        queued = {} if self.job is None else {_JOB: self.job}
        kept = {_IN_MEMORY: "1"} if self.in_memory else {}
        return (
            followed
            | queued
            | kept
            | self._terms()
            | {
                _ATTEMPT: str(self.attempt.number),
                _NONCE: self.attempt.nonce,
                _SOCKET: self.socket,
                _TOKEN: self.secret.token,
            }
        )

    def _terms(self) -> dict[str, str]:
        if self.terms is None:
            return {}
        return {
            _RUN: str(self.terms.run.absolute()),
            _SILENCE: str(self.terms.supervisor_timeout),
            _GRACE: str(self.terms.stop_grace),
            _PATIENCE: str(self.terms.patience),
            _NETWORK: self.terms.network,
            **({TRACKERS: self.terms.trackers} if self.terms.trackers else {}),
        }

    def of_rank(self, rank: int, environ: Mapping[str, str]) -> dict[str, str]:
        """What to add to the environment of a rank of a program of the user's own: its heartbeat
        file, and how trackers are to know it."""
        if self.terms is None:
            return {}
        run = RunDirectory(self.terms.run.absolute())
        heartbeat = {HEARTBEAT_FILE: str(run.heartbeat(self.attempt.number, rank))}
        if not self.terms.trackers:
            return heartbeat
        return heartbeat | Trackers.parse(self.terms.trackers).variables(rank, environ)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Launch | None:
        """What the supervisor said, or None where there is none."""
        if _ATTEMPT not in environ:
            return None
        return cls(
            attempt=Attempt(number=int(environ[_ATTEMPT]), nonce=environ[_NONCE]),
            secret=Secret(environ[_TOKEN]),
            socket=environ[_SOCKET],
            parent=_visible(environ.get(_PARENT, "")),
            job=environ.get(_JOB),
            terms=_terms(environ) if _RUN in environ else None,
            forked=_FORKED in environ,
        )


def _visible(parent: str) -> int | None:
    """The process id in "PID@NAMESPACE", if that is the namespace of this process."""
    pid, _, namespace = parent.partition("@")
    return int(pid) if pid and namespace == _namespace() else None


def _namespace() -> str:
    """Names what process ids mean to this process (pid_namespaces(7))."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not shown to it: then the others do not see more
        return ""


def _terms(environ: Mapping[str, str]) -> LaunchTerms:
    silence, grace, patience = (float(environ[name]) for name in (_SILENCE, _GRACE, _PATIENCE))
    network, trackers = environ[_NETWORK], environ.get(TRACKERS, "")
    return LaunchTerms(Path(environ[_RUN]), silence, grace, patience, network, trackers)


def run_of(environ: Mapping[str, str]) -> Path | None:
    """The run directory that a supervisor has told a process of a program of the user's own."""
    return Path(environ[_RUN]) if _RUN in environ else None


def forget_secret(environ: MutableMapping[str, str] = os.environ) -> None:
    """Take the token out, so that neither a child nor a record of the environment gets it."""
    environ.pop(_TOKEN, None)


def keeps_no_steps(environ: Mapping[str, str]) -> bool:
    """Whether there is a supervisor, and it has decided to keep no steps in memory."""
    return _ATTEMPT in environ and _IN_MEMORY not in environ
