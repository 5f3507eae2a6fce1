"""Messages of a link, and their one codec: a message is a JSON object on a line of its own.

The messages of ranks (`run.control.protocol`) and agents (`launchers.agents.messages`) are
dataclasses like these; a decoder is made for the messages that one side may send. Decoding is
strict: an unknown kind or field, a value of another type or out of bounds, and invalid JSON raise
`MessageError`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from kempner.run.process.exit_codes import StopReason

PROTOCOL = 6
"""Version of the protocol; both sides must have the same."""

LINE_LIMIT = 64 * 1024
"""Longest line in bytes, its newline included."""

RELAY_LIMIT = LINE_LIMIT + 256
"""The same for a line in which an agent relays a rank's message."""

OPENING_LIMIT = 2048
"""Longest line in bytes from a caller that has not proved that it knows the secret."""

WORDS_LIMIT = 4000
"""Longest sentence in characters."""

Natural = Annotated[int, Field(ge=0, le=2**53)]
Seconds = Annotated[float, Field(ge=0)]
Words = Annotated[str, Field(max_length=WORDS_LIMIT)]
Name = Annotated[str, Field(max_length=255)]
Nonce = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
Proof = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class MessageError(ValueError):
    """What was received, or should be sent, is not a message of this protocol."""


@dataclass(frozen=True)
class Message:
    """A message, or a part of one."""

    limit: ClassVar[int] = LINE_LIMIT

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False
    )

    def aged(self, seconds: float) -> Self:
        """The message as it reads `seconds` later."""
        return self


@dataclass(frozen=True)
class Post(Message):
    """A message that must not be lost: it is resent until its number is confirmed. Each process
    counts from 1."""

    number: Natural


class Role(StrEnum):
    SUPERVISOR = "supervisor"
    RANK = "rank"
    AGENT = "agent"
    GUEST = "agent of another job"
    SENDER = "sender of copies"
    KEEPER = "keeper of copies"


@dataclass(frozen=True)
class Joins(Message):
    """What an agent of another job offers: room for `ranks` ranks, for `seconds` (None: no limit).
    `job` is its Slurm id, empty outside of a job."""

    job: Name
    ranks: Natural
    seconds: Seconds | None


@dataclass(frozen=True)
class Caller(Message):
    """Part of `Hello`: who calls. A rank is number `member` of the ranks of attempt `group`, an
    agent task `member` of step `group`; `host` is its node."""

    role: Role
    group: Natural
    member: Natural
    host: Name
    pid: Natural
    joins: Joins | None = None


@dataclass(frozen=True)
class Challenge(Message):
    """Listener to a new connection: prove that you know the secret."""

    nonce: Nonce
    version: Natural = PROTOCOL
    kind: Literal["challenge"] = "challenge"


@dataclass(frozen=True)
class Hello(Message):
    """Caller to listener: who I am, and the proof that I may say so."""

    nonce: Nonce
    proof: Proof
    caller: Caller
    version: Natural = PROTOCOL
    kind: Literal["hello"] = "hello"


@dataclass(frozen=True)
class Welcome(Message):
    """Listener to caller: you are in, and here is the proof that I may say so."""

    proof: Proof
    kind: Literal["welcome"] = "welcome"


@dataclass(frozen=True)
class Noted(Message):
    """Listener to caller: every post up to this number has arrived."""

    number: Natural
    kind: Literal["noted"] = "noted"


@dataclass(frozen=True)
class Alive(Message):
    """Either side, every few seconds: I am here."""

    kind: Literal["alive"] = "alive"


def encode(message: Message) -> bytes:
    """The line of a message, newline included, without the fields that have their default. Raises
    `MessageError` if it is too long.

    A character without a UTF-8 form (a lone surrogate, as in undecodable file names) becomes a
    question mark.
    """
    text = json.dumps(_spell(message), ensure_ascii=False, separators=(",", ":"))
    line = text.encode("utf-8", "replace") + b"\n"
    if len(line) > message.limit:
        raise MessageError(f"a message of {len(line)} bytes exceeds {message.limit}")
    return line


def _spell(value: object) -> object:
    match value:
        case StopReason():
            return value.name
        case Path():
            return str(value)
        case dict():
            return {key: _spell(inner) for key, inner in value.items()}
        case tuple() | list():
            return list(map(_spell, value))
    if not is_dataclass(value):
        return value
    kind = type(value)  # of a message, or of a part of one
    defaults = _DEFAULTS.get(kind) or _DEFAULTS.setdefault(kind, _defaults(kind))
    values = ((name, getattr(value, name)) for name in defaults)
    return {name: _spell(inner) for name, inner in values if inner != defaults[name]}


_DEFAULTS: dict[type[Any], dict[str, object]] = {}


def _defaults(kind: type[Any]) -> dict[str, object]:
    """The default of each field, which is not sent; MISSING where the value is always sent."""
    found = dict[str, object]()
    for one in fields(kind):
        made = one.default if one.default_factory is MISSING else one.default_factory()
        found[one.name] = MISSING if one.name in ("kind", "version") else made
    return found


def decoder(kinds: Any) -> Callable[[bytes], Any]:
    """A decoder of lines to one of `kinds`, a union of messages or a single one; it raises
    `MessageError` for anything else."""
    one: Any = kinds if isinstance(kinds, type) else Annotated[kinds, Field(discriminator="kind")]
    adapter: TypeAdapter[Any] = TypeAdapter(one)

    def decode(line: bytes) -> Any:
        try:
            return adapter.validate_json(line)
        except ValidationError as error:
            # Only the kind of mistake: the line may hold anything, and this goes into logs.
            mistake = error.errors()[0]["type"]
            raise MessageError(f"not a message of this protocol ({mistake})") from None

    return decode


def shorten(words: str) -> str:
    """`words`, cut to the length that fits into a message."""
    return words if len(words) <= WORDS_LIMIT else words[: WORDS_LIMIT - 1] + "…"
