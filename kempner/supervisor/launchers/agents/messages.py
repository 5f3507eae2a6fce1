"""What the supervisor and the agents of its nodes say to each other (`run.link`).

No command travels: an agent got it from srun, with its own. What ranks are told comes in named
fields, of which an agent makes their environment.
"""

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
"""Variables of an agent: where the supervisor listens, and which of its steps this is."""

BEAT = 2.0
"""Seconds between two signs of life of an agent."""


@dataclass(frozen=True)
class Buddy(Message):
    """Part of `StartRanks`: the node whose agent keeps copies, where that listens, and the share of
    the time in which it is sent to, which decides how many steps lie between two that are sent.
    """

    node: Name
    address: Name
    port: Natural
    share: Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True)
class SealedLaunch(Message):
    """Part of `StartRanks`: what the ranks are told (`run.control.launch_env.Launch`); the token is
    under a pad that can be made only with the agents' secret."""

    nonce: Words
    sealed: tuple[Proof, Nonce]
    job: Name | None = None
    in_memory: bool = False
    terms: LaunchTerms | None = None
    parent: Natural | None = None

    @classmethod
    def of(cls, launch: Launch, secret: Secret) -> Self:
        """Under the agents' secret."""
        told = launch.job, launch.in_memory, launch.terms, launch.parent
        return as_text(cls(launch.attempt.nonce, secret.seal(launch.secret.token), *told))

    def open(self, secret: Secret, attempt: int) -> Launch:
        """The launch of an attempt, in an agent."""
        told = "", self.parent, self.job, as_names(self.terms)
        of_attempt = Secret(secret.unseal(self.sealed))
        return Launch(Attempt(attempt, self.nonce), of_attempt, *told, in_memory=self.in_memory)


Devices: TypeAlias = Literal[
    "CUDA_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
]
"""Variables by which srun tells a task which devices are its own."""


@dataclass(frozen=True)
class TaskBinding(Message):
    """Part of `StartRanks`: the CPUs that srun gives to a task (none: all), and its devices."""

    cpus: tuple[Natural, ...] = ()
    devices: dict[Devices, Name] = field(default_factory=dict)


@dataclass(frozen=True)
class StartRanks(Message):
    """Supervisor to agent: start `count` of the `size` ranks of an attempt, from number `first`.

    `master` is where they meet, `bindings` has one for each, if the user wishes them to be bound.
    Where each is a torchrun, `ranks` is how many there are in all.
    No variable of the environment can be set but those that an agent makes of these fields.
    """

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
        """Whose output comes first from here: a torchrun's is all that its ranks print."""
        return self.first if self.ranks is None else self.first * self.ranks // self.size


@dataclass(frozen=True)
class KillRanks(Message):
    """Supervisor to agent: SIGKILL to all that is left of an attempt; then say that it is gone."""

    attempt: Natural
    kind: Literal["kill"] = "kill"


@dataclass(frozen=True)
class Question(Message):
    """Supervisor to agent: how the node is, if `about` asks (`probe.node`), which of the processes
    `pids` still run, what can be seen of those in `look` (`probe.processes`), and what `slots`
    asks for (`checkpoint.slots.requests`)."""

    number: Natural = 0
    about: Words = ""
    pids: tuple[Natural, ...] = ()
    look: tuple[Natural, ...] = ()
    slots: Words = ""
    kind: Literal["question"] = "question"


@dataclass(frozen=True)
class LeaveOrder(Message):
    """Supervisor to agent: end, with all that you have started. `refusal` is why it cannot join."""

    refusal: Words = ""
    kind: Literal["leave"] = "leave"


@dataclass(frozen=True)
class Answer(Message):
    """Agent to supervisor: the answer to a question; `vitals` is empty if it did not ask."""

    number: Natural
    vitals: Annotated[str, Field(max_length=LINE_LIMIT // 2)]
    left: tuple[Natural, ...]
    seen: tuple[Words, ...] = ()
    slots: Annotated[str, Field(max_length=LINE_LIMIT // 2)] = ""
    kind: Literal["answer"] = "answer"


Sent: TypeAlias = Literal["none", "stop", "kill", "nothing"]
"""The strongest signal that a rank was sent; "nothing" if it was never started, which is none of
its own doing."""


@dataclass(frozen=True)
class Ended(Post):
    """Agent to supervisor: how a rank ended, as in `policy.outcome.RankExit`; `sent` is the
    strongest signal that the agent had sent it by then."""

    attempt: Natural
    rank: Natural
    status: int | None
    sent: Sent
    sentence: Words
    oom_kills: Natural = 0
    kind: Literal["ended"] = "ended"


@dataclass(frozen=True)
class AttemptCleared(Post):
    """Agent to supervisor: of this attempt nothing is left here, or only what outlives a kill."""

    attempt: Natural
    clean: bool
    kind: Literal["cleared"] = "cleared"


@dataclass(frozen=True)
class RankStill(Message):
    """Part of `RanksStill`: a rank whose processes have done no work for `idle` seconds, and for
    `still` of them have not even looked whether they can go on; or `works` (`probe.activity`). And
    the line and collective where it stands, None where that cannot be seen."""

    rank: Natural
    idle: Seconds
    still: Seconds
    place: tuple[Words, Words] | None = None
    works: bool = False


@dataclass(frozen=True)
class RanksStill(Message):
    """Agent to supervisor: what the ranks of a program of the user's own on this node do, as seen
    from outside."""

    attempt: Natural
    ranks: tuple[RankStill, ...]
    kind: Literal["still"] = "still"


@dataclass(frozen=True)
class DepartureRequest(Post):
    """Agent of another job to supervisor: it has to leave within `seconds`, and why."""

    seconds: Seconds
    reason: Words
    kind: Literal["departs"] = "departs"


@dataclass(frozen=True)
class GpuTold(Post):
    """Agent to supervisor: what has gone wrong with a GPU of its node (`probe.gpu_events`)."""

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
    | RanksStill
    | GpuTold
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
    """An agent that has proved itself: whose it is, its process, and what it brings if it is not of
    the supervisor's job."""

    node: str
    pid: int
    joins: Joins | None = None
