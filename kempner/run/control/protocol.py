"""The control protocol: messages between a rank and its supervisor, encoded and decoded.

A message is one JSON object on one line, of at most `LINE_LIMIT` bytes. The supervisor speaks first
(`Challenge`), the rank proves that it knows the attempt's token (`Hello`), the supervisor proves
the same (`Welcome`); the token itself is never sent. The proofs are HMAC-SHA256 (RFC 2104) over
both sides' nonces, so that none can be used twice.

Decoding is strict: an unknown kind or field, a value of another type or out of bounds, and anything
that is no JSON raise `MessageError`.
"""

from __future__ import annotations

import hmac
import json
import secrets
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Annotated, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from kempner.run.process.stop_reason import StopReason

PROTOCOL = 4
"""Version of all of this; both sides must speak the same."""

LINE_LIMIT = 64 * 1024
"""Longest line in bytes, its newline included."""

OPENING_LIMIT = 2048
"""Longest line in bytes from a peer that has not proved that it knows the token."""

WORDS_LIMIT = 4000
"""Longest sentence in characters."""

Natural = Annotated[int, Field(ge=0, le=2**53)]
Seconds = Annotated[float, Field(ge=0)]
Words = Annotated[str, Field(max_length=WORDS_LIMIT)]
Name = Annotated[str, Field(max_length=255)]
Nonce = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
Proof = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


def _by_name(given: object) -> StopReason:
    if isinstance(given, StopReason):
        return given
    named = StopReason.__members__.get(given) if isinstance(given, str) else None
    if named:
        return named
    raise ValueError("this is no reason to stop")


Reason = Annotated[StopReason, BeforeValidator(_by_name)]


class MessageError(ValueError):
    """What came, or was to be sent, is not a message of this protocol."""


class Phase(StrEnum):
    """What a rank is doing."""

    START = "start"
    RENDEZVOUS = "rendezvous"
    LOAD = "load"
    COMPILE = "compile"
    STEP = "step"
    EVAL = "eval"
    SAVE = "save"
    EXIT = "exit"


@dataclass(frozen=True)
class _Message:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False
    )


@dataclass(frozen=True)
class Hello(_Message):
    """Rank to supervisor: who I am, and the proof that I may say so."""

    nonce: Nonce
    proof: Proof
    attempt: Natural
    rank: Natural
    host: Name
    pid: Natural
    version: Natural = PROTOCOL
    kind: Literal["hello"] = "hello"


@dataclass(frozen=True)
class Moves(_Message):
    """Part of `Report`: signs of life besides steps, counted from the start of the process.

    `tries` counts how often storage was tried again, `stacks` how often the main thread of a user's
    own program was found elsewhere than by the look before.
    """

    tries: Natural = 0
    stacks: Natural = 0


@dataclass(frozen=True)
class Report(_Message):
    """Rank to supervisor, about once a second: the last step done, and the phase under way.

    `worked` and `waited` are seconds from the start of the process to the end of that step, without
    those in evaluations and saves; `waited` is what it spent waiting for other ranks. `waiting` is
    what it waits for others in at this moment: a collective, say; empty if it does not.
    `storage` is the file that it cannot read or write now, and why, empty if there is none.
    """

    step: Natural
    phase: Phase
    worked: Seconds
    waited: Seconds
    waiting: Name = ""
    storage: Words = ""
    moves: Moves = Moves()
    kind: Literal["progress"] = "progress"


@dataclass(frozen=True)
class NodeMemory(_Message):
    """Part of `Usage`. Bytes: `available` of `total` is what the node has left, or the control
    group that limits the job there.

    `group` is the folder of that group, empty if there is none; `oom_kills` counts the processes in
    it that were killed for want of memory.
    """

    available: Natural
    total: Natural
    group: Words = ""
    oom_kills: Natural = 0


@dataclass(frozen=True)
class Usage(_Message):
    """Rank to supervisor, now and then: what it uses of its node, and what is left. Bytes."""

    rss: Natural
    children: Natural
    children_rss: Natural
    files: Natural
    files_limit: Natural
    memory: NodeMemory
    kind: Literal["usage"] = "usage"


@dataclass(frozen=True)
class Event(_Message):
    """Rank to supervisor: a line for the ledger, by the name and the fields of its `LedgerEvent`.

    `number` counts what must not be lost, from 1.
    """

    number: Natural
    name: Name
    fields: dict[str, JsonValue]
    kind: Literal["event"] = "event"


@dataclass(frozen=True)
class Outcome(_Message):
    """Rank to supervisor: its last words. `code` is the exit status that follows."""

    number: Natural
    code: Annotated[int, Field(ge=0, le=255)]
    sentence: Words
    kind: Literal["outcome"] = "outcome"


@dataclass(frozen=True)
class Challenge(_Message):
    """Supervisor to a new connection: prove that you know the token."""

    nonce: Nonce
    version: Natural = PROTOCOL
    kind: Literal["challenge"] = "challenge"


@dataclass(frozen=True)
class Welcome(_Message):
    """Supervisor to rank: you are in, and here is the proof that I may say so."""

    proof: Proof
    kind: Literal["welcome"] = "welcome"


@dataclass(frozen=True)
class Noted(_Message):
    """Supervisor to rank: everything up to this number has arrived."""

    number: Natural
    kind: Literal["noted"] = "noted"


@dataclass(frozen=True)
class Stop(_Message):
    """Supervisor to rank: commit and leave, within `seconds_left` if there is a deadline.

    `reason` travels by its name; `sentence` says more where there is more to say.
    """

    reason: Reason
    sentence: Words = ""
    seconds_left: Seconds | None = None
    kind: Literal["stop"] = "stop"


@dataclass(frozen=True)
class PeerLost(_Message):
    """Supervisor to rank: a rank you depend on is gone; `words` say how."""

    rank: Natural
    words: Words
    kind: Literal["peer_lost"] = "peer_lost"


@dataclass(frozen=True)
class DumpStacks(_Message):
    """Supervisor to rank: write the stacks of all your threads to the attempt's folder."""

    kind: Literal["dump_stacks"] = "dump_stacks"


@dataclass(frozen=True)
class Alive(_Message):
    """Supervisor to rank, every few seconds: I am here."""

    kind: Literal["alive"] = "alive"


FromRank: TypeAlias = Hello | Report | Usage | Event | Outcome
FromSupervisor: TypeAlias = Challenge | Welcome | Noted | Stop | PeerLost | DumpStacks | Alive

_FROM_RANK: TypeAdapter[FromRank] = TypeAdapter(Annotated[FromRank, Field(discriminator="kind")])
_FROM_SUPERVISOR: TypeAdapter[FromSupervisor] = TypeAdapter(
    Annotated[FromSupervisor, Field(discriminator="kind")]
)
T = TypeVar("T")


def encode(message: FromRank | FromSupervisor) -> bytes:
    """The line of a message, newline included. Raises `MessageError` if it is too long.

    A character that has no UTF-8 form (half of a surrogate pair, as in the name of a file that is
    no text) becomes a question mark.
    """
    fields = asdict(message, dict_factory=_spelt)
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    line = text.encode("utf-8", "replace") + b"\n"
    if len(line) > LINE_LIMIT:
        raise MessageError(f"a message of {len(line)} bytes exceeds {LINE_LIMIT}")
    return line


def _spelt(fields: list[tuple[str, object]]) -> dict[str, object]:
    return {k: v.name if isinstance(v, StopReason) else v for k, v in fields}


def decode_from_rank(line: bytes) -> FromRank:
    """The message on a line that a rank sent. Raises `MessageError`."""
    return _decode(_FROM_RANK, line)


def decode_from_supervisor(line: bytes) -> FromSupervisor:
    """The message on a line that a supervisor sent. Raises `MessageError`."""
    return _decode(_FROM_SUPERVISOR, line)


def _decode(adapter: TypeAdapter[T], line: bytes) -> T:
    try:
        return adapter.validate_json(line)
    except ValidationError as error:
        # The kind of mistake only: what came may be anything, and this goes into logs.
        raise MessageError(
            f"not a message of this protocol ({error.errors()[0]['type']})"
        ) from None


def shorten(words: str) -> str:
    """`words` as they fit into a message."""
    return words if len(words) <= WORDS_LIMIT else words[: WORDS_LIMIT - 1] + "…"


class Lines:
    """Cuts a stream of bytes into lines, and holds back what has no newline yet."""

    def __init__(self, limit: int = LINE_LIMIT) -> None:
        self.limit = limit
        """Longest line in bytes, its newline included; may be raised between two `feed`s."""
        self._rest = b""

    def feed(self, received: bytes) -> list[bytes]:
        """The lines that are complete now, without their newlines.

        Raises `MessageError` as soon as a line is longer than the limit, complete or not.
        """
        *lines, self._rest = (self._rest + received).split(b"\n")
        if max(map(len, [*lines, self._rest])) >= self.limit:
            raise MessageError(f"a line exceeds {self.limit} bytes")
        return lines


@dataclass(frozen=True)
class Secret:
    """The token of one attempt, which only its supervisor and its ranks know.

    It travels in the environment of the ranks, which only the same user can read, and nowhere else.
    """

    token: str = field(repr=False)

    @classmethod
    def new(cls) -> Secret:
        """A fresh one of 256 random bits."""
        return cls(secrets.token_hex(32))

    def proof_of_rank(self, challenge: str, nonce: str, attempt: int, rank: int) -> str:
        """What a rank answers to a challenge."""
        return self._sign("rank", challenge, nonce, attempt, rank)

    def proof_of_supervisor(self, challenge: str, nonce: str) -> str:
        """What the supervisor answers to a rank's nonce."""
        return self._sign("supervisor", challenge, nonce)

    def _sign(self, *statement: object) -> str:
        return hmac.new(self.token.encode(), json.dumps(statement).encode(), "sha256").hexdigest()


def new_nonce() -> str:
    """128 random bits that no proof was ever made for."""
    return secrets.token_hex(16)


def same_proof(one: str, other: str) -> bool:
    """Whether two proofs are equal, in a time that does not depend on where they differ."""
    return hmac.compare_digest(one, other)
