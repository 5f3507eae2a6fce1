"""The messages between the supervisor and the agents of its nodes (`run.link`).

No message carries a command or an environment: an agent gets the ranks' command in its own
arguments, and builds their environment from the named fields of `StartRanks`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field

from kempner.run.control.launch_env import Launch, LaunchTerms
from kempner.run.control.protocol import RankNews, SummedReports, TellRanks
from kempner.run.link.auth import Secret
from kempner.run.link.messages import (
    LINE_LIMIT,
    Alive,
    Joins,
    Message,
    Name,
    Natural,
    Nonce,
    Noted,
    Post,
    Proof,
    Seconds,
    Words,
    decoder,
)
from kempner.run.process.durable_io import as_names, as_text
from kempner.run.record.attempts import Attempt

ADDRESSES, PORT = "KEMPNER_AGENTS_ADDRESSES", "KEMPNER_AGENTS_PORT"
TOKEN, STEP = "KEMPNER_AGENTS_TOKEN", "KEMPNER_AGENTS_STEP"
"""Environment variables of an agent: the supervisor's addresses, port and token, and the number of
the step that runs the agent."""

BEAT = 2.0
"""Seconds between two signs of life of an agent."""


@dataclass(frozen=True)
class Buddy(Message):
    """Part of `StartRanks`: the node whose agent keeps copies of this one's steps, its address, and
    the share of the time that may be spent sending, which sets how many steps lie between two
    copies."""

    node: Name
    address: Name
    port: Natural
    share: Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True)
class SealedLaunch(Message):
    """Part of `StartRanks`: the ranks' `run.control.launch_env.Launch`, with its token encrypted
    with the agents' secret."""

    nonce: Words
    sealed: tuple[Proof, Nonce]
    job: Name | None = None
    in_memory: bool = False
    terms: LaunchTerms | None = None
    parent: Natural | None = None

    @classmethod
    def of(cls, launch: Launch, secret: Secret) -> Self:
        rest = launch.job, launch.in_memory, launch.terms, launch.parent
        return as_text(cls(launch.attempt.nonce, secret.seal(launch.secret.token), *rest))

    def open(self, secret: Secret, attempt: int) -> Launch:
        """The launch of an attempt, with its token decrypted."""
        rest = "", self.parent, self.job, as_names(self.terms)
        of_attempt = Secret(secret.unseal(self.sealed))
        return Launch(Attempt(attempt, self.nonce), of_attempt, *rest, in_memory=self.in_memory)


Devices: TypeAlias = Literal[
    "CUDA_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
]
"""Environment variables in which srun gives a task its devices."""


@dataclass(frozen=True)
class TaskBinding(Message):
    """Part of `StartRanks`: the CPUs of a rank (empty: all), and the variables that name its
    devices."""

    cpus: tuple[Natural, ...] = ()
    devices: dict[Devices, Name] = field(default_factory=dict)


@dataclass(frozen=True)
class StartRanks(Message):
    """Supervisor to agent: start the ranks `first` to `first + count - 1` of the attempt's `size`.

    `master` is the rendezvous address; `bindings` has one entry per rank if srun binds them. If
    each process is a torchrun, `ranks` is the number of all ranks."""

    attempt: Natural
    launch: SealedLaunch
    first: Natural
    count: Natural
    size: Natural
    master: tuple[Name, Natural]
    buddy: Buddy | None = None
    bindings: tuple[TaskBinding, ...] = ()
    ranks: Natural | None = None
    kind: Literal["start"] = "start"

    @property
    def first_rank(self) -> int:
        """The rank under whose number the first output here is kept; a torchrun prints for all its
        ranks."""
        return self.first if self.ranks is None else self.first * self.ranks // self.size


@dataclass(frozen=True)
class KillRanks(Message):
    """Supervisor to agent: send SIGKILL to all that is left of an attempt, and answer with
    `AttemptCleared`."""

    attempt: Natural
    kind: Literal["kill"] = "kill"


@dataclass(frozen=True)
class Question(Message):
    """Supervisor to agent. `about` is a question about the node (`probe.node`), `pids` are
    processes to check for being alive, `look` processes to describe (`probe.processes`), `slots` a
    request about steps in memory (`checkpoint.slots.requests`); each may be empty."""

    number: Natural = 0
    about: Words = ""
    pids: tuple[Natural, ...] = ()
    look: tuple[Natural, ...] = ()
    slots: Words = ""
    kind: Literal["question"] = "question"


@dataclass(frozen=True)
class LeaveOrder(Message):
    """Supervisor to agent: end, and kill all that you have started. `refusal` is why an agent of
    another job cannot join."""

    refusal: Words = ""
    kind: Literal["leave"] = "leave"


@dataclass(frozen=True)
class Answer(Message):
    """Agent to supervisor: the answer to a `Question`: `vitals` to `about`, `left` the `pids` that
    are alive, `seen` to `look`, `slots` to `slots`; empty where nothing was asked."""

    number: Natural
    vitals: Annotated[str, Field(max_length=LINE_LIMIT // 2)]
    left: tuple[Natural, ...]
    seen: tuple[Words, ...] = ()
    slots: Annotated[str, Field(max_length=LINE_LIMIT // 2)] = ""
    kind: Literal["answer"] = "answer"


Sent: TypeAlias = Literal["none", "stop", "kill", "nothing"]
"""The strongest signal that a rank was sent; "nothing" if it was never started, for a reason
outside of it."""


@dataclass(frozen=True)
class Ended(Post):
    """Agent to supervisor: how a rank ended, as in `policy.outcome.RankExit`."""

    attempt: Natural
    rank: Natural
    status: int | None
    sent: Sent
    sentence: Words
    oom_kills: Natural = 0
    kind: Literal["ended"] = "ended"


@dataclass(frozen=True)
class AttemptCleared(Post):
    """Agent to supervisor: the attempt's processes were killed; `clean` if none is left, False if
    one survives SIGKILL."""

    attempt: Natural
    clean: bool
    kind: Literal["cleared"] = "cleared"


@dataclass(frozen=True)
class RankActivity(Message):
    """Part of `ActivityReport`: `works`, or the seconds for which the rank's processes have done no
    work (`idle`) and not even polled (`still`), as in `probe.activity`. `place` is the line and the
    collective in which it is; None if unknown."""

    rank: Natural
    idle: Seconds
    still: Seconds
    place: tuple[Words, Words] | None = None
    works: bool = False


@dataclass(frozen=True)
class ActivityReport(Message):
    """Agent to supervisor: what the ranks of a user's program on this node are doing, observed from
    outside."""

    attempt: Natural
    ranks: tuple[RankActivity, ...]
    kind: Literal["still"] = "still"


@dataclass(frozen=True)
class DepartureRequest(Post):
    """Agent of another job to supervisor: it has to leave within `seconds`."""

    seconds: Seconds
    reason: Words
    kind: Literal["departs"] = "departs"


@dataclass(frozen=True)
class GpuReport(Post):
    """Agent to supervisor: an error of a GPU of its node (`probe.gpu_events`)."""

    gpu: Natural
    xid: Natural
    reason: Words
    broken: bool
    kind: Literal["gpu"] = "gpu"


ToAgent: TypeAlias = StartRanks | KillRanks | Question | Noted | LeaveOrder | TellRanks | Alive
FromAgent: TypeAlias = (
    Alive
    | Answer
    | Ended
    | ActivityReport
    | GpuReport
    | AttemptCleared
    | DepartureRequest
    | RankNews
    | SummedReports
)

decode_to_agent: Callable[[bytes], ToAgent] = decoder(ToAgent)
decode_from_agent: Callable[[bytes], FromAgent] = decoder(FromAgent)
"""Both raise `MessageError`."""


@dataclass(frozen=True)
class AgentHello:
    """An authenticated agent: its node, its process, and what it offers if it is of another job."""

    node: str
    pid: int
    joins: Joins | None = None
