"""The life of an attempt as a table: which state follows which, and until when each may last.

Pure: the caller, which follows an attempt, passes what has happened, and when; this has no effects.

What is known of how an attempt ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from typing import Final

from kempner.run.process.signals import ReceivedSignal
from kempner.run.process.stop_reason import StopReason
from kempner.run.record.events import StopRequested
from kempner.supervisor.policy.outcome import ReportedLoop
from kempner.supervisor.policy.stop import StandingStop


class AttemptState(StrEnum):
    """What an attempt is in."""

    LAUNCHING = "launching"
    """The ranks are being started, and none has connected yet."""
    JOINING = "joining"
    """Some ranks have connected, but not all."""
    RUNNING = "running"
    """All ranks have connected."""
    STOPPING = "stopping"
    """The ranks were asked to commit and leave."""
    FAILING = "failing"
    """A rank failed: the others, asked to stop or not, are given a moment to leave."""
    COLLECTING_EVIDENCE = "collecting evidence"
    """Nothing moves: the ranks and their nodes say what they see, before they are killed."""
    KILLING = "killing"
    """Time is up: whatever is left is killed."""
    ABANDONED = "abandoned"
    """A rank cannot be killed, and is left behind: it is stuck in the kernel, or its node is gone.
    """
    ENDED = "ended"
    """No rank is left."""


class Trigger(StrEnum):
    """What moves an attempt from one state to another."""

    RANK_JOINED = "a rank joined"
    ALL_JOINED = "all have joined"
    STOP_REQUESTED = "a stop was asked for"
    RANK_FAILED = "a rank failed"
    HANG_FOUND = "nothing moves"
    OUTSTAYED = "all have said how they end, and a process stays"
    TIME_UP = "time is up"
    ALL_ENDED = "all have ended"


class Deadline(StrEnum):
    """What an attempt may not outstay; what happens then."""

    RECONNECT = "reconnect"
    """A rank whose connection broke off counts as gone."""
    JOIN = "join"
    """A rank that never connected counts as gone."""
    STOP = "stop"
    """The ranks, asked to stop, are killed."""
    CRASH = "crash"
    """The ranks that outlived another are killed."""
    EVIDENCE = "evidence"
    """The ranks that hang are killed."""
    ABANDON = "abandon"
    """The ranks that were killed, and are still there, are left behind."""


STAYS: Final = None
"""In the table: what happens is of no account in this state."""

_S, _T, _D = AttemptState, Trigger, Deadline
_COLLECTING = AttemptState.COLLECTING_EVIDENCE

_COLUMNS = (
    _T.RANK_JOINED, _T.ALL_JOINED,
    _T.STOP_REQUESTED, _T.RANK_FAILED, _T.HANG_FOUND, _T.OUTSTAYED, _T.TIME_UP, _T.ALL_ENDED,
)  # fmt: skip

# A stop or a failure has a deadline of its own: from then on standing still is no hang. A hang that
# was found goes first: neither a stop nor a failure keeps its evidence from being collected.
_ROWS: Mapping[AttemptState, tuple[AttemptState | None, ...]] = {
    _S.LAUNCHING: (_S.JOINING, _S.RUNNING, _S.STOPPING, _S.FAILING, _COLLECTING,
                   _S.KILLING, STAYS,        _S.ENDED),
    _S.JOINING:   (STAYS,      _S.RUNNING, _S.STOPPING, _S.FAILING, _COLLECTING,
                   _S.KILLING, STAYS,        _S.ENDED),
    _S.RUNNING:   (STAYS,      STAYS,      _S.STOPPING, _S.FAILING, _COLLECTING,
                   _S.KILLING, STAYS,        _S.ENDED),
    _S.STOPPING:  (STAYS,      STAYS,      STAYS,       _S.FAILING, STAYS,
                   _S.KILLING, _S.KILLING,   _S.ENDED),
    _S.FAILING:   (STAYS,      STAYS,      STAYS,       STAYS,      STAYS,
                   _S.KILLING, _S.KILLING,   _S.ENDED),
    _COLLECTING:  (STAYS,      STAYS,      STAYS,       STAYS,      STAYS,
                   _S.KILLING, _S.KILLING,   _S.ENDED),
    _S.KILLING:   (STAYS,      STAYS,      STAYS,       STAYS,      STAYS,
                   STAYS,      _S.ABANDONED, _S.ENDED),
    _S.ABANDONED: (STAYS,) * 8,
    _S.ENDED:     (STAYS,) * 8,
}  # fmt: skip

TRANSITIONS: Mapping[tuple[AttemptState, Trigger], AttemptState | None] = {
    (state, trigger): to
    for state, row in _ROWS.items()
    for trigger, to in zip(_COLUMNS, row, strict=True)
}
"""For every state, where whatever may happen leads to."""

DEADLINES: Mapping[AttemptState, frozenset[Deadline]] = {
    _S.LAUNCHING: frozenset({_D.RECONNECT}),
    _S.JOINING: frozenset({_D.RECONNECT, _D.JOIN}),
    _S.RUNNING: frozenset({_D.RECONNECT}),
    _S.STOPPING: frozenset({_D.RECONNECT, _D.JOIN, _D.STOP}),
    _S.FAILING: frozenset({_D.RECONNECT, _D.JOIN, _D.STOP, _D.CRASH}),
    _S.COLLECTING_EVIDENCE: frozenset({_D.RECONNECT, _D.JOIN, _D.STOP, _D.CRASH, _D.EVIDENCE}),
    _S.KILLING: frozenset({_D.RECONNECT, _D.JOIN, _D.ABANDON}),
    _S.ABANDONED: frozenset(),
    _S.ENDED: frozenset(),
}
"""The deadlines that hold in each state."""

BEGINS: Mapping[Trigger, Deadline] = {
    _T.STOP_REQUESTED: _D.STOP,
    _T.RANK_FAILED: _D.CRASH,
    _T.HANG_FOUND: _D.EVIDENCE,
    _T.OUTSTAYED: _D.ABANDON,
    _T.TIME_UP: _D.ABANDON,
}
"""What begins a deadline after which all that is left is killed, and at last left behind."""

OVER: Final = frozenset({AttemptState.ABANDONED, AttemptState.ENDED})
"""The states after which nothing is left to follow."""


def next_state(state: AttemptState, trigger: Trigger) -> AttemptState:
    """The state after `trigger`: the same where the table says that it stays."""
    return TRANSITIONS[state, trigger] or state


@dataclass(frozen=True)
class AttemptLife:
    """An attempt is in `state` since `since`, and its time is up at `until`; seconds of one clock.

    `graces` has the seconds of each deadline in `BEGINS`. The earliest of those that were begun
    counts: a stop gives a rank that has to leave because of another rank no more time, and vice
    versa. The deadline after the kill is separate.
    """

    graces: Mapping[Deadline, float]
    state: AttemptState
    since: float
    until: float = inf

    def after(self, trigger: Trigger, now: float, within: float = inf) -> AttemptLife:
        """What it is after something has happened that allows for `within` seconds at most.

        The same trigger again may bring the end nearer, and never puts it off.
        """
        state = next_state(self.state, trigger)
        begun, until = BEGINS.get(trigger), self.until
        if begun in DEADLINES[state]:
            grace = min(self.graces[begun], within)
            # A rank that is killed now gets that time, whatever deadline was begun before.
            killed_now = begun is Deadline.ABANDON and state is not self.state
            until = now + grace if killed_now else min(until, now + grace)
        since = self.since if state is self.state else now
        return replace(self, state=state, since=since, until=until)

    def holds(self, deadline: Deadline) -> bool:
        """Whether the deadline holds in this state."""
        return deadline in DEADLINES[self.state]

    @property
    def over(self) -> bool:
        """Whether nothing is left to follow."""
        return self.state in OVER


@dataclass
class StopSoFar:
    """What is known of a stop, and of the end of a program's own `loop`.

    `standing` is what the ranks were told, None until they are asked to stop; `said` is why they
    stop by their own words. `unrecorded` is what the ledger does not tell yet, and since when.
    `by_user` is whether a person asked for it: then no signal is a warning of Slurm's.
    """

    signals: list[ReceivedSignal] = field(default_factory=list)
    standing: StandingStop | None = None
    said: StopReason = StopReason.NONE
    unrecorded: tuple[StopRequested, float] | None = None
    loop: ReportedLoop = ReportedLoop.UNKNOWN
    by_user: bool = False

    @property
    def reason(self) -> StopReason:
        """Why the ranks were asked to stop, or said that they do; NONE if there was no request."""
        if self.standing is None:
            return StopReason.NONE
        if self.standing.reason is StopReason.PEER_STOPPED and self.said:
            return self.said  # they know why that one was asked
        return max(self.standing.reason, self.said)
