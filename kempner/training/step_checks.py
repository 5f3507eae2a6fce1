"""Checks of a run's steps for silent corruption, and how an attempt ends in which it is found.

Before each update the ranks tell each other whether their memory is as they left it, and whether
the loss is suspicious. At an interval, and where a loss is suspicious, the step is computed again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from kempner.checkpoint.format.manifest import TrainState
from kempner.checkpoint.manager import CheckpointEngine
from kempner.cluster.slurm.hostlist import node_name
from kempner.data.serve.loader import MicroBatch
from kempner.run.process.exit_codes import CorruptionError, PeersLostError
from kempner.run.process.retry import WaitStoppedError
from kempner.run.record.events import (
    CheckpointsCertified,
    CorruptionFound,
    LedgerEvent,
    NodeSuspected,
)
from kempner.training.compute.recomputation import Recomputation, StateChain
from kempner.training.compute.slot_gradient import SlotGradient
from kempner.training.corruption import (
    CorruptionVerdict,
    ReturnPlan,
    StepPart,
    judge_memory,
    plan_return,
)
from kempner.training.groups.process_groups import Ranks

ReadStep = Callable[[TrainState, int], Sequence[MicroBatch]]
"""The micro batches of a rank in the step that follows a train state, read anew."""


class CheckedRun(Protocol):
    """A loop whose steps are checked."""

    ranks: Ranks
    checkpoints: CheckpointEngine
    train_state: TrainState

    def record(self, event: LedgerEvent) -> None: ...


class StepChecks:
    """Checks every `interval`-th step, all up to the one that is `doubted`, and those asked for.
    `certified` is the step up to which the checkpoints of the live branch are certified, by what
    rank 0 knows. Every method is called on every rank, in the same order."""

    def __init__(
        self,
        gradient: SlotGradient,
        model: nn.Module,
        optimizer: Optimizer,
        ranks: Ranks,
        interval: int,
        read: ReadStep,
        certified: int,
        doubted: int,
    ) -> None:
        self.certified = self._recorded_up_to = certified
        self._passed: int | None = None
        self._doubted = doubted
        self._gradient, self._ranks, self._interval, self._read = gradient, ranks, interval, read
        self._chain = StateChain(model, optimizer)
        self.hosts: list[str] = [""] * ranks.world.size
        dist.all_gather_object(self.hosts, node_name(os.environ), group=ranks.votes)
        alone = ranks.world.on_one_node
        hop = ranks.broadcast(1 if alone else ranks.world.local_size)
        assert isinstance(hop, int)  # rank 0's, for all
        self._again = Recomputation(gradient, optimizer, ranks.votes, hop)
        self._chain.remember()

    def begin_again(self, step: int) -> None:
        """The state after an earlier `step` was loaded."""
        self._passed = None
        self.certified = self._recorded_up_to = min(self.certified, step)
        self._chain.forget()
        self._chain.remember()

    def gradient(self, micro_batches: Sequence[MicroBatch], step: int) -> Tensor:
        """As `SlotGradient.add`."""
        self._again.forget()
        witness = self._again.watch() if self._due(step) else None
        return self._gradient.add(micro_batches, step, witness)

    def _due(self, step: int) -> bool:
        return step % self._interval == 0 or step <= self._doubted

    def agree(self, step: int, doubtful: bool) -> tuple[CorruptionVerdict | None, bool]:
        """What is wrong with the memory of any rank, and whether the step is to be checked."""
        wanted = doubtful or self._due(step)
        broken, asked, noted = self._gather(self._chain.broken, wanted, self._chain.noted)
        return judge_memory(broken, noted, self._gradient.shards), any(asked)

    def check_gradient(self, before: TrainState) -> tuple[CorruptionVerdict | None, bool]:
        """The verdict on the gradient of the step after `before`, and whether it was computed
        again: not where a rank cannot read because it is to stop."""
        world, rank = self._ranks.world.size, self._ranks.world.rank
        partner = (rank - self._again.hop) % world
        first: Sequence[MicroBatch] | None = None
        with suppress(WaitStoppedError):
            first = self._read(before, partner)
        if any(self._gather(first is None)[0]):
            return None, False

        def read(part: int) -> Sequence[MicroBatch]:
            return first if first and part == partner else self._read(before, part)

        return self._again.check_gradient(before.step + 1, read), True

    def check_update(self, step: int, loss: Tensor, max_norm: float) -> CorruptionVerdict | None:
        """The verdict on the update of the step, after it."""
        verdict = self._again.check_update(loss, max_norm)
        if verdict is None:
            self._passed = step
        return verdict

    def remember(self) -> None:
        """Call after each update."""
        self._chain.remember()

    def certify(self, run: CheckedRun) -> None:
        """Note that memory is as it was left. If there is a checkpoint that was not certified
        before, say so on rank 0: all up to the last checked step are."""
        self.certified = max(self.certified, self._passed or 0)
        committed = run.checkpoints.committed_step
        if run.ranks.world.rank or committed is None:
            return
        if self._recorded_up_to < committed <= self.certified:
            self._recorded_up_to = self.certified
            run.checkpoints.pin_up_to(self.certified)
            run.record(CheckpointsCertified(self.certified))

    def certify_last(self, run: CheckedRun) -> None:
        """As `certify`, after the last commit of an attempt. Raises as `leave`."""
        verdict, _ = self.agree(run.train_state.step, doubtful=False)
        if verdict is not None:
            self.leave(run, verdict)
        self.certify(run)

    def leave(self, run: CheckedRun, verdict: CorruptionVerdict) -> NoReturn:
        """Make the last certified checkpoint the newest, say what was found, and end the attempt.
        Raises `CorruptionError` on the ranks that lie, or of which one does, and `PeersLostError`
        on all others."""
        agreed = run.ranks.broadcast(verdict)
        assert isinstance(agreed, CorruptionVerdict)  # rank 0's, for all
        run.checkpoints.forget_steps()
        run.checkpoints.join()
        plan = run.ranks.broadcast(plan_return(run.checkpoints.branch(), self.certified))
        assert isinstance(plan, ReturnPlan)  # rank 0 made it
        if plan.to is not None:
            run.checkpoints.go_on_from(plan.to)
        sentence = self._report(run, agreed, plan)
        lies = run.ranks.world.rank in agreed.ranks
        raise CorruptionError(sentence) if lies else PeersLostError(sentence)

    def _report(self, run: CheckedRun, verdict: CorruptionVerdict, plan: ReturnPlan) -> str:
        """Put the verdict into log and ledger; a sentence."""
        step = run.train_state.step + (verdict.part not in (StepPart.UPDATE, StepPart.REPLICA))
        sentence, hosts = verdict.sentence(step, self.hosts), self.hosts
        nodes = tuple(sorted({hosts[rank] for rank in verdict.ranks}))
        run.record(
            CorruptionFound(
                step, verdict.part, verdict.ranks, nodes, verdict.sure, plan.to, sentence
            )
        )
        one_of_many = len(nodes) == 1 < len(set(hosts))
        for node in nodes if verdict.sure or one_of_many else ():
            run.record(NodeSuspected(node, sentence))
        start = "the beginning" if plan.to is None else f"step {plan.to}"
        return f"{sentence}; the run goes back to {start}, since {plan.reason}"

    def _gather(self, *numbers: int) -> list[list[int]]:
        """Each number of all ranks."""
        own = torch.tensor(numbers, dtype=torch.int64)
        gathered = [torch.empty_like(own) for _ in range(self._ranks.world.size)]
        dist.all_gather(gathered, own, group=self._ranks.votes)
        by_number: list[list[int]] = torch.stack(gathered).T.tolist()
        return by_number
