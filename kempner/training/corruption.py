"""Which rank computes or remembers wrong bits, and which checkpoints are certified: pure functions
of fingerprints, and of the ledger.

Several ranks compute the same part of a step, which has the same bits everywhere. Parts are judged
in the order in which they follow from each other: what differs first is the cause of what differs
later.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kempner.run.record.events import (
    CheckpointsCertified,
    CorruptionFound,
    Resumed,
    RolledBack,
    StartedAnew,
)
from kempner.run.record.history import RunHistory


class StepPart(StrEnum):
    """A part of a step, in words; in causal order."""

    MEMORY = "weights or moments in memory between two steps"
    REPLICA = "copy of weights and moments"
    INPUTS = "tokens read"
    TOKENS = "number of valid tokens"
    SLOT = "loss or gradient of a slot"
    SUM = "sum of gradients that is sent"
    PORTION = "sum of gradients over replicas"
    GRADIENT = "reduced gradient"
    UPDATE = "update of weights and moments"


@dataclass(frozen=True)
class Claim:
    """The fingerprint `value` that rank `by` computed for the part of rank `of`."""

    part: StepPart
    of: int
    by: int
    value: int
    slot: int | None = None


@dataclass(frozen=True)
class CorruptionVerdict:
    """What is wrong in a step: the first `part` that differs, of a `slot` if it is of one, and the
    `ranks` that lie. If it is not `sure`, one of them does, or what all of them received."""

    part: StepPart
    ranks: tuple[int, ...]
    sure: bool
    slot: int | None = None

    def sentence(self, step: int, hosts: Sequence[str]) -> str:
        what = str(self.part)
        if self.slot is not None:
            what = f"{what.removesuffix(' of a slot')} of slot {self.slot}"
        named = " and ".join(f"rank {rank} on {hosts[rank]}" for rank in self.ranks[:4])
        more = f" and {len(self.ranks) - 4} more" if len(self.ranks) > 4 else ""
        who = f"of {named}{more}" if self.sure else f"of one of {named}{more}"
        return f"silent corruption in step {step}: the {what} {who} has wrong bits"


def judge(claims: Iterable[Claim], shards: int | None = None) -> CorruptionVerdict | None:
    """The verdict on a step; None if all who computed the same part agree.

    The value that most claims have is taken for the right one, if at least two have it and no other
    has as many; a rank that claims another one lies. A part that a rank alone has computed several
    times names that rank. It is not sure if all ranks would lie, or all of a replica, which are
    `shards` neighbours: then one of them may have sent the others something wrong.
    """
    by_part: defaultdict[StepPart, defaultdict[tuple[int, int | None], list[Claim]]]
    by_part = defaultdict(lambda: defaultdict(list))
    ranks = set[int]()
    for claim in claims:
        by_part[claim.part][claim.of, claim.slot].append(claim)
        ranks.add(claim.by)
    for part in StepPart:
        differing = {k: c for k, c in by_part[part].items() if len({one.value for one in c}) > 1}
        if differing:
            return _judge_part(part, differing, len(ranks), shards or len(ranks))
    return None


def _judge_part(
    part: StepPart,
    differing: Mapping[tuple[int, int | None], Sequence[Claim]],
    world: int,
    shards: int,
) -> CorruptionVerdict:
    liars, candidates, known = set[int](), set[int](), True
    for claims in differing.values():
        lie = _liars(claims)
        known = known and lie is not None
        liars |= lie or set()
        candidates |= {claim.by for claim in claims}
    slots = {slot for _, slot in differing}
    slot = slots.pop() if len(slots) == 1 else None
    alike = {world, shards} - {1}
    groups = [range(at, at + size) for size in alike for at in range(0, world, size)]
    sure = known and not any(liars.issuperset(group) for group in groups)
    return CorruptionVerdict(part, tuple(sorted(liars if known else candidates)), sure, slot)


def _liars(claims: Sequence[Claim]) -> set[int] | None:
    """Who lies about a part of a step; None if that cannot be told."""
    if len(ranks := {claim.by for claim in claims}) == 1:
        return ranks
    (value, first), (_, second) = Counter(claim.value for claim in claims).most_common(2)
    if first == second:
        return None
    return {claim.by for claim in claims if claim.value != value}


def judge_memory(
    broken: Sequence[int], noted: Sequence[int], shards: int
) -> CorruptionVerdict | None:
    """The verdict where some ranks find other bits in their memory than they have left there, or
    have `noted` another hash of them than their replicas."""
    ranks = tuple(rank for rank, one in enumerate(broken) if one)
    if ranks:
        return CorruptionVerdict(StepPart.MEMORY, ranks, sure=True)
    hashes = enumerate(noted)
    claims = (Claim(StepPart.REPLICA, rank % shards, rank, value) for rank, value in hashes)
    return judge(claims, shards)


@dataclass(frozen=True)
class ReturnPlan:
    """The checkpoint to go back `to`, None to begin anew, and why."""

    to: int | None
    reason: str


def plan_return(committed: Sequence[int], certified: int) -> ReturnPlan:
    """Go back to the newest checkpoint that is `certified`, which all up to that step are; if there
    is none, to the oldest. `committed` are the steps of the live branch, ascending."""
    if not committed:
        return ReturnPlan(None, "there is no checkpoint yet")
    if good := [step for step in committed if step <= certified]:
        return ReturnPlan(good[-1], "it is the newest that is certified")
    return ReturnPlan(committed[0], "none is certified, and it is the oldest")


def certified_step(history: RunHistory) -> int:
    """The step up to which the checkpoints of the live branch are certified; 0 if none is. What is
    made again after a resume from an earlier step is not."""
    certified = 0
    kinds = CheckpointsCertified, CorruptionFound, RolledBack, Resumed, StartedAnew
    for event in history.events(*kinds):
        if isinstance(event, CheckpointsCertified):
            certified = event.step
        elif isinstance(event, StartedAnew):
            certified = 0
        elif isinstance(event, Resumed):
            certified = min(certified, event.step)
        elif isinstance(event, CorruptionFound | RolledBack):
            certified = min(certified, event.to or 0)
    return certified


def doubted_step(history: RunHistory) -> int:
    """The step up to which every one is to be checked: the last one in which something was wrong,
    if it is not known whose it was; else 0."""
    found = history.events(CorruptionFound)
    return found[-1].step if found and not found[-1].sure else 0
