"""State of a Slurm job, what it has of each node, and which nodes it could run on.

Pure functions of what scontrol shows. `--gpus=12` may come as 8 on one node and 4 on another, and
`--ntasks=8` as 7 CPUs and 1; the environment of the batch process is about its own node alone.
"""

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
"""The states of a job that is over. Of any other it is not known, and so it goes on."""

_BASE = FINAL | {"PENDING", "RUNNING", "SUSPENDED"}
"""The states beside which a job may have another one, which says more: COMPLETED, COMPLETING."""

_HELD = frozenset({"REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
_HELD_FOR = re.compile("[Hh]eld|Hold|special_exit|BadConstraints")
"""Found in the reasons for which a job is held, `launch_failed_requeued_held` among them."""

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
"""What a user can do about a job that is held, by what its reason has in it."""


def how_to_release(job: str, state: str, reason: str) -> str:
    """What Slurm waits for before it starts a held job, for the user who has to do it."""
    known = (words for part, words in _WHAT_TO_DO if part in reason)
    words = next(known, "`scontrol release {job}` lets it go").format(job=job)
    return f"{reason or state}: Slurm does not start it again until it is released; {words}"


def is_held(state: str, reason: str) -> bool:
    return state in _HELD or (state in QUEUED and _HELD_FOR.search(reason) is not None)


def telling_state(states: str) -> str:
    """The word of a JobState that says most: `COMPLETED+COMPLETING` and `RUNNING,STOPPED` have two.
    A known one goes first."""
    words = re.split("[+,]", states)
    known = [word for word in words if word in (QUEUED | _FLAGS) - _BASE]
    return next(iter([*known, *(word for word in words if word in _BASE), *words]))


_FLAGS = frozenset({"COMPLETING", "CONFIGURING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED"})

_AT_THE_END = (
    "OOMKillStep|CpusPerTres|MemPerTres|TresBind|TresFreq|TresPerJob|TresPerNode|TresPerSocket"
    "|TresPerTask|MailUser|MailType|NtasksPerTRES|ContainerType|Container|ContainerID"
    "|SELinuxContext|ResvPorts"
)
"""What Slurm 22.05 to 26.05 write after all that a user may put spaces into, each only where it was
asked for. From 23.11 on a job with --cpus-per-task has a TresPerTask after its TresPerNode."""


def job_fields(text: str) -> dict[str, str]:
    """The fields of the first job in the output of `scontrol show job -o`. What a user chooses (the
    job's name, its command and what follows) may look like fields, and is left out."""
    first = text.strip().partition("\nJobId=")[0]
    line = re.sub(r" JobName=.* UserId=", " UserId=", first, flags=re.DOTALL)
    tail = re.search(rf"(?: (?:{_AT_THE_END})=\S*)+\s*$", line)
    fields = node_fields(line.partition(" Command=")[0])
    return fields | ({} if tail is None else node_fields(tail[0].strip()))


def node_fields(text: str) -> dict[str, str]:
    """The fields of a line of `scontrol show node -o`; of one that is there twice the first."""
    found = re.findall(r"(?:^| )([A-Z][\w:/]*)=(\S*)", text.strip())
    return dict(reversed(found))


@dataclass(frozen=True)
class JobTimes:
    """`end` and `preempt` in seconds since the epoch by the controller's clock, `limit` in seconds;
    None for what is not set. `end` is the limit of a running job (a preemption moves it) and the
    end of one that is over; `limit` is how long the job may run, None for UNLIMITED."""

    end: float | None = None
    preempt: float | None = None
    limit: float | None = None


@dataclass(frozen=True)
class JobNodes:
    """`count` is how many nodes a job has, or asks for; `held` and `excluded` are host lists.
    `partition` may be several names with commas between. `required` is a host list, `features` a
    constraint and `resources` the TresPerNode, each as the job asks for it."""

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
    """A job as `scontrol show job -o` shows it. `state` is the word of JobState that says most,
    such as RUNNING; `reason` is empty for None. `may_requeue` is the job's Requeue flag; `batch`
    says that it was submitted with sbatch."""

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
        """Whether the job still holds its nodes and may be requeued without reviving a dead one. So
        it does in a state that is not known here: SIGNALING while the tasks of a preempted job are
        warned, STOPPED after a SIGSTOP to its steps, whatever the next version calls its own. Of
        one that is suspended, this process is about to stand still, or has just gone on."""
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
    """What `job_fields` found, typed. Raises `ValueError` with a sentence."""
    missing = [name for name in ("JobId", "JobState") if name not in fields]
    if missing:
        raise ValueError(f"`scontrol show job` answered without {' and '.join(missing)}")
    return JobState(
        id=fields["JobId"],
        state=telling_state(fields["JobState"]),
        reason=_said(fields, "Reason"),
        restarts=int(fields.get("Restarts", "0")),
        may_requeue=fields.get("Requeue") == "1",
        batch=fields.get("BatchFlag", "0") != "0",  # one more for each launch that failed
        times=JobTimes(
            end=parse_time(fields.get("EndTime", "")),
            preempt=parse_time(fields.get("PreemptTime", "")),
            limit=_seconds(fields.get("TimeLimit", "")),
        ),
        nodes=JobNodes(
            held=_said(fields, "NodeList"),
            count=int(fields.get("NumNodes", "1").partition("-")[0]),
            excluded=_said(fields, "ExcNodeList"),
            partition=_said(fields, "Partition"),
            reservation=_said(fields, "Reservation"),
            required=_said(fields, "ReqNodeList"),
            features=_said(fields, "Features"),
            resources=_said(fields, "TresPerNode"),
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
    """What happened between two looks at the same job, `warned` if a signal came in between. Seen
    on Slurm 22.05: a warning before the time limit changes nothing about the job; a preemption sets
    PreemptTime and moves EndTime, and once its grace time is over counts as a requeue; a requeue
    shows as COMPLETING with one restart more; a job that is cancelled shows COMPLETING without a
    reason, one at its limit with the reason TimeLimit."""
    if now.restarts > before.restarts or now.queued:
        return JobEvent.REQUEUE
    if now.state in ("SUSPENDED", "STAGE_OUT"):
        return JobEvent.NOTHING  # seen in the moment before it takes hold, or after it is over
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
    """The id by which to speak of this job to Slurm; None outside of one. In an array
    `<array>_<task>`: the plain id of the element that carries the array's own id means all elements
    to scancel and to `scontrol requeue`. Raises `ValueError` with a sentence in a heterogeneous
    job."""
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
    """What sets the run of this element of a job array apart from the others'; empty outside."""
    task = environ.get("SLURM_ARRAY_TASK_ID", "")
    return f"-{task}" if task else ""


def restart_count(environ: Mapping[str, str]) -> int:
    return int(environ.get("SLURM_RESTART_COUNT") or "0")


def _said(fields: Mapping[str, str], name: str) -> str:
    value = fields.get(name, "")
    return "" if value in _NOTHING else value


def parse_time(text: str) -> float | None:
    """Seconds since the epoch of a time of the controller, in UTC by `command.client_environment`;
    None if it is not set."""
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
    """The share of each node in the output of `scontrol show job -d -o`; of no job, none. The words
    for it are the same from Slurm 22.05 to 26.05 (`src/api/job_info.c`, since 24.11
    `src/scontrol/info_job.c`). Raises `ValueError` with a sentence if one cannot be read."""
    ours = text.partition(" Command=")[0]  # what follows is the user's
    shares: dict[str, NodeShare] = {}
    for nodes, cpus, gres in _SHARE.findall(ours):
        # A job may have other resources on a node and no GPU.
        share = NodeShare(_count_ids(cpus), count_gpus(gres) if "gpu" in gres else 0)
        shares |= dict.fromkeys(hosts(nodes), share)
    return shares


def gpus_by_node(shares: Mapping[str, NodeShare], nodes: Sequence[str]) -> dict[str, int]:
    """The GPUs of these nodes; empty if not all of them are known."""
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
    """The names of those nodes that have what a job asks of each, in whatever state they are.
    `features` is its constraint in Slurm's words, `resources` its TresPerNode, `nodes` are the
    fields of `scontrol show node -o`. None if the constraint is too involved to be judged here."""
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
    None for what speaks of several nodes together: brackets, counts, parentheses."""
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
