"""What passes between the supervisor and the agents of its nodes: one message, one line.

A connection opens like a rank's (`run.control.protocol`): challenge, hello, welcome. The token of
an attempt, which the ranks need, travels under a pad that can be made only with the agents' secret.
No command travels: an agent got it from srun, with its own.
"""

from __future__ import annotations

import hmac
import json
from dataclasses import asdict, dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from kempner.run.control.protocol import (
    LINE_LIMIT,
    MessageError,
    Name,
    Natural,
    Nonce,
    Proof,
    Secret,
    Words,
    new_nonce,
)

ADDRESSES, PORT = "KEMPNER_AGENTS_ADDRESSES", "KEMPNER_AGENTS_PORT"
TOKEN, STEP = "KEMPNER_AGENTS_TOKEN", "KEMPNER_AGENTS_STEP"
"""Variables of an agent: where the supervisor listens, and which of its steps this is."""

BEAT = 2.0
"""Seconds between two signs of life of an agent."""


@dataclass(frozen=True)
class _AgentMessage:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class StartRanks(_AgentMessage):
    """Supervisor to agent: start `count` of the `size` ranks of an attempt, from number `first`.

    `variables` are what the ranks are told, without the token, which is `sealed`; `master` is where
    they meet.
    """

    attempt: Natural
    variables: dict[str, str]
    sealed: tuple[Proof, Nonce]
    first: Natural
    count: Natural
    size: Natural
    master: tuple[Name, Natural]
    kind: Literal["start"] = "start"


@dataclass(frozen=True)
class StopRanks(_AgentMessage):
    """Supervisor to agent: SIGTERM to the ranks of an attempt."""

    attempt: Natural
    kind: Literal["stop"] = "stop"


@dataclass(frozen=True)
class KillRanks(_AgentMessage):
    """Supervisor to agent: SIGKILL to all that is left of an attempt; then say that it is gone."""

    attempt: Natural
    kind: Literal["kill"] = "kill"


@dataclass(frozen=True)
class Question(_AgentMessage):
    """Supervisor to agent: how the node is, if `about` asks (`nodes.probe`), which of the processes
    `pids` still run, what can be seen of those in `look` (`nodes.process_look`), and what `slots`
    asks for (`checkpoint.slots.requests`)."""

    number: Natural = 0
    about: Words = ""
    pids: tuple[Natural, ...] = ()
    look: tuple[Natural, ...] = ()
    slots: Words = ""
    kind: Literal["question"] = "question"


@dataclass(frozen=True)
class AgentConfirmation(_AgentMessage):
    """Supervisor to agent: everything up to this number has arrived."""

    number: Natural
    kind: Literal["confirmed"] = "confirmed"


@dataclass(frozen=True)
class LeaveOrder(_AgentMessage):
    """Supervisor to agent: end, with all that you have started. `refusal` is why it cannot join."""

    refusal: Words = ""
    kind: Literal["leave"] = "leave"


@dataclass(frozen=True)
class Joins(_AgentMessage):
    """What an agent of another job offers: room for a number of `ranks`, for `seconds` (None:
    without end). `job` is its Slurm id, empty outside of a job."""

    job: Words
    ranks: Natural
    seconds: Annotated[float, Field(ge=0)] | None


@dataclass(frozen=True)
class AgentHello(_AgentMessage):
    """Agent to supervisor, first of all: whose agent it is, its process, and what it brings if it
    is not of the supervisor's job."""

    node: Name
    pid: Natural
    joins: Joins | None = None
    kind: Literal["here"] = "here"


@dataclass(frozen=True)
class AgentHeartbeat(_AgentMessage):
    """Agent to supervisor, every few seconds."""

    kind: Literal["beat"] = "beat"


@dataclass(frozen=True)
class Answer(_AgentMessage):
    """Agent to supervisor: the answer to a question; `vitals` is empty if it did not ask."""

    number: Natural
    vitals: Annotated[str, Field(max_length=LINE_LIMIT // 2)]
    left: tuple[Natural, ...]
    seen: tuple[Words, ...] = ()
    slots: Annotated[str, Field(max_length=LINE_LIMIT // 2)] = ""
    kind: Literal["answer"] = "answer"


@dataclass(frozen=True)
class Ended(_AgentMessage):
    """Agent to supervisor: how a rank ended, as in `policy.outcome.RankExit`; `sent` is the
    strongest signal that the agent had sent it by then."""

    number: Natural
    attempt: Natural
    rank: Natural
    status: int | None
    sent: Literal["none", "stop", "kill"]
    sentence: Words
    oom_kills: Natural = 0
    kind: Literal["ended"] = "ended"


@dataclass(frozen=True)
class AttemptCleared(_AgentMessage):
    """Agent to supervisor: of this attempt nothing is left here, or only what outlives a kill."""

    number: Natural
    attempt: Natural
    clean: bool
    kind: Literal["cleared"] = "cleared"


@dataclass(frozen=True)
class DepartureRequest(_AgentMessage):
    """Agent of another job to supervisor: it has to leave within `seconds`, and why."""

    number: Natural
    seconds: Annotated[float, Field(ge=0)]
    reason: Words
    kind: Literal["departs"] = "departs"


ToAgent: TypeAlias = StartRanks | StopRanks | KillRanks | Question | AgentConfirmation | LeaveOrder
Numbered: TypeAlias = Ended | AttemptCleared | DepartureRequest
FromAgent: TypeAlias = AgentHello | AgentHeartbeat | Answer | Numbered

_TO_AGENT: TypeAdapter[ToAgent] = TypeAdapter(Annotated[ToAgent, Field(discriminator="kind")])
_FROM_AGENT: TypeAdapter[FromAgent] = TypeAdapter(Annotated[FromAgent, Field(discriminator="kind")])


def encode(message: ToAgent | FromAgent) -> bytes:
    """The line of a message, newline included. Raises `MessageError` if it is too long."""
    line = json.dumps(asdict(message), separators=(",", ":")).encode() + b"\n"
    if len(line) > LINE_LIMIT:
        raise MessageError(f"a message of {len(line)} bytes exceeds {LINE_LIMIT}")
    return line


def decode_to_agent(line: bytes) -> ToAgent:
    """The message on a line of the supervisor's. Raises `MessageError`."""
    try:
        return _TO_AGENT.validate_json(line)
    except ValidationError as error:
        raise MessageError(f"not for an agent ({error.errors()[0]['type']})") from None


def decode_from_agent(line: bytes) -> FromAgent:
    """The message on a line of an agent's. Raises `MessageError`."""
    try:
        return _FROM_AGENT.validate_json(line)
    except ValidationError as error:
        raise MessageError(f"not from an agent ({error.errors()[0]['type']})") from None


def seal(secret: Secret, token: str) -> tuple[str, str]:
    """A token of 256 bits under a pad of its own, and the nonce by which `unseal` makes the pad.

    The pad is HMAC-SHA256 (RFC 2104) of a nonce that is never used again: without the secret it
    looks random, so a one-time pad.
    """
    nonce = new_nonce()
    return _under_pad(secret, token, nonce), nonce


def unseal(secret: Secret, sealed: tuple[str, str]) -> str:
    return _under_pad(secret, *sealed)


def _under_pad(secret: Secret, text: str, nonce: str) -> str:
    pad = hmac.new(secret.token.encode(), f"pad {nonce}".encode(), "sha256").digest()
    return bytes(a ^ b for a, b in zip(bytes.fromhex(text), pad, strict=True)).hex()
