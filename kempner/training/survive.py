"""`survive`: lets your own training loop stop, save and resume.

    for step in survive(model, optimizer, steps=1000, save_every=50):
        ...

Iterating resumes from the newest checkpoint, votes in every step, saves, and stops all ranks after
the same step. Under `kempner supervise -- COMMAND` the ranks also report to the supervisor.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from kempner.checkpoint.format.manifest import Identity, Origin
from kempner.checkpoint.format.train_state import TrainState
from kempner.checkpoint.manager import CheckpointManager
from kempner.checkpoint.store.retention import Keep
from kempner.checkpoint.tensors.context import CheckpointContext
from kempner.config.sections import CheckpointSection, DistributedSection, SuperviseSection
from kempner.run.control.launch_env import Launch, LaunchTerms
from kempner.run.control.protocol import Phase
from kempner.run.process import logs
from kempner.run.process.exit_codes import ExitCode, RunError
from kempner.run.process.logs import logger, open_log
from kempner.run.record.attempts import Attempt, Fence
from kempner.run.record.events.base import LedgerEvent
from kempner.run.record.history import RunHistory
from kempner.run.record.run_dir import RunDirectory
from kempner.training.build import host_facts, versions
from kempner.training.compute.seeds import set_rng
from kempner.training.groups.process_groups import Ranks, adopt
from kempner.training.main import agree_on_attempt, classify
from kempner.training.rank_link.rank_link import RankLink, join
from kempner.training.rank_link.shutdown import ShutdownHandler
from kempner.training.vote.final_save import finish, refuse_to_go_on_unsaved
from kempner.training.vote.vote import Vote, VoteGroup, VoteResult


def survive(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    steps: int,
    save_every: int,
    keep_last: int = CheckpointSection().keep_last,
    seed: int = 0,
    run_dir: str | Path | None = None,
) -> Survivor:
    """Iterate over this instead of `range(1, steps + 1)`: it yields the steps not done yet.

    Call it once on every rank, after `init_process_group`, when `model` and `optimizer` are final;
    both are loaded from the newest checkpoint, if there is one. A checkpoint is saved every
    `save_every` steps, and the last `keep_last` are kept. Each step begins with torch's generators
    seeded by `seed`, the step and the rank, so that a resumed step draws the same numbers.

    `run_dir` is the run directory; by default the supervisor's, or else `runs/<script>`.

    After a stop the state is committed, and iterating raises `SystemExit` with 75. Raises
    `UsageError`, `DataError` or `CheckpointWriteError` with a sentence, which is printed without a
    traceback.
    """
    logs.configure()
    shutdown = ShutdownHandler()
    shutdown.install()
    launch = Launch.from_environment(os.environ)
    told = launch.terms if launch is not None else None
    run = RunDirectory(Path(run_dir or (told.run if told else _beside(sys.argv[0]))))
    rank_link = join(run, _as_told(told), shutdown)
    last_words = _LastWords(rank_link)
    rank_link.progress.enter(Phase.LOAD)
    device = next(model.parameters()).device
    ranks = adopt(rank_link.world, device, timedelta(seconds=DistributedSection().timeout))
    shutdown.join_group(told.stop_grace if told else None, rank_link.tell_of_signal)
    attempt = agree_on_attempt(run, ranks, rank_link.launch)
    open_log(run.log(attempt.number, ranks.world.rank), attempt=attempt.number)
    if isinstance(model, DistributedDataParallel):
        model = model.module
    checkpoints = _open_checkpoints(
        run, model, optimizer, ranks, rank_link, attempt, seed, keep_last
    )
    todo = Todo(steps, save_every, seed)
    survivor = Survivor(todo, rank_link, attempt, ranks, shutdown, checkpoints, last_words)
    optimizer.register_step_pre_hook(lambda *_: checkpoints.release_staging())
    return survivor


@dataclass(frozen=True)
class Todo:
    """What a loop is to do: so many `steps`, with a save every `save_every` of them."""

    steps: int
    save_every: int
    seed: int


class Survivor:
    """The steps of a loop, to be iterated over once, on every rank."""

    def __init__(
        self,
        todo: Todo,
        rank_link: RankLink,
        attempt: Attempt,
        ranks: Ranks,
        shutdown: ShutdownHandler,
        checkpoints: CheckpointManager,
        last_words: _LastWords,
    ) -> None:
        self._todo, self._rank_link, self._attempt = todo, rank_link, attempt
        self._last_words, self._progress = last_words, rank_link.progress
        self.ranks, self.shutdown, self.checkpoints = ranks, shutdown, checkpoints
        self.vote_group = VoteGroup(ranks.votes)
        self.train_state = checkpoints.restore() or TrainState()
        """How many steps are done."""
        self.suspicious = False
        """Always False: only the loop itself could judge its losses."""

    def __iter__(self) -> Iterator[int]:
        self._progress.step = self.train_state.step
        self._progress.enter(Phase.COMPILE)
        if self.train_state.step:
            self._say(f"resumed at step {self.train_state.step}")
        logger().info("ready", step=self.train_state.step, pid=os.getpid())
        agreed = VoteResult()
        while self.train_state.step < self._todo.steps and not agreed.stop:
            step = self.train_state.step + 1
            ballot = self.vote_group.open(self.vote())
            set_rng(self._todo.seed, step, 0, self.ranks.world.rank)
            yield step
            with self._progress.waiting("the vote"):
                agreed = ballot.close()
            self.train_state = replace(self.train_state, step=step, cursor=step)
            self._progress.made(step)
            if self._save_is_due(agreed):
                with self._progress.during(Phase.SAVE):
                    self.checkpoints.save(self.train_state)
        self._leave(agreed)

    def vote(self) -> Vote:
        """This rank's vote at this moment."""
        self.checkpoints.poll()
        return Vote(
            stop=self.shutdown.reason(),
            failed_saves=self.checkpoints.settled_failures,
            seconds_left=self.shutdown.seconds_left(),
        )

    def record(self, event: LedgerEvent) -> None:
        """Record an event in the run's ledger."""
        self._rank_link.record(self._attempt, event)

    def _save_is_due(self, agreed: VoteResult) -> bool:
        refuse_to_go_on_unsaved(agreed, CheckpointSection().max_failures)
        step = self.train_state.step
        due = step % self._todo.save_every == 0 or agreed.failed_saves == 1
        return due and step < self._todo.steps and not agreed.stop

    def _leave(self, agreed: VoteResult) -> None:
        self._progress.phase = Phase.SAVE
        code, words = finish(self, agreed)
        self._say(words)
        self._progress.phase = Phase.EXIT
        self.ranks.final_barrier()
        self._last_words.code = code
        if code is not ExitCode.COMPLETED:
            raise SystemExit(int(code))

    def _say(self, words: str) -> None:
        if self.ranks.world.rank == 0:
            print(words, flush=True)


class _LastWords:
    """Tells the supervisor how this process ends: at its exit, or with the exception that ends it.

    At once in the latter case: an interpreter that goes down waits for threads, and those may wait
    for ranks that wait for this one.
    """

    def __init__(self, rank_link: RankLink) -> None:
        self.code: ExitCode | None = None
        """How the loop ended, if it did; without that the exit status says more."""
        self._rank_link, self._earlier_hook = rank_link, sys.excepthook
        sys.excepthook = self._hook
        atexit.register(self._say)

    def _say(self) -> None:
        if self.code is not None:
            self._rank_link.leave(self.code, "")

    def _hook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self.code = None
        if isinstance(error, RunError):
            print(f"kempner: {error}", file=sys.stderr, flush=True)
            self._rank_link.report_unfit_node(error)
            self._rank_link.leave(error.code, str(error))
            return
        self._earlier_hook(kind, error, trace)
        self._rank_link.leave(classify(error, self._rank_link), f"{kind.__name__}: {error}")


def _as_told(terms: LaunchTerms | None) -> SuperviseSection:
    """The supervisor's patience; without one nobody waits for anybody."""
    if terms is None:
        return SuperviseSection()
    return SuperviseSection(
        supervisor_timeout=terms.supervisor_timeout, stop_grace=terms.stop_grace
    )


def _beside(script: str) -> Path:
    """The default run directory: as `kempner supervise` would name it."""
    return Path("runs") / (Path(script).stem or "run")


def _open_checkpoints(
    run: RunDirectory,
    model: nn.Module,
    optimizer: Optimizer,
    ranks: Ranks,
    rank_link: RankLink,
    attempt: Attempt,
    seed: int,
    keep_last: int,
) -> CheckpointManager:
    history = RunHistory.read(run.ledger) if ranks.world.rank == 0 else RunHistory()
    identity = Identity(
        world=ranks.world.size,
        mesh={"ranks": ranks.world.size},
        seed=seed,
        data_fingerprint="",
        model={},
        optimizer=type(optimizer).__name__.lower(),
        origin=Origin(host=host_facts(ranks.device), versions=versions()),
    )
    context = CheckpointContext(
        path=run.checkpoints,
        identity=identity,
        fence=Fence(run.attempts, attempt),
        group=ranks.saves,
        record=partial(rank_link.record, attempt),
        waiting=rank_link.progress.waiting,
    )
    return CheckpointManager(
        context, model, optimizer, keep=Keep(keep_last), durations=history.durations
    )
