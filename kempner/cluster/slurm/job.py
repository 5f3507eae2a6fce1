"""State of a Slurm job, its share of each node, and the nodes on which it could run.

Pure functions of scontrol's output. `--gpus=12` may give 8 on one node and 4 on another, and
`--ntasks=8` 7 CPUs and 1; the batch process's environment describes only its own node."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum

from kempner.cluster.slurm.hostlist import expand_hosts
from kempner.cluster.slurm.resources import count_gpus

_NOTHING = ("", "(null)", "None", "N/A", "Unknown", "NONE")


QUEUED = frozenset(
    {
        "PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT",
        "EXPEDITING",
    }
)  # fmt: skip
"""The states of a job that is in the queue."""

FINAL = frozenset(
    {
        "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL",
        "DEADLINE", "OUT_OF_MEMORY", "LAUNCH_FAILED", "REVOKED",
    }
)  # fmt: skip
"""The states of a job that is over. A job in any unknown state counts as going on."""

_BASE = FINAL | {"PENDING", "RUNNING", "SUSPENDED"}
"""The states beside which a job may have a more specific one, as in COMPLETED, COMPLETING."""

_HELD = frozenset({"REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
_HELD_FOR = re.compile("[Hh]eld|Hold|special_exit|BadConstraints")
"""Matches the reasons of a held job, such as `launch_failed_requeued_held`."""

_WHAT_TO_DO = (
    ("JobHeldAdmin", "an administrator holds it: ask for `scontrol release {job}`"),
    ("HoldMaxRequeue", "it was requeued as often as max_batch_requeue allows: `scontrol release "
     "{job}`, and ask an administrator to raise that"),
    ("BadConstraints", "no nodes have what it asks for: mend that with `scontrol update "
     "jobid={job} ...`, then `scontrol release {job}`"),
    ("launch_fail", "a node could not start it: look at Slurm's Prolog there, then "
     "`scontrol release {job}`"),
    ("user_env", "your login shell did not start in time: mend it, then `scontrol release {job}`"),
)  # fmt: skip
"""What a user can do about a held job, by a part of its reason."""


def how_to_release(job: str, state: str, reason: str) -> str:
    """A sentence that tells the user how to release a held job."""
    known = (words for part, words in _WHAT_TO_DO if part in reason)
    words = next(known, "`scontrol release {job}` lets it go").format(job=job)
    return f"{reason or state}: Slurm does not start it again until it is released; {words}"


def is_held(state: str, reason: str) -> bool:
    return state in _HELD or (state in QUEUED and _HELD_FOR.search(reason) is not None)


def telling_state(states: str) -> str:
    """The most specific word of a JobState, which may have several (`COMPLETED+COMPLETING`,
    `RUNNING,STOPPED`); known ones take precedence."""
    words = re.split("[+,]", states)
    known = [word for word in words if word in (QUEUED | _FLAGS) - _BASE]
    return next(iter([*known, *(word for word in words if word in _BASE), *words]))


_FLAGS = frozenset({"COMPLETING", "CONFIGURING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED"})

_AT_THE_END = (
    "OOMKillStep|CpusPerTres|MemPerTres|TresBind|TresFreq|TresPerJob|TresPerNode|TresPerSocket"
    "|TresPerTask|MailUser|MailType|NtasksPerTRES|ContainerType|Container|ContainerID"
    "|SELinuxContext|ResvPorts"
)
"""Fields that Slurm 22.05 to 26.05 print after those in which a user may write spaces; each only if
requested. Since 23.11 a job with --cpus-per-task has a TresPerTask after its TresPerNode."""


def job_fields(text: str) -> dict[str, str]:
    """The fields of the first job in the output of `scontrol show job -o`, without the user's free
    texts (the job's name, its command and what follows), which may look like fields."""
    first = text.strip().partition("\nJobId=")[0]
    line = re.sub(r" JobName=.* UserId=", " UserId=", first, flags=re.DOTALL)
    tail = re.search(rf"(?: (?:{_AT_THE_END})=\S*)+\s*$", line)
    fields = node_fields(line.partition(" Command=")[0])
    return fields | ({} if tail is None else node_fields(tail[0].strip()))


def node_fields(text: str) -> dict[str, str]:
    """The fields of a line of `scontrol show node -o`; the first if a name occurs twice."""
    found = re.findall(r"(?:^| )([A-Z][\w:/]*)=(\S*)", text.strip())
    return dict(reversed(found))


@dataclass(frozen=True)
class JobTimes:
    """`end` and `preempt` are in seconds since the epoch by the controller's clock, `limit` in
    seconds; None if not set. `end` is a running job's latest end (a preemption moves it), or the
    end of one that is over; `limit` is its time limit, None for UNLIMITED."""

    end: float | None = None
    preempt: float | None = None
    limit: float | None = None


@dataclass(frozen=True)
class JobNodes:
    """`count` is the number of nodes that a job has or requests; `held`, `excluded` and `required`
    are host lists, `partition` is a comma-separated list, `features` the constraint and `resources`
    the TresPerNode of the request."""

    held: str = ""
    count: int = 1
    excluded: str = ""
    partition: str = ""
    reservation: str = ""
    required: str = ""
    features: str = ""
    resources: str = ""


@dataclass(frozen=True)
class JobState:
    """A job as shown by `scontrol show job -o`. `state` is the most specific word of JobState, such
    as RUNNING; `reason` is empty for None; `may_requeue` is the Requeue flag; `batch`: it was
    submitted with sbatch."""

    id: str
    state: str
    reason: str
    restarts: int
    may_requeue: bool
    batch: bool
    times: JobTimes
    nodes: JobNodes

    @property
    def running(self) -> bool:
        """Whether the job holds its nodes, so that a requeue does not revive a dead job. True also
        in states that are unknown here: SIGNALING (a preempted job's tasks are warned), STOPPED
        (its steps got SIGSTOP), and those of later versions. If it is suspended, this process is
        about to be suspended or was just resumed."""
        return self.state not in QUEUED | FINAL | {"COMPLETING", "STAGE_OUT"}

    @property
    def may_go_back(self) -> bool:
        """Whether a requeue helps and revives nothing that a person has ended: the job runs, or
        Slurm ends it at its time limit, and takes it back until KillWait is over (tried on Slurm
        22.05, 24.11 and 26.05)."""
        return self.running or (self.state == "COMPLETING" and self.reason == "TimeLimit")

    @property
    def queued(self) -> bool:
        return self.state in QUEUED

    @property
    def held(self) -> bool:
        return is_held(self.state, self.reason)


def parse_job(fields: Mapping[str, str]) -> JobState:
    """The `JobState` of the fields from `job_fields`. Raises `ValueError` with a sentence."""
    missing = [name for name in ("JobId", "JobState") if name not in fields]
    if missing:
        raise ValueError(f"`scontrol show job` answered without {' and '.join(missing)}")
    return JobState(
        id=fields["JobId"],
        state=telling_state(fields["JobState"]),
        reason=_field_text(fields, "Reason"),
        restarts=int(fields.get("Restarts", "0")),
        may_requeue=fields.get("Requeue") == "1",
        batch=fields.get("BatchFlag", "0") != "0",  # incremented for each failed launch
        times=JobTimes(
            end=parse_time(fields.get("EndTime", "")),
            preempt=parse_time(fields.get("PreemptTime", "")),
            limit=_seconds(fields.get("TimeLimit", "")),
        ),
        nodes=JobNodes(
            held=_field_text(fields, "NodeList"),
            count=int(fields.get("NumNodes", "1").partition("-")[0]),
            excluded=_field_text(fields, "ExcNodeList"),
            partition=_field_text(fields, "Partition"),
            reservation=_field_text(fields, "Reservation"),
            required=_field_text(fields, "ReqNodeList"),
            features=_field_text(fields, "Features"),
            resources=_field_text(fields, "TresPerNode"),
        ),
    )


class JobEvent(Enum):
    NOTHING = "it runs"
    TIME_LIMIT = "its time is nearly over"
    TIME_LIMIT_REACHED = "its time is over"
    PREEMPTION = "a job of higher priority preempts it"
    REQUEUE = "it was put back into the queue, by an operator, a preemption or a lost node"
    CANCEL = "it was cancelled"
    ENDED = "it is over"


def classify(before: JobState, now: JobState, warned: bool = False) -> JobEvent:
    """What happened to a job between two states; `warned` if a signal came meanwhile. As observed
    on Slurm 22.05: a warning before the time limit changes nothing in the state; a preemption sets
    PreemptTime and moves EndTime, and after its grace time counts as a requeue; a requeue shows as
    COMPLETING with one more restart; a cancelled job shows COMPLETING without a reason, one at its
    limit with the reason TimeLimit."""
    if now.restarts > before.restarts or now.queued:
        return JobEvent.REQUEUE
    if now.state in ("SUSPENDED", "STAGE_OUT"):
        return JobEvent.NOTHING  # about to be suspended, or already over
    if now.running:
        if now.times.preempt is not None:
            return JobEvent.PREEMPTION
        return JobEvent.TIME_LIMIT if warned else JobEvent.NOTHING
    if now.reason == "TimeLimit" or now.state == "TIMEOUT":
        return JobEvent.TIME_LIMIT_REACHED
    if now.state == "CANCELLED" or (now.state == "COMPLETING" and not now.reason):
        return JobEvent.CANCEL
    return JobEvent.ENDED


def job_id(environ: Mapping[str, str]) -> str | None:
    """This job's id for Slurm's commands; None outside of a job. In an array `<array>_<task>`,
    since the plain id of the element that has the array's id means all elements to scancel and
    `scontrol requeue`. Raises `ValueError` with a sentence in a heterogeneous job."""
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    if not job:
        return None
    if int(environ.get("SLURM_HET_SIZE") or "1") > 1:
        raise ValueError(
            f"job {job} is heterogeneous (SLURM_HET_SIZE={environ['SLURM_HET_SIZE']}), and kempner "
            "cannot requeue a part of one: submit it with one set of resources, without `:`"
        )
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else job


def element(environ: Mapping[str, str]) -> str:
    """The suffix of a run's name that distinguishes this element of a job array; empty outside of
    one."""
    task = environ.get("SLURM_ARRAY_TASK_ID", "")
    return f"-{task}" if task else ""


def restart_count(environ: Mapping[str, str]) -> int:
    return int(environ.get("SLURM_RESTART_COUNT") or "0")


def _field_text(fields: Mapping[str, str], name: str) -> str:
    value = fields.get(name, "")
    return "" if value in _NOTHING else value


def parse_time(text: str) -> float | None:
    """Seconds since the epoch of a time printed by Slurm (in UTC, see
    `command.client_environment`); None if not set."""
    if text in _NOTHING:
        return None
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def _seconds(text: str) -> float | None:
    """`2-01:30:00` (days, hours, minutes, seconds) and its shorter forms."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


_SHARE = re.compile(r"(?:^|\s)Nodes=(\S+) CPU_IDs=(\S*) Mem=\d+ GRES=(\S*)")


@dataclass(frozen=True)
class NodeShare:
    cpus: int
    gpus: int


def node_shares(
    text: str, hosts: Callable[[str], Sequence[str]] = expand_hosts
) -> dict[str, NodeShare]:
    """A job's share of each node in the output of `scontrol show job -d -o`. The format is the same
    from Slurm 22.05 to 26.05 (`src/api/job_info.c`, since 24.11 `src/scontrol/info_job.c`). Raises
    `ValueError` with a sentence if a share cannot be parsed."""
    ours = text.partition(" Command=")[0]  # the user's free texts follow
    shares: dict[str, NodeShare] = {}
    for nodes, cpus, gres in _SHARE.findall(ours):
        # GRES may list other resources but no GPU.
        share = NodeShare(_count_ids(cpus), count_gpus(gres) if "gpu" in gres else 0)
        shares |= dict.fromkeys(hosts(nodes), share)
    return shares


def gpus_by_node(shares: Mapping[str, NodeShare], nodes: Sequence[str]) -> dict[str, int]:
    """The number of GPUs of each of these nodes; empty if not all are known."""
    if not all(node in shares for node in nodes):
        return {}
    return {node: shares[node].gpus for node in nodes}


def _count_ids(ids: str) -> int:
    """`0-3,8` is 5."""
    total = 0
    for part in filter(None, ids.split(",")):
        first, _, last = part.partition("-")
        total += int(last or first) - int(first) + 1
    return total


_TYPED_GPU = re.compile(r"gpu:([\w.+-]*[A-Za-z][\w.+-]*)(?:[:=(,]|$)")
_WORD = re.compile(r"[\w.:-]+")


def eligible(features: str, resources: str, nodes: Iterable[Mapping[str, str]]) -> set[str] | None:
    """The names of the nodes, in whatever state, with the features and GPU types that a job
    requests. `features` is its constraint, `resources` its TresPerNode, `nodes` are the fields of
    `scontrol show node -o`. None if the constraint is too complex to be evaluated here."""
    found = set()
    for node in nodes:
        has = _split(node.get("AvailableFeatures", ""), node.get("ActiveFeatures", ""))
        fits = satisfies(features, has)
        if fits is None:
            return None
        if fits and gpu_types(resources) <= gpu_types(node.get("Gres", "")):
            found.add(node["NodeName"])
    return found


def satisfies(constraint: str, features: Collection[str]) -> bool | None:
    """Whether a node with these features satisfies a constraint of `&` and `|`, or an empty one.
    None for constraints on several nodes together (brackets, counts) and parentheses."""
    if not constraint:
        return True
    parts = [[word.strip() for word in part.split("&")] for part in constraint.split("|")]
    if not all(_WORD.fullmatch(word) for part in parts for word in part):
        return None
    return any(all(word in features for word in part) for part in parts)


def gpu_types(resources: str) -> set[str]:
    """The types of GPU named in a Gres or TresPerNode: `gres:gpu:h100:4` names `h100`."""
    return set(_TYPED_GPU.findall(resources.replace("/", ":")))


def _split(*lists: str) -> set[str]:
    return {word for text in lists for word in text.split(",") if word and word != "(null)"}
