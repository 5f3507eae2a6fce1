"""Environment variables with which the supervisor configures its ranks.

A rank's position in the world is in torch's variables (RANK, WORLD_SIZE, ...); these are the rest.
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
"""Tells a rank to keep its last steps in memory."""

AS_FORKED = {_FORKED: "1"}
"""What a fork server adds to the environment of a rank."""

FORK_SERVER = "KEMPNER_FORK_SERVER"
"""Set in the environment of a fork server, and so in what the kernel shows as the environment of
the processes that it forks."""
EXPORT_FOR = "KEMPNER_EXPORT_FOR"
"""The process id of the supervisor, with which a metrics exporter ends."""


SUPERVISED = "KEMPNER_SUPERVISED"
"""Set in every process that a supervisor has started, on every node: names the supervisor and its
run directory. `mark_of` reads it."""


@dataclass(frozen=True)
class SupervisorMark:
    """Which supervisor has started a process, and in which run."""

    supervisor: str
    run: Path

    def variables(self) -> dict[str, str]:

        return {SUPERVISED: f"{self.supervisor}:{os.path.realpath(self.run)}"}


def mark_of(environ: Mapping[str, str]) -> SupervisorMark | None:
    """The supervisor and run that a process with this environment belongs to; None if to none."""
    supervisor, _, run = environ.get(SUPERVISED, "").partition(":")
    return SupervisorMark(supervisor, Path(run)) if run else None


@dataclass(frozen=True)
class LaunchTerms(Message):
    """What a rank of a program without a configuration must know: the run directory, and three
    times in seconds: how long it waits for a heartbeat before it exits, how long it may take to
    stop, and how long it retries storage. `network` is the section `distributed` in JSON,
    `trackers` the text of `Trackers`, empty if kempner sets no variables for trackers."""

    run: Path
    supervisor_timeout: float
    stop_grace: float
    patience: float
    network: str = "{}"
    trackers: str = ""


@dataclass(frozen=True)
class BuddyTerms:
    """How nodes keep copies for each other: the share of the time in which a node may send, and the
    network interface, if one is configured."""

    share: float
    interface: str | None = None


@dataclass(frozen=True)
class Launch:
    """The attempt that a rank belongs to, and how to reach its supervisor: through the agent that
    listens at `socket` and admits only processes that know the `secret`.

    `parent` is the supervisor's process id if the ranks are its children, or children of its fork
    server (`forked`); None for a rank that cannot see it, as in a container. `job` is the Slurm job
    whose batch process the supervisor is: if that dies, a rank has to requeue the job. `terms` are
    set for a user's own program. With `in_memory` the process that starts a rank provides memory
    for its last steps; `buddy` is for launchers with several nodes.
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
        """The variables to add to a rank's environment. One is secret: keep them out of command
        lines and logs."""
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
        """The variables to add for one rank of a user's own program: its heartbeat file, and the
        run ids for trackers."""
        if self.terms is None:
            return {}
        run = RunDirectory(self.terms.run.absolute())
        heartbeat = {HEARTBEAT_FILE: str(run.heartbeat(self.attempt.number, rank))}
        if not self.terms.trackers:
            return heartbeat
        return heartbeat | Trackers.parse(self.terms.trackers).variables(rank, environ)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Launch | None:
        """What the supervisor has set; None without a supervisor."""
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
    """The process id in "PID@NAMESPACE"; None if that is not the namespace of this process."""
    pid, _, namespace = parent.partition("@")
    return int(pid) if pid and namespace == _namespace() else None


def _namespace() -> str:
    """Identifies the PID namespace of this process (pid_namespaces(7))."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # hidden from this process, and then from the other side as well
        return ""


def _terms(environ: Mapping[str, str]) -> LaunchTerms:
    silence, grace, patience = (float(environ[name]) for name in (_SILENCE, _GRACE, _PATIENCE))
    network, trackers = environ[_NETWORK], environ.get(TRACKERS, "")
    return LaunchTerms(Path(environ[_RUN]), silence, grace, patience, network, trackers)


def run_of(environ: Mapping[str, str]) -> Path | None:
    """The run directory that the supervisor has set for a user's own program."""
    return Path(environ[_RUN]) if _RUN in environ else None


def forget_secret(environ: MutableMapping[str, str] = os.environ) -> None:
    """Remove the token, so that neither a child nor a record of the environment gets it."""
    environ.pop(_TOKEN, None)


def keeps_no_steps(environ: Mapping[str, str]) -> bool:
    """Whether there is a supervisor, and it has decided to keep no steps in memory."""
    return _ATTEMPT in environ and _IN_MEMORY not in environ
