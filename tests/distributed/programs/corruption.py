"""Ranks of a test whose bits flip: many faults after each other, and what is found of each.

Usage: corruption.py OUT WORLD_PER_NODE FAULTS, where FAULTS is a JSON list. Rank 0 writes OUT.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.append(str(Path(__file__).parent))
from any_world import built, config, micro_batches

from kempner.checkpoint.tensors.state import local_part
from kempner.model.spec.communication import Choice
from kempner.model.spec.mesh import MeshDegrees
from kempner.model.spec.slot_tree import SubtreeSums
from kempner.training.bit_flips import BitFlip, flip
from kempner.training.compute import slot_exchange
from kempner.training.compute.optimizer import build_optimizer, update
from kempner.training.compute.recomputation import Recomputation, StateChain
from kempner.training.corruption import CorruptionVerdict, judge_memory

RATE, NORM = 1e-2, 0.5
HERE = ("reduced", "added", "update")
"""Where bits are flipped by this program itself: `reduced` is the gradient after the exchange,
`added` what a rank adds up for its replicas, `update` what a step makes."""


@dataclass(frozen=True)
class PlantedFault:
    """Bits that flip from a `step` on, on some ranks. Steps are checked every `interval`."""

    where: str
    bit: int
    element: int
    sticking: bool
    ranks: tuple[int, ...]
    step: int
    interval: int


@dataclass(frozen=True)
class Outcome:
    """The step in which a fault was found, None if it was not, what was said, and whether a bit of
    a result was another one."""

    fault: PlantedFault | None
    found: int | None
    verdict: CorruptionVerdict | None
    changed: bool


class Training:
    """A model that is put back after each fault."""

    def __init__(self, per_node: int, replicas: int, sizes: dict[str, Any], optimizer: str) -> None:
        asked = config({**sizes, "dropout": 0.1}, optimizer={"name": optimizer, "lr": RATE})
        world = dist.get_world_size()
        choice = Choice(reduce_once=True)
        self.model, self.gradient = built(asked, MeshDegrees(replicas, world // replicas), choice)
        self.optimizer = build_optimizer(self.model, asked.optimizer, any_shard=True)
        self.chain = StateChain(self.model, self.optimizer)
        votes = dist.new_group(backend="gloo")
        hop = per_node if per_node < world else 1
        self.checks = Recomputation(self.gradient, self.optimizer, votes, hop)
        self.votes = votes
        self._step(1, None, check=False)
        self.saved = [tensor.clone() for tensor in self.state()]

    def state(self) -> list[Tensor]:
        moments = (s for state in self.optimizer.state.values() for s in state.values())
        return [local_part(tensor) for tensor in (*self.model.parameters(), *moments)]

    def put_back(self) -> None:
        for tensor, saved in zip(self.state(), self.saved, strict=True):
            tensor.copy_(saved)
        self.model.zero_grad()
        self.chain.remember()

    def _step(self, step: int, flips: BitFlip | None, check: bool) -> CorruptionVerdict | None:
        world, rank = dist.get_world_size(), dist.get_rank()
        where = "" if flips is None else flips.where
        if flips is not None and where not in HERE:
            flips.plant(self.model, self.optimizer)
        witness = self.checks.watch() if check else None
        with wrong_sums(flips) if flips is not None and where == "added" else nullcontext():
            loss = self.gradient.add(micro_batches(step, rank, world, 1), step, witness)
        if flips is not None and where == "reduced":
            gradient = self._of(flips.element).grad
            assert gradient is not None
            flip(local_part(gradient), flips.bit, flips.element)
        memory = [(False, 0)] * world
        own = self.chain.broken, self.chain.noted
        dist.all_gather_object(memory, own, group=self.votes)
        broken, noted = zip(*memory, strict=True)
        verdict = judge_memory(broken, noted, self.gradient.shards)
        if check and verdict is None:
            verdict = self.checks.check_gradient(
                step, lambda part: micro_batches(step, part, world, 1)
            )
        if verdict is not None:
            return verdict
        update(self.model, self.optimizer, loss, RATE, NORM, any_shard=True)
        if flips is not None and where == "update":
            flip(local_part(self._of(flips.element)), flips.bit, flips.element)
        if check:
            verdict = self.checks.check_update(loss, NORM)
        self.chain.remember()
        return verdict

    def _of(self, element: int) -> Tensor:
        """A parameter of which this rank has rows."""
        held = [p for p in self.gradient.trained if local_part(p).numel()]
        return held[element % len(held)]

    def outcome(self, fault: PlantedFault, last: int) -> Outcome:
        """After a verdict that is not sure the run goes back, and every step is checked."""
        found, verdict = self._found(fault, last, fault.interval)
        if verdict is not None and not verdict.sure and fault.sticking:
            _, verdict = self._found(fault, last, every=1)
        changed = found is not None or self._changes(fault, last)
        return Outcome(fault, found, verdict, changed)

    def _found(
        self, fault: PlantedFault, last: int, every: int
    ) -> tuple[int | None, CorruptionVerdict | None]:
        self.put_back()
        flips, found, verdict = _flips(fault), None, None
        for step in range(2, last + 1):
            due = step == fault.step or (fault.sticking and step > fault.step)
            if verdict := self._step(step, flips if due else None, check=step % every == 0):
                found = step
                break
        if flips is not None:
            flips.remove()
        self.put_back()
        return found, verdict

    def _changes(self, fault: PlantedFault, last: int) -> bool:
        """Whether the last state differs from a sound one: then the fault has had an effect."""
        chain, self.chain = self.chain, StateChain(self.model, self.optimizer)
        flips = _flips(fault)
        for step in range(2, last + 1):
            due = step == fault.step or (fault.sticking and step > fault.step)
            self.chain.forget()
            self._step(step, flips if due else None, check=False)
        if flips is not None:
            flips.remove()
        self.chain = chain
        differs = [False] * dist.get_world_size()
        own = any(
            not torch.equal(a, b) for a, b in zip(self.state(), self.sound(last), strict=True)
        )
        dist.all_gather_object(differs, own, group=self.votes)
        return any(differs)

    def sound(self, last: int) -> list[Tensor]:
        """The state after the last step without a fault."""
        if not hasattr(self, "_sound"):
            now = [tensor.clone() for tensor in self.state()]
            self.put_back()
            for step in range(2, last + 1):
                assert self._step(step, None, check=False) is None
            self._sound = [tensor.clone() for tensor in self.state()]
            for tensor, was in zip(self.state(), now, strict=True):
                tensor.copy_(was)
        return self._sound


@contextmanager
def wrong_sums(flips: BitFlip) -> Iterator[None]:
    """What this rank adds up for its replicas, of each group of parameters, has a bit flipped."""
    real = slot_exchange.exchanged

    def exchanged(*given: Any) -> SubtreeSums[Tensor]:
        sums = real(*given)
        flip(sums.values[0], flips.bit, flips.element)
        return sums

    with patch.object(slot_exchange, "exchanged", exchanged):
        yield


def _flips(fault: PlantedFault) -> BitFlip | None:
    """Those of this rank, if it has any."""
    rank = dist.get_rank()
    if rank not in fault.ranks:
        return None
    return BitFlip(fault.where, fault.bit, fault.sticking, fault.element + rank)


def outcomes(
    per_node: int, replicas: int, faults: Sequence[PlantedFault], last: int
) -> list[Outcome]:
    sizes = {"dim": 24, "n_layers": 2, "n_heads": 3, "ffn_dim": 20}
    training = Training(per_node, replicas, sizes, "adamw")
    training.sound(last)  # on all ranks together
    return [training.outcome(fault, last) for fault in faults]


def sound_steps(per_node: int, part: int, steps: int) -> list[Outcome]:
    """Steps without a fault, each checked, with samples that follow from the part; what was found
    all the same."""
    training = Training(per_node, 1, {"dim": 8, "n_layers": 1, "n_heads": 1, "ffn_dim": 8}, "adamw")
    found = []
    first = 2 + part * steps
    for step in range(first, first + steps):
        if verdict := training._step(step, None, check=True):
            found.append(Outcome(None, step, verdict, changed=False))
    return found


def main(out: Path, per_node: int, asked: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if "steps" in asked:
        found = sound_steps(per_node, asked["first"], asked["steps"])
    else:
        faults = [PlantedFault(**{**f, "ranks": tuple(f["ranks"])}) for f in asked["faults"]]
        found = outcomes(per_node, asked["replicas"], faults, asked["last"])
    if dist.get_rank() == 0:
        out.write_text(json.dumps([asdict(each) for each in found]))
    print(f"rank {dist.get_rank()} has seen it all", flush=True)
    dist.barrier()
    os._exit(0)  # as every rank of kempner: see sharded_gradients.py


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
