"""The messages between a rank and its supervisor (`run.link`), and those in which the rank's agent
relays them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field, JsonValue

from kempner.run.link.messages import (
    RELAY_LIMIT,
    Alive,
    Message,
    Name,
    Natural,
    Noted,
    Post,
    Seconds,
    Words,
    decoder,
)
from kempner.run.process.collectives import NONE_UNDER_WAY, CollectivesUnderWay
from kempner.run.process.exit_codes import StopReason


def _by_name(given: object) -> StopReason:
    if isinstance(given, StopReason):
        return given
    named = StopReason.__members__.get(given) if isinstance(given, str) else None
    if named:
        return named
    raise ValueError("this is no reason to stop")


Reason = Annotated[StopReason, BeforeValidator(_by_name)]


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
class Moves(Message):
    """Part of `Report`: signs of life besides steps, counted from the start of the process.

    `tries` counts retries of storage, `stacks` how often the main thread of a user's own program
    was found elsewhere than at the look before, or at work in native code.
    """

    tries: Natural = 0
    stacks: Natural = 0


@dataclass(frozen=True)
class Report(Message):
    """Rank to supervisor, about once a second: the last completed step, and the current phase.

    `worked` and `waited` are the seconds that the process spent on its own work, and waiting for
    other ranks, until the end of that step, without evaluations and saves. `waiting` is what it
    waits for others in now, such as a collective; empty if it does not.

    `storage` is the file that it cannot read or write now, and why; empty if there is none. For a
    user's own program `line` is its position in the code, and `collectives` are those that it has
    begun, if it stands still in one.
    """

    step: Natural
    phase: Phase
    worked: Seconds
    waited: Seconds
    waiting: Name = ""
    storage: Words = ""
    moves: Moves = Moves()
    line: Name = ""
    collectives: CollectivesUnderWay = field(default_factory=lambda: NONE_UNDER_WAY)
    kind: Literal["progress"] = "progress"


@dataclass(frozen=True)
class NodeMemory(Message):
    """Part of `Usage`, in bytes: `available` of `total` is free on the node, or in the control
    group that limits the job there.

    `group` is the folder of that group, empty if there is none; `oom_kills` counts its processes
    that the OOM killer killed.
    """

    available: Natural
    total: Natural
    group: Words = ""
    oom_kills: Natural = 0


@dataclass(frozen=True)
class Usage(Message):
    """Rank to supervisor, now and then: memory and files that it uses, and what is left. Bytes."""

    rss: Natural
    children: Natural
    children_rss: Natural
    files: Natural
    files_limit: Natural
    memory: NodeMemory
    kind: Literal["usage"] = "usage"


@dataclass(frozen=True)
class Event(Post):
    """Rank to supervisor: a line for the ledger, by name and fields of its `LedgerEvent`."""

    name: Name
    fields: dict[str, JsonValue]
    kind: Literal["event"] = "event"


@dataclass(frozen=True)
class Outcome(Post):
    """Rank to supervisor: how the rank ends. `code` is the exit status that follows."""

    code: Annotated[int, Field(ge=0, le=255)]
    sentence: Words
    kind: Literal["outcome"] = "outcome"


@dataclass(frozen=True)
class Stop(Message):
    """Supervisor to rank: commit and leave, within `seconds_left` if there is a deadline.

    `reason` is encoded as its name; `sentence` may say more.
    """

    reason: Reason
    sentence: Words = ""
    seconds_left: Seconds | None = None
    kind: Literal["stop"] = "stop"

    def aged(self, seconds: float) -> Stop:
        """The message with the time left after `seconds`."""
        if self.seconds_left is None:
            return self
        return replace(self, seconds_left=max(0.0, self.seconds_left - seconds))


@dataclass(frozen=True)
class PeerLost(Message):
    """Supervisor to rank: a rank that you depend on is gone; `words` say how it ended."""

    rank: Natural
    words: Words
    kind: Literal["peer_lost"] = "peer_lost"


@dataclass(frozen=True)
class DumpStacks(Message):
    """Supervisor to rank: write the stacks of all your threads to the attempt's folder."""

    kind: Literal["dump_stacks"] = "dump_stacks"


FromRank: TypeAlias = Report | Usage | Event | Outcome
FromSupervisor: TypeAlias = Noted | Stop | PeerLost | DumpStacks | Alive

decode_from_rank: Callable[[bytes], FromRank] = decoder(FromRank)
decode_from_supervisor: Callable[[bytes], FromSupervisor] = decoder(FromSupervisor)
"""Both raise `MessageError`."""


@dataclass(frozen=True)
class Connected(Message):
    """A rank has connected, for the first time or again."""

    rank: Natural
    host: Name
    pid: Natural
    kind: Literal["connected"] = "connected"


@dataclass(frozen=True)
class Disconnected(Message):
    """A rank's connection is over. It may come back.

    `hung_up` says that the rank's side closed it, as when the process ends; a network fault does
    not.
    """

    rank: Natural
    reason: Words
    hung_up: bool = False
    kind: Literal["disconnected"] = "disconnected"


@dataclass(frozen=True)
class RankMessage(Message):
    """A rank's message that must not be lost."""

    rank: Natural
    message: Annotated[Event | Outcome, Field(discriminator="kind")]
    kind: Literal["said"] = "said"


News: TypeAlias = Connected | Disconnected | RankMessage


@dataclass(frozen=True)
class RankNews(Message):
    """Agent to supervisor: news of a rank of an attempt. After a broken connection, ranks repeat
    all that was not confirmed."""

    limit: ClassVar[int] = RELAY_LIMIT

    attempt: Natural
    news: Annotated[News, Field(discriminator="kind")]
    kind: Literal["news"] = "news"


@dataclass(frozen=True)
class SummedReports(Message):
    """Agent to supervisor, about once a second: the last report of each of its ranks, by rank."""

    attempt: Natural
    reports: dict[Natural, Report]
    usage: dict[Natural, Usage]
    kind: Literal["reports"] = "reports"


@dataclass(frozen=True)
class TellRanks(Message):
    """Supervisor to agent: pass this on to a rank of an attempt, or to all (None)."""

    attempt: Natural
    message: Annotated[FromSupervisor, Field(discriminator="kind")]
    rank: Natural | None = None
    kind: Literal["tell"] = "tell"

    @property
    def stands(self) -> bool:
        """Whether ranks that connect later get it, too."""
        return self.rank is None and isinstance(self.message, Stop | PeerLost)

    def aged(self, seconds: float) -> TellRanks:
        """The message with the time left after `seconds`."""
        return replace(self, message=self.message.aged(seconds))
