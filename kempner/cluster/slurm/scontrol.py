"""Slurm's commands: query, signal, change and requeue jobs.

Each command is retried for `within` seconds while Slurm does not answer; 0 runs it once. Do not
call from a signal handler.

A requeue whose answer is lost may have been carried out. So the job's state is read before each
try: a requeue would revive a job that was cancelled, and a second one would end the job's next
launch."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TypeVar

from kempner.cluster.slurm.command import (
    SHORTLY,
    SlurmError,
    SlurmRefusedError,
    SlurmSilentError,
    SlurmUnclearError,
    ask,
    next_pause,
    patiently,
    submission_environment,
    tell,
)
from kempner.cluster.slurm.hostlist import expand_hosts
from kempner.cluster.slurm.job import (
    JobState,
    NodeShare,
    job_fields,
    node_fields,
    node_shares,
    parse_job,
    parse_time,
)

T = TypeVar("T")

_ALWAYS = ("JobId", "JobState", "Restarts", "Requeue", "TimeLimit", "EndTime", "NumNodes")
"""Fields without which an answer about a job is incomplete."""

TRIED = ("22.05", "24.11", "26.05")
"""The versions of Slurm with which kempner was tested on a real cluster."""

CLOCK_WITHIN = 2.0
"""Seconds within which an answer must come for its clock to be used."""


@dataclass(frozen=True)
class ClusterSettings:
    """Settings of slurm.conf, in seconds, and the controller's clock and version. `ahead` is what
    to add to `time.monotonic` for seconds since the epoch by that clock; None if the answer took
    too long. `series` is the version's first part, such as "26.05", or empty if it cannot be
    parsed."""

    kill_wait: float
    node_timeout: float
    ahead: float | None
    series: str = ""


def show_job(job: str, within: float = SHORTLY) -> dict[str, str]:
    """The fields of a job or an array element, for `job.parse_job`. Raises `SlurmError`."""
    return _ask(["scontrol", "show", "job", "-o", job], _whole_job, within)


def show_whole_job(job: str) -> str:
    """The whole line of `scontrol show job -o`, including the user's free texts. Raises
    `SlurmError`."""
    return _ask(["scontrol", "show", "job", "-o", job], _text, SHORTLY).splitlines()[0]


def job_state(job: str, within: float = SHORTLY) -> JobState:
    try:
        return parse_job(show_job(job, within))
    except ValueError as error:
        raise SlurmSilentError(f"`scontrol show job -o {job}` cannot be read: {error}") from error


def show_job_and_shares(
    job: str, within: float = SHORTLY, on_failure: Callable[[SlurmError], None] = lambda error: None
) -> tuple[dict[str, str], dict[str, NodeShare]]:
    """As `show_job`, with the job's share of each of its nodes, if Slurm shows it."""
    command = ["scontrol", "show", "job", "-d", "-o", job]
    text = patiently(
        lambda: ask(command, lambda text: text if _whole_job(text) is not None else None),
        within,
        on_failure,
    )
    try:
        return job_fields(text), node_shares(text, hostnames)
    except ValueError:  # in an unknown format
        return job_fields(text), {}


def show_node(node: str, within: float = SHORTLY) -> dict[str, str]:
    return _nodes([node], _whole_node, within)[0]


def show_nodes(nodes: Sequence[str]) -> list[dict[str, str]]:
    return _nodes(nodes, _whole_node, SHORTLY)


@dataclass(frozen=True)
class NodeShown:
    """A node's State, such as `MIXED+DRAIN`, and its Reason, if given."""

    name: str
    state: str
    reason: str = ""


def shown_nodes(nodes: Sequence[str], within: float = SHORTLY) -> list[NodeShown]:
    return _nodes(nodes, read_node, within)


def _nodes(nodes: Sequence[str], read_line: Callable[[str], T | None], within: float) -> list[T]:
    """The result of `read_line` for each node. Raises `SlurmError`."""

    def read(text: str) -> list[T] | None:
        found = [node for line in text.splitlines() if (node := read_line(line)) is not None]
        return found if _ended(text) and len(found) == len(set(nodes)) else None

    return _ask(["scontrol", "show", "node", "-o", ",".join(nodes)], read, within)


def _whole_node(line: str) -> dict[str, str] | None:
    fields = node_fields(line)
    return fields if {"NodeName", "State"} <= set(fields) else None


def read_node(line: str) -> NodeShown | None:
    """Parse a line of `scontrol show node -o`. A reason may contain spaces; its author follows
    it."""
    head, _, rest = line.partition(" Reason=")
    if (fields := _whole_node(head)) is None:
        return None
    return NodeShown(fields["NodeName"], fields["State"], rest.partition(" [")[0].strip())


@dataclass(frozen=True)
class Reservation:
    """`start` and `end` are in seconds since the epoch by the controller's clock, `nodes` is a host
    list; `maintenance`: it has the flag MAINT."""

    name: str
    start: float
    end: float | None
    nodes: str
    maintenance: bool


def reservations(within: float = SHORTLY) -> list[Reservation]:
    def read(text: str) -> list[Reservation] | None:
        return read_reservations(text) if _ended(text) else None

    return _ask(["scontrol", "show", "reservation", "-o"], read, within)


def read_reservations(text: str) -> list[Reservation]:
    found = []
    for fields in map(node_fields, text.splitlines()):
        start = parse_time(fields.get("StartTime", ""))
        if "ReservationName" not in fields or start is None:
            continue
        flags = fields.get("Flags", "").split(",")
        nodes = fields.get("Nodes", "")
        found.append(
            Reservation(
                name=fields["ReservationName"],
                start=start,
                end=parse_time(fields.get("EndTime", "")),
                nodes="" if nodes == "(null)" else nodes,
                maintenance="MAINT" in flags,
            )
        )
    return found


def output_file(job: str, within: float = SHORTLY) -> str:
    """The path of a job's output; empty if Slurm does not show it. Raises `SlurmError`."""
    text = _ask(["scontrol", "show", "job", job], _text, within)
    found = re.findall(r"^   StdOut=(.*)$", text, re.MULTILINE)
    return found[-1] if found else ""


def launches(job: str) -> list[str]:
    """The accounting's state of each launch of a job, oldest first. Without `-D` sacct shows only
    the last one. The record that a job gets for continuing without a lost node is not a launch.
    Raises `SlurmError`."""
    text = _ask(["sacct", "-D", "-X", "-n", "-P", "-j", job, "--format=State"], _text, within=3.0)
    return [line for line in text.splitlines() if line != "RESIZING"]


def submit_line(job: str, within: float = SHORTLY) -> str:
    """The command that submitted a job, from the accounting, which has one record more for each
    time that the job lost nodes. Raises `SlurmError`."""
    command = ["sacct", "-X", "-n", "-P", "-j", job, "--format=SubmitLine"]
    return _ask(command, _text, within).splitlines()[-1]


def write_script(job: str, file: Path, within: float = SHORTLY) -> None:
    _tell(["scontrol", "write", "batch_script", job, str(file)], within)


def submit(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Run an sbatch command; the new job's id. Not retried if the answer is lost, since the
    submission may have worked. Raises `SlurmError`."""

    def read(text: str) -> str | None:
        found = re.search(r"(?:^|\s)(\d+)(?:;\S+)?\n\Z", text)
        return found[1] if found else None

    return ask(command, read, environ)


def try_submission(script: Path, environ: Mapping[str, str]) -> None:
    """Have sbatch check a batch script without submitting it. Raises `SlurmError`."""
    command = ["sbatch", "--test-only", str(script)]
    patiently(lambda: tell(command, environ=submission_environment(environ)), SHORTLY)


def cluster_settings(within: float = SHORTLY) -> ClusterSettings:
    """The cluster's settings and the controller's clock. Raises `SlurmError`. No other answer
    contains that clock: `squeue -o %L` and RunTime of `scontrol show job` use that of the host on
    which the command runs."""

    def ask_now() -> ClusterSettings:
        began = time.monotonic()
        return ask(["scontrol", "show", "config"], lambda text: read_settings(text, began))

    return patiently(ask_now, within)


def series(within: float = SHORTLY) -> str:
    """The controller's version, such as "26.05"; empty if not known."""
    try:
        return cluster_settings(within).series
    except SlurmError:
        return ""


def read_settings(text: str, asked_at: float) -> ClusterSettings | None:
    """Parse `scontrol show config`, run at `asked_at` (`time.monotonic`); None if incomplete."""
    clock = re.match(r"Configuration data as of (\S+)\n", text)
    found = [re.search(rf"^{name}\s*= (\d+) sec\n", text, re.MULTILINE) for name in _SETTINGS]
    if clock is None or found[0] is None or found[1] is None:
        return None
    version = re.search(r"^SLURM_VERSION\s*= (\d\d\.\d\d)\b", text, re.MULTILINE)
    now, took = parse_time(clock[1]), time.monotonic() - asked_at
    in_time = now is not None and took <= CLOCK_WITHIN
    return ClusterSettings(
        kill_wait=float(found[0][1]),
        node_timeout=float(found[1][1]),
        ahead=now - asked_at if now is not None and in_time else None,
        series=version[1] if version is not None else "",
    )


_SETTINGS = ("KillWait", "SlurmdTimeout")


def partition_nodes(partitions: str) -> set[str]:
    """All nodes of the partitions, in whatever state. `partitions` is a comma-separated list, as a
    job shows it. Raises `SlurmError`."""
    found: set[str] = set()
    for name in partitions.split(","):
        found.update(hostnames(_show("partition", name, "Nodes", SHORTLY)["Nodes"]))
    return found


def show_partition(name: str, within: float = SHORTLY) -> dict[str, str]:
    return _show("partition", name, "PartitionName", within)


def preemption_grace(fields: Mapping[str, str]) -> float | None:
    if fields.get("PreemptMode", "OFF") in ("OFF", ""):
        return None
    return float(fields.get("GraceTime", "0"))


def accounting_answers(within: float = SHORTLY) -> None:
    _tell(["sacct", "-X", "-n", "-P", "--format=JobID"], within)


def reservation_nodes(name: str) -> set[str]:
    return set(hostnames(_show("reservation", name, "Nodes", SHORTLY)["Nodes"]))


def requeue(job: str) -> None:
    """Requeue a job; Slurm signals its processes at once, including this one. Read the job's state
    first: a requeue revives a cancelled job. Not retried if the answer is lost, since it may have
    worked; `put_back` retries safely. Raises `SlurmError`."""
    _tell(["scontrol", "requeue", job], within=0.0)


def signal_tasks(job: str) -> None:
    """Send SIGTERM once to the top process of every task, not to the batch script. Signals the job
    instead of a step, since a step would get it twice while any job is pending (Slurm 22.05).
    Raises `SlurmError`."""
    _tell(["scancel", "-s", "TERM", job], within=0.0)


def ping_nodes(job: str) -> None:
    """Have the controller contact all nodes of a job, by a signal that ends no process (SIGURG).
    Slurm then shows silent nodes as not responding after some ten seconds instead of minutes.
    Raises `SlurmError`."""
    _tell(["scancel", "--ctld", "-s", "URG", job], within=0.0)


def cancel(job: str) -> None:
    """End a job for good: SIGTERM to its tasks, SIGKILL after KillWait. Raises `SlurmError`."""
    _tell(["scancel", job], SHORTLY)


def end_step(job: str, step: str) -> None:
    """Kill a step's tasks. Takes seconds if one of its nodes is gone. Raises `SlurmError`."""
    _tell(["scancel", "-s", "KILL", f"{job}.{step}"], SHORTLY)


def keep_nodes(job: str, nodes: Sequence[str]) -> None:
    """Give back all nodes of a running job but these. Slurm then neither ends the job when it finds
    one of the others dead, nor waits for that node before it restarts the job. scontrol leaves two
    scripts in its working directory, so that is a temporary one. Raises `SlurmError`."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["scontrol", "update", f"jobid={job}", f"NodeList={','.join(nodes)}"]
        patiently(lambda: tell(command, folder), SHORTLY)


def exclude(job: str, nodes: Sequence[str]) -> None:
    _tell(["scontrol", "update", f"jobid={job}", f"ExcNodeList={','.join(nodes)}"], SHORTLY)


def release(job: str) -> None:
    _tell(["scontrol", "release", job], SHORTLY)


def ask_for(
    job: str,
    *,
    nodes: int,
    without: Sequence[str] | None = None,
    after: float = 0.0,
    within: float = SHORTLY,
) -> None:
    """Set the number of `nodes` of a requeued job, the nodes to exclude (`without`; None:
    unchanged), and the seconds `after` which it may start. Raises `SlurmError`."""
    excluded = [] if without is None else [f"ExcNodeList={','.join(without)}"]
    later = [f"StartTime=now+{after:.0f}"] if after else []
    command = ["scontrol", "update", f"jobid={job}", f"NumNodes={nodes}", *excluded, *later]
    _tell(command, within)


def hostnames(nodelist: str) -> list[str]:
    """The host names of a list; asks scontrol if its notation is unknown here. Raises `ValueError`
    with a sentence if it is not a host list."""
    try:
        return expand_hosts(nodelist)
    except ValueError as error:
        try:
            command = ["scontrol", "show", "hostnames", nodelist]
            return _ask(command, _text, SHORTLY).split()
        except SlurmError:
            raise error from None


def _show(kind: str, name: str, needed: str, within: float) -> dict[str, str]:
    """The fields of a partition or reservation; without the `needed` one the answer is
    incomplete."""

    def read(text: str) -> dict[str, str] | None:
        fields = node_fields(text)
        return fields if _ended(text) and needed in fields else None

    return _ask(["scontrol", "show", kind, name, "-o"], read, within)


def _ask(command: Sequence[str], read: Callable[[str], T | None], within: float) -> T:
    return patiently(lambda: ask(command, read), within)


def _tell(command: Sequence[str], within: float) -> None:
    patiently(lambda: tell(command), within)


def _whole_job(text: str) -> dict[str, str] | None:
    fields = job_fields(text)
    return fields if _ended(text) and set(_ALWAYS) <= set(fields) else None


def _text(text: str) -> str | None:
    return text if _ended(text) else None


def _ended(text: str) -> bool:
    """Whether the text is not empty, and its last line is complete."""
    return text.endswith("\n") and bool(text.strip())


VERIFY_WITHIN = 10.0
"""Seconds for which to check that a requeue that Slurm confirmed took effect. Slurm kills this
process soon after."""

UNCLEAR_TRIES = 4
"""Tries after which an unknown error message counts as a refusal."""


@dataclass(frozen=True)
class RequeueDecision:
    """Whether to requeue the job, with a `reason` for the user. `refused`: Slurm would not allow
    it."""

    requeue: bool
    reason: str
    refused: bool = False


_SCRIPT_DIED = ("JobLaunchFailure", "NonZeroExitCode", "RaisedSignal")
"""Slurm's reasons for a job whose batch script was killed, the last followed by the signal. A
cancelled job has no reason."""


def decide_orphan_requeue(
    job: JobState, restarts: int, superseded: bool, fruitless: bool = False
) -> RequeueDecision:
    """Requeue, from a rank or an agent that outlives the supervisor, only a job that runs, that is
    at its time limit, or that ends because its batch script was killed; never a cancelled one.

    `restarts` is the job's restart count when this process was started: one on a node that was cut
    off may outlive its launch, and must not touch the next one. `superseded`: the run has a newer
    attempt; `fruitless`: the supervisor was lost before, and nothing was saved since.
    """
    if superseded:
        return RequeueDecision(False, "the run has a newer attempt: it continues there")
    if job.restarts != restarts:
        return RequeueDecision(
            False, "the job was started again in the meantime: it continues there"
        )
    script_died = job.state in ("COMPLETING", "FAILED") and job.reason.startswith(_SCRIPT_DIED)
    if not (job.may_go_back or script_died):
        return RequeueDecision(False, f"the job is {job.state}: Slurm decides what happens to it")
    if not job.may_requeue:
        return RequeueDecision(
            False, "the job was submitted with --no-requeue: submit it again to continue"
        )
    if fruitless:
        return RequeueDecision(
            False,
            "the supervisor was lost again before a new step was saved: look at why, then submit "
            "the job again",
        )
    return RequeueDecision(True, "the supervisor is gone: requeueing the job")


class RequeueOutcome(Enum):
    DONE = "the job is back in the queue"
    LEFT = "it was decided against"
    REFUSED = "Slurm does not take it back"
    SILENT = "Slurm did not answer until it was too late"


@dataclass(frozen=True)
class PutBack:
    """The outcome of a requeue, with the `reason`. `state` is the job's last known state, `asked`
    its state before the first try; None without one. `by_another`: the job is back, but Slurm has
    refused this request, so that it took that of another process."""

    outcome: RequeueOutcome
    reason: str
    state: JobState | None = None
    asked: JobState | None = None
    by_another: bool = False


@dataclass(frozen=True)
class SlurmAccess:
    """The functions that `put_back` uses, replaced in tests. `clock` is in seconds."""

    look: Callable[[str], JobState] = lambda job: job_state(job, within=0.0)
    requeue: Callable[[str], None] = lambda job: requeue(job)
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], object] = time.sleep


def was_requeued(asked: JobState, now: JobState) -> bool:
    """Whether the job was requeued since its state was `asked`."""
    return now.restarts > asked.restarts or now.queued


def put_back(
    job: str,
    decide: Callable[[JobState], RequeueDecision],
    until: float,
    on_failure: Callable[[SlurmError], None] = lambda error: None,
    means: SlurmAccess | None = None,
) -> PutBack:
    """Requeue `job` if `decide` says so, given the job's state at that moment. Retries until
    `until` (`time.monotonic`, seconds). `on_failure` is called for each failed try."""
    return _RequeueTries(job, decide, until, on_failure, means or SlurmAccess()).carry_out()


@dataclass
class _RequeueTries:
    """The tries of one requeue. `asked` is the job's state before the first one."""

    job: str
    decide: Callable[[JobState], RequeueDecision]
    until: float
    on_failure: Callable[[SlurmError], None]
    means: SlurmAccess
    asked: JobState | None = None
    reason: str = ""
    refusal: SlurmError | None = None
    lost: SlurmError | None = None
    taken: bool = False
    tries: int = 0

    def carry_out(self) -> PutBack:
        while True:
            try:
                state = self._look()
            except SlurmRefusedError as error:
                return self._end(RequeueOutcome.REFUSED, str(error))
            except SlurmError as error:
                outcome = RequeueOutcome.DONE if self.taken else RequeueOutcome.SILENT
                return self._end(outcome, str(error))
            if self.asked is not None and was_requeued(self.asked, state):
                return self._end(RequeueOutcome.DONE, "", state)
            decision = self.decide(state)
            if not decision.requeue:
                outcome = RequeueOutcome.REFUSED if decision.refused else RequeueOutcome.LEFT
                return self._end(outcome, decision.reason, state)
            if self.refusal is not None:
                return self._end(RequeueOutcome.REFUSED, str(self.refusal), state)
            if self.lost is not None and self.means.clock() > self.until:
                return self._end(RequeueOutcome.SILENT, str(self.lost), state)
            self.asked, self.reason = self.asked or state, decision.reason
            self._ask()

    def _look(self) -> JobState:
        """The job's state. Waits only briefly once Slurm has confirmed the requeue."""
        left = self.until - self.means.clock()
        within = min(left, VERIFY_WITHIN) if self.taken else left
        look, means = partial(self.means.look, self.job), self.means
        return patiently(look, within, self.on_failure, means.clock, means.pause)

    def _ask(self) -> None:
        self.tries += 1
        try:
            self.means.requeue(self.job)
            self.taken = True
        except SlurmRefusedError as error:
            self.refusal = error  # perhaps only of a second request, after the first worked
            return
        except SlurmError as error:
            self.taken, self.lost = False, error
            self.on_failure(error)
            if isinstance(error, SlurmUnclearError) and self.tries >= UNCLEAR_TRIES:
                self.refusal = error
                return
        if self.tries > 1 or not self.taken:
            self.means.pause(next_pause(self.tries))

    def _end(self, outcome: RequeueOutcome, reason: str, state: JobState | None = None) -> PutBack:
        done = outcome is RequeueOutcome.DONE
        refused = isinstance(self.refusal, SlurmRefusedError) and self.lost is None
        by_another = done and refused and not self.taken
        return PutBack(
            outcome, self.reason if done else reason, state or self.asked, self.asked, by_another
        )
