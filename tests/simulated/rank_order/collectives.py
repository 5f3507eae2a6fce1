"""`torch.distributed` between the threads of one process: it blocks until all ranks have called.

The n-th call of a rank on a group meets the n-th calls of the others. All must be the same: the
same collective, with the same arguments, from the same place in kempner, told by the functions
that are on the stack. Whatever else meets is a violation, even if the numbers would fit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from simulated.rank_order.scheduler import Scheduler, Task

REDUCE: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.SUM: torch.add,
}


@dataclass
class Meeting:
    """One collective of all ranks; what each has brought."""

    group: str
    call: tuple[Any, ...]
    came: dict[int, Any] = field(default_factory=dict)
    waiting: list[Task] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{_in_words(self.call)} on `{self.group}`"


class Group:
    """One process group: which ranks have come to which meeting."""

    def __init__(self, world: Fabric, name: str) -> None:
        self.fabric, self.name, self.size = world, name, world.size
        self._meetings: list[Meeting] = []
        self._next = [0] * world.size
        self.members = [Member(self, rank) for rank in range(world.size)]

    def join(self, kind: str, brought: Any, *arguments: Any) -> Meeting:
        """Come to the next meeting of this rank; a violation if the others hold another one."""
        scheduler = self.fabric.scheduler
        call = (kind, *arguments, *_place())
        scheduler.pause()
        rank = scheduler.rank
        number = self._next[rank]
        self._next[rank] += 1
        if number == len(self._meetings):
            self._meetings.append(Meeting(self.name, call))
        meeting = self._meetings[number]
        if meeting.call != call:
            scheduler.violate(
                f"mismatch: rank {rank} comes to {_in_words(call)}, while rank "
                f"{min(meeting.came)} is in {meeting}"
            )
        meeting.came[rank] = brought
        self.fabric.met += len(meeting.came) == self.size
        scheduler.wake(meeting.waiting)
        meeting.waiting.clear()
        return meeting

    def wait(self, meeting: Meeting, for_rank: int | None = None) -> None:
        """Until all have come, or that rank has."""
        scheduler = self.fabric.scheduler
        while len(meeting.came) < self.size if for_rank is None else for_rank not in meeting.came:
            meeting.waiting.append(scheduler.current)
            scheduler.wait(meeting)


@dataclass(frozen=True)
class Member:
    """What a rank holds in its hands as its process group."""

    group: Group
    rank: int


class Fabric:
    """All groups of a world. Where `eager`, who only sends does not wait for those who receive."""

    def __init__(self, scheduler: Scheduler, size: int) -> None:
        self.scheduler, self.size = scheduler, size
        self.eager = scheduler.random.random() < 0.5
        self.met = 0
        """Collectives to which all ranks came."""
        self.groups = {name: Group(self, name) for name in ("train", "votes", "saves")}
        self.store = Store(self)


class Store:
    """The rendezvous: keys that ranks set and wait for."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._keys: set[str] = set()
        self._waiting: list[Task] = []

    def set(self, key: str, value: str) -> None:
        self._fabric.scheduler.pause()
        self._keys.add(key)
        self._fabric.scheduler.wake(self._waiting)
        self._waiting.clear()

    def wait(self, keys: list[str], timeout: object) -> None:
        while not self._keys.issuperset(keys):
            self._waiting.append(self._fabric.scheduler.current)
            self._fabric.scheduler.wait("the store")


class _Work:
    """An all-reduce under way."""

    def __init__(self, group: Group, meeting: Meeting, tensor: Tensor, op: Any) -> None:
        self._group, self._meeting, self._tensor, self._op = group, meeting, tensor, op

    def wait(self) -> None:
        self._group.fabric.scheduler.pause()
        self._group.wait(self._meeting)
        result, *others = (self._meeting.came[rank] for rank in range(self._group.size))
        for other in others:
            result = REDUCE[self._op](result, other)
        self._tensor.copy_(result)


class Distributed:
    """The functions of `torch.distributed` that kempner's loop, vote and saves call."""

    def __init__(self) -> None:
        self.fabric: Fabric | None = None

    def _group(self, member: Member | None) -> Group:
        assert self.fabric is not None
        if member is None:
            return self.fabric.groups["train"]
        assert member.rank == self.fabric.scheduler.rank, "a group of another rank"
        return member.group

    def get_rank(self, group: Member | None = None) -> int:
        return self._group(group).fabric.scheduler.rank

    def get_world_size(self, group: Member | None = None) -> int:
        return self._group(group).size

    def all_reduce(
        self,
        tensor: Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Member | None = None,
        async_op: bool = False,
    ) -> _Work | None:
        found = self._group(group)
        meeting = found.join("all_reduce", tensor.clone(), op, tensor.shape, tensor.dtype)
        work = _Work(found, meeting, tensor, op)
        if async_op:
            return work
        work.wait()
        return None

    def broadcast(self, tensor: Tensor, group: Member, group_src: int) -> None:
        told = self._tell("broadcast", tensor.clone(), group, group_src, tensor.shape, tensor.dtype)
        tensor.copy_(told)

    def broadcast_object_list(self, box: list[Any], group: Member, group_src: int) -> None:
        box[:] = self._tell("broadcast_object_list", list(box), group, group_src, len(box))

    def _tell(self, kind: str, brought: Any, member: Member, source: int, *arguments: Any) -> Any:
        group = self._group(member)
        meeting = group.join(kind, brought, source, *arguments)
        sends = member.rank == source
        group.wait(meeting, for_rank=source if group.fabric.eager or not sends else None)
        return meeting.came[source]

    def gather(
        self,
        tensor: Tensor,
        gathered: list[Tensor] | None = None,
        *,
        group: Member,
        group_dst: int,
    ) -> None:
        found = self._group(group)
        meeting = found.join("gather", tensor.clone(), group_dst, tensor.shape, tensor.dtype)
        if gathered is None and found.fabric.eager:
            return
        found.wait(meeting)
        for rank, into in enumerate(gathered or ()):
            into.copy_(meeting.came[rank])

    def all_gather_object(self, gathered: list[Any], mine: object, group: Member) -> None:
        found = self._group(group)
        meeting = found.join("all_gather_object", mine)
        found.wait(meeting)
        gathered[:] = [meeting.came[rank] for rank in range(found.size)]

    def barrier(self, group: Member) -> None:
        found = self._group(group)
        found.wait(found.join("barrier", None))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While it is open, these are `torch.distributed`'s."""
        names = [name for name in vars(Distributed) if not name.startswith("_")]
        with ExitStack() as stack:
            for name in names:
                if name != "installed":
                    stack.enter_context(patch.object(dist, name, getattr(self, name)))
            yield


def _place() -> tuple[Any, ...]:
    """The functions on the stack, outwards from the one that calls a collective."""
    place: list[Any] = []
    frame: FrameType | None = sys._getframe(3)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_serve":
            break
        place.append(code)
        frame = frame.f_back
    return tuple(place)


def _in_words(call: tuple[Any, ...]) -> str:
    kind, *rest = call
    functions = [c.co_name for c in rest if hasattr(c, "co_name")]
    plain = [str(argument) for argument in rest if not hasattr(argument, "co_name")]
    ours = [name for name in functions if not name.startswith("<")]
    return f"{kind}({', '.join(plain)}) in {' < '.join(ours[:6])}"
