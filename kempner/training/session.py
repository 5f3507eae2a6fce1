"""A program's place in its run, whatever its training loop: found, claimed, reported and left."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import NoReturn

import torch

from kempner.checkpoint.context import CheckpointContext
from kempner.checkpoint.format.manifest import Identity, Origin
from kempner.cluster.machine.rlimits import raise_open_file_limit
from kempner.config.resilience import ResilienceSection
from kempner.config.sections import SuperviseSection
from kempner.config.site.network import DistributedSection
from kempner.run.control.heartbeat import Progress
from kempner.run.control.launch_env import Launch, LaunchTerms
from kempner.run.control.protocol import Phase
from kempner.run.output import logs
from kempner.run.output.console import protect, say
from kempner.run.output.logs import logger, open_log
from kempner.run.process.exit_codes import ExitCode, RunError, UsageError
from kempner.run.process.retry import storage_waits
from kempner.run.process.worker_process import heed_for_children
from kempner.run.record.attempts import Fence
from kempner.run.record.events.attempt import RankReady
from kempner.run.record.events.base import LedgerEvent
from kempner.run.record.history import RunHistory
from kempner.run.record.identity import RunIdentity, accepted_names
from kempner.run.record.run_dir import RunDirectory
from kempner.run.record.save_times import Durations
from kempner.training.build import host_facts, read_history, versions
from kempner.training.compute.seeds import set_rng
from kempner.training.groups.process_groups import Ranks, adopt
from kempner.training.last_words import LastWords
from kempner.training.main import Ownership, take_run
from kempner.training.rank_link.rank_link import RankLink, join
from kempner.training.rank_link.shutdown import ShutdownHandler
from kempner.training.recognition import Standing, recognise


class Entry:
    """On the way into a run: this process traps the stop signals, and the supervisor knows of it.

    `name` is what the user calls, for messages. At a prompt the signals are left alone until
    `Session.trap_signals`. `run_dir` is the run directory; by default the supervisor's, or else
    `runs/<script>`. `accept_changes` names differences to the run as it was that are not to be
    refused. What follows, `meet` among it, belongs into `guard`.
    """

    def __init__(
        self, name: str, run_dir: str | Path | None, accept_changes: Collection[str] = ()
    ) -> None:
        protect()
        logs.configure()
        self._accepted = accepted_names(accept_changes, os.environ)
        self._shutdown = ShutdownHandler(at_prompt())
        self._session: Session | None = None
        if not at_prompt():
            self._shutdown.install()
            heed_for_children(True)
        with self.guard():
            launch = Launch.from_environment(os.environ)
            self._terms = launch.terms if launch is not None else None
            by_default = self._terms.run if self._terms else None
            run = RunDirectory(Path(run_dir or by_default or _beside(name, sys.argv[0])))
            self._section = _as_told(self._terms)
            self.rank_link = join(run, self._section, self._shutdown)
            self._last_words = LastWords(self.rank_link)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """If this ends with an exception, let go of the signals and of the run."""
        try:
            yield
        except BaseException:
            self._shutdown.uninstall()
            heed_for_children(False)
            if self._session is not None:
                self._session.release()
            raise

    def meet(
        self,
        device: torch.device,
        agree_on: Mapping[str, object],
        facts: Mapping[str, object] | None = None,
    ) -> Session:
        """Join the other ranks, who must all know the same to `agree_on`, and take the run.

        `facts` are what the result depends on (rank 0's count): they are kept with the run, and
        compared with those of its start before. Of "steps" more may be asked for than before.

        Raises `UsageError`, on all ranks alike, where the ranks differ, somebody else owns the run,
        or it is the run of another program or of other facts.
        """
        link, shutdown, terms = self.rank_link, self._shutdown, self._terms
        link.progress.enter(Phase.LOAD)
        raise_open_file_limit()
        network = terms.network if terms else "{}"
        section = DistributedSection.model_validate_json(network)
        ranks = adopt(link.world, device, section)
        shutdown.join_group(terms.stop_grace if terms else None, link.tell_of_signal)
        patience = terms.patience if terms else ResilienceSection().patience
        storage_waits().configure(patience, shutdown.should_shutdown)
        with link.progress.waiting("what the others are to do"):
            ranks.agree_on(agree_on)
        ownership = take_run(link.run, ranks, link.launch, self._section)
        session = Session(link, ownership, ranks, shutdown, self._last_words)
        self._session = session
        session.standing = recognise(link.run, ranks, facts or {}, self._accepted)
        attempt = ownership.attempt
        storage_waits().tell_to(partial(link.tell_of_wait, attempt))
        open_log(link.run.log(attempt.number, ranks.world.rank), attempt=attempt.number)
        return session


class Session:
    """A rank's place in its run. When the loop is over, `end` and `give_back` must follow."""

    def __init__(
        self,
        rank_link: RankLink,
        ownership: Ownership,
        ranks: Ranks,
        shutdown: ShutdownHandler,
        last_words: LastWords,
    ) -> None:
        self._rank_link, self._ownership = rank_link, ownership
        self._last_words = last_words
        self.ranks, self.shutdown = ranks, shutdown
        self.standing = Standing(None, RunIdentity())
        """What the run was before, and is now."""

    @property
    def recorded_facts(self) -> Mapping[str, object]:
        """The facts that the start before gave to `meet`; empty where there was none."""
        return self.standing.recorded_facts

    @cached_property
    def durations(self) -> Durations:
        """How long the saves of this run took; rank 0 knows."""
        return self._history.durations

    @cached_property
    def _history(self) -> RunHistory:
        if self.ranks.world.rank != 0:
            return RunHistory()
        return read_history(self._rank_link.run, self._ownership.attempt)

    def context(self, optimizer: str | None, seed: int | None) -> CheckpointContext:
        """Of the checkpoints of this run, which are made with `optimizer` and `seed`."""
        attempt, ranks, link = self._ownership.attempt, self.ranks, self._rank_link
        identity = Identity(
            world=ranks.world.size,
            mesh={"ranks": ranks.world.size},
            seed=seed,
            data_fingerprint="",
            model={},
            optimizer=optimizer,
            origin=Origin(host=host_facts(ranks.device), versions=versions()),
        )
        return CheckpointContext(
            path=link.run.checkpoints,
            identity=identity,
            fence=Fence(link.run.attempts, attempt),
            group=ranks.saves,
            record=partial(link.record, attempt),
            waiting=self.progress.waiting,
            known=self._history.last_step,
            local_ranks=ranks.world.local_size,
        )

    def tell_ready(self, step: int) -> None:
        """Say that training goes on from `step`.

        Raises `UsageError`, on all ranks alike, if nothing is left to do of what was another run.
        """
        self.standing.refuse_if_complete(self._rank_link.run, step)
        if self.ranks.world.rank == 0:
            self.standing.keep(self._rank_link.run)
        self.progress.step = step
        self.progress.enter(Phase.COMPILE)
        if step:
            self.say(f"resumed at step {step}")
        self.record(RankReady(step, str(self.ranks.device), dict(self.progress.reached)))
        logger().info("ready", step=step, pid=os.getpid())

    def seed_step(self, seed: int, step: int) -> None:
        """Seed torch's generators by step and rank."""
        set_rng(seed, step, 0, self.ranks.world.rank)

    def end(self, code: ExitCode, words: str) -> None:
        """Part from the other ranks; the supervisor hears of `code` when this process exits."""
        self.say(words)
        self.progress.phase = Phase.EXIT
        self.ranks.final_barrier()
        self._last_words.code = code

    def give_back(self, code: ExitCode | None) -> None:
        """Let go of the run and of what this process shares with whatever it does next.

        `code` is how the loop has ended; None if by an exception.
        """
        self.release()
        # Whom the supervisor stops has nothing left to do, and is not to die of a signal now.
        if code is None or code is ExitCode.COMPLETED or self._rank_link.launch is None:
            self.shutdown.uninstall()
            heed_for_children(False)

    def release(self) -> None:
        """Let go of the run: whoever starts it next need not wait."""
        self._ownership.release()

    def end_with(self, error: RunError) -> NoReturn:
        """End this process with its sentence and its code, at once."""
        self._last_words.end_with(error)

    @property
    def run(self) -> RunDirectory:
        """Where its files are."""
        return self._rank_link.run

    def trap_signals(self) -> None:
        """From now on the stop signals come here."""
        self.shutdown.install()
        heed_for_children(True)

    @property
    def progress(self) -> Progress:
        """What the supervisor hears of this rank."""
        return self._rank_link.progress

    def record(self, event: LedgerEvent) -> None:
        """Record an event in the run's ledger."""
        self._rank_link.record(self._ownership.attempt, event)

    def say(self, words: str) -> None:
        """Tell the user, once."""
        if self.ranks.world.rank == 0:
            say(words)


def at_prompt() -> bool:
    """Whether somebody types at this process, in a notebook, IPython or Python's own prompt."""
    return hasattr(sys, "ps1")


def _as_told(terms: LaunchTerms | None) -> SuperviseSection:
    """The supervisor's patience; without one nobody waits for anybody."""
    if terms is None:
        return SuperviseSection()
    return SuperviseSection(
        supervisor_timeout=terms.supervisor_timeout, stop_grace=terms.stop_grace
    )


def _beside(name: str, script: str) -> Path:
    """The default run directory: as `kempner supervise` would name it.

    Raises `UsageError` without a script: another notebook's run would be taken for this one's.
    """
    stem = Path(script).stem
    if at_prompt() or stem in ("", "-c", "-"):
        raise UsageError(
            f'{name}(): there is no script to name the run after; add run_dir="runs/NAME"'
        )
    return Path("runs") / stem
