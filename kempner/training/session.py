"""A program's session in a run, whatever its training loop: finds, claims and leaves the run.

Rank 0 checks whether the run belongs to this program, and all ranks get the result:

    standing = recognise(folder, ranks, this_program(ranks, facts), ...)  # refused or told
    standing.refuse_if_complete(step)  # when the newest checkpoint is loaded
    standing.keep(run)  # the next start is compared with this one
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NoReturn

import torch
from torch.optim import Optimizer

from kempner.checkpoint.context import CheckpointContext
from kempner.checkpoint.format.manifest import Identity, Origin
from kempner.cluster.machine import raise_open_file_limit
from kempner.config.resilience import ResilienceSection
from kempner.config.sections import SuperviseSection
from kempner.config.site import DistributedSection
from kempner.run.control.heartbeat import Progress
from kempner.run.control.launch_env import Launch, LaunchTerms
from kempner.run.control.protocol import Phase
from kempner.run.control.rehearsal import place_of
from kempner.run.control.trackers import begin_next_loop, note_mlflow_run
from kempner.run.output.console import protect
from kempner.run.output.logs import logger, open_log
from kempner.run.process.exit_codes import DataError, ExitCode, RunError, UsageError
from kempner.run.process.retry import storage_waits
from kempner.run.process.worker_process import heed_for_children
from kempner.run.record.attempts import Fence
from kempner.run.record.events import CheckpointCommitted, LedgerEvent, RankReady, Resumed
from kempner.run.record.history import RunHistory
from kempner.run.record.identity import (
    OUTPUT_DIR,
    Consequence,
    Difference,
    RunIdentity,
    accepted_names,
    compare,
    describe_refusal,
    plain,
    read_identity,
    write_identity,
)
from kempner.run.record.lease import Holder
from kempner.run.record.program import files_of_process, identity_of_process, keep_copies, relative
from kempner.run.record.run_dir import RunDirectory
from kempner.run.record.save_times import Durations
from kempner.training.build import host_facts, read_history, versions
from kempner.training.compute.forward_backward import set_rng
from kempner.training.groups.process_groups import Ranks, adopt
from kempner.training.homes import LOOPS, Home, LastWords, SupervisedProcess
from kempner.training.main import Ownership
from kempner.training.rank_link.rank_link import RankLink, join
from kempner.training.rank_link.shutdown import StopListener

_ANOTHER_RUN = "give it another run_dir"


@dataclass(frozen=True)
class RunComparison:
    """The identity of the run in `folder` at its last start (None: a new run, or one without a
    record), its identity now, and the differences; the same on all ranks."""

    folder: RunDirectory
    before: RunIdentity | None
    now: RunIdentity
    differences: tuple[Difference, ...] = field(default=())

    def refuse_if_complete(self, step: int) -> None:
        """Raise `DataError` if the run is complete at `step` and differs in accepted facts: these
        change how a run continues, which a complete one does not."""
        accepted = [each for each in self.differences if each.verdict is Consequence.ACCEPTED]
        steps = self.now.facts.get("steps")
        if accepted and isinstance(steps, int) and step >= steps:
            changes = "; ".join(each.sentence for each in accepted)
            raise DataError(
                f"the run in {self.folder.path} is complete at step {step}, and is not this "
                f"program's result: {changes}; ask for more steps, or {_ANOTHER_RUN}"
            )

    def keep(self, run: RunDirectory) -> None:
        """Store this identity for the next start, and copies of the program; on rank 0."""
        keep_copies(run, files_of_process(sys.argv, sys.modules, Path.cwd()))
        now = self.now if self.before is None else self.now.after(self.before)
        write = partial(write_identity, self.folder, now)
        try:
            storage_waits().retry(write, path=self.folder.identity)
        except OSError as error:  # the next start is then compared with an older identity
            logger().warning("cannot keep what the run is", error=str(error))


def recognise(
    folder: RunDirectory,
    ranks: Ranks,
    program: RunIdentity,
    accepted: Collection[str],
    launched_as_before: bool,
) -> RunComparison:
    """Compare this program with the one that the run belongs to, and print the differences.
    `launched_as_before`: a supervisor has compared its command. Raises `DataError`, on all ranks,
    if the result would be another program's."""
    standing = RunComparison(folder, None, program)
    if ranks.world.rank == 0:
        before = storage_waits().retry(partial(read_identity, folder), path=folder.identity)
        if before is not None and launched_as_before:
            program = replace(program, launched=before.launched)
            standing = RunComparison(folder, None, program)
        # Without a checkpoint the run starts over, whatever was tried before.
        if before is not None and any(folder.checkpoints.glob("step-*")):
            found = compare(before, program, accepted)
            standing = RunComparison(folder, before, program, tuple(found))
    agreed = ranks.broadcast(standing)
    assert isinstance(agreed, RunComparison)  # rank 0 made one
    if refusal := describe_refusal(agreed.differences, folder.path, _ANOTHER_RUN):
        raise DataError(refusal)
    for each in agreed.differences:
        accepted_first = "accepted: " if each.verdict is Consequence.ACCEPTED else ""
        ranks.say(f"{accepted_first}{each.sentence}")
    return agreed


_HOW = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
"""Keys of an optimizer's groups that are no settings, or do not affect the result."""


def describe_optimizer(optimizer: Optimizer) -> dict[str, object]:
    """An optimizer as a fact of a run: its class, and the sorted settings of its groups."""
    groups = [
        {name: value for name, value in group.items() if name not in _HOW and _is_setting(value)}
        | {"parameters": sum(parameter.numel() for parameter in group["params"])}
        for group in optimizer.param_groups
    ]
    ordered = sorted(groups, key=lambda group: json.dumps(group, sort_keys=True))
    return {"class": type(optimizer).__name__, "groups": ordered}


def _is_setting(value: object) -> bool:
    parts = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(part, int | float | str | None) for part in parts)


def this_program(ranks: Ranks, facts: Mapping[str, object]) -> RunIdentity:
    """The identity of this process's program, with the `facts` of its loop; on rank 0 with its
    files."""
    plain_facts = {name: plain(value) for name, value in facts.items()}
    if ranks.world.rank != 0:
        return RunIdentity(facts=plain_facts)
    return replace(
        identity_of_process(sys.argv, sys.modules, os.environ, Path.cwd()),
        facts=plain_facts,
        surroundings={"ranks": ranks.world.size, "host": platform.node(), **versions()},
        claimed_by=asdict(Holder.here(0.0)),
    )


class RunEntry:
    """Enters a run: traps the stop signals, and connects to the supervisor.

    `name` is the function that the user calls, for messages. At a prompt the signals are not
    trapped before `Session.trap_signals`. `run_dir` is the run directory; by default the
    supervisor's, or else `runs/<script>`, or one beside that if it is another command's. The second
    loop of a process without a `run_dir` uses `loops/2` of that, and so on. `accept_changes` names
    differences to the last start to accept. A given `listener` is in charge of the signals. An
    `output_dir`, a trainer's output folder, is part of the run's identity. All that follows,
    including `meet`, belongs in `guard`.
    """

    def __init__(
        self,
        name: str,
        run_dir: str | Path | None,
        accept_changes: Collection[str] = (),
        listener: StopListener | None = None,
        output_dir: str | Path | None = None,
    ) -> None:
        protect()
        self._accepted = accepted_names(accept_changes, os.environ)
        self._named, self._output_dir = place_of(run_dir) if run_dir else None, output_dir
        self._session: Session | None = None
        entered = LOOPS.supervised
        self._shutdown = entered.shutdown if entered else listener or StopListener(at_prompt())
        self._traps = listener is None
        if self._traps and not at_prompt():
            self._shutdown.install()
            heed_for_children(True)
        with self.guard():
            self._entered = entered or self._enter(name)
            self.rank_link = self._entered.rank_link

    def _enter(self, name: str) -> SupervisedProcess:
        launch = Launch.from_environment(os.environ)
        terms = launch.terms if launch is not None else None
        usual = (
            terms.run if terms is not None else self._named or place_of(_usual(name, sys.argv[0]))
        )
        link = join(RunDirectory(usual), _supervisor_timeouts(terms), self._shutdown)
        entered = SupervisedProcess(link, self._shutdown, LastWords(link), terms)
        if launch is not None:
            LOOPS.supervised = entered
        return entered

    @contextmanager
    def guard(self) -> Iterator[None]:
        """If the block raises, release the signals and the run."""
        try:
            yield
        except BaseException:
            if self._traps:
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
        """Connect to the other ranks, check that all have the same `agree_on`, and claim the run.

        `facts` are what the result depends on (rank 0's count): they are stored with the run, and
        compared with those of its last start; only "steps" may grow. Raises, on all ranks,
        `UsageError` if the ranks differ or another process owns the run, and `DataError` if the run
        is that of another program or of other facts.
        """
        ranks = self._join(device)
        with self.rank_link.progress.waiting("what the others are to do"):
            ranks.agree_on({**agree_on, "number of loops before": LOOPS.count})
        self.rank_link.progress.begin_another()
        self._entered.last_words.code = None
        run_facts = dict(facts or {})
        if self._output_dir is not None:
            run_facts[OUTPUT_DIR] = relative(str(self._output_dir), Path.cwd())
        program = this_program(ranks, run_facts)
        home = LOOPS.find_home(ranks, self.rank_link, self._named, program, self._accepted)
        link = self.rank_link = replace(self.rank_link, run=home.run)
        claim = LOOPS.claim(ranks, link, _supervisor_timeouts(self._entered.terms))
        session = Session(link, claim, home, ranks, self._shutdown, self._entered.last_words)
        self._session = session
        session.fence = home.fence(ranks, claim.attempt)
        storage_waits().tell_to(partial(link.tell_of_wait, claim.attempt))
        open_log(link.run.log(claim.attempt.number, ranks.world.rank), attempt=claim.attempt.number)
        if not at_prompt():
            LOOPS.refuse_completed(home, program.facts)
        looked_at = link.launch is not None and home.folder == home.run
        session.accepted = self._accepted
        session.standing = recognise(home.folder, ranks, program, self._accepted, looked_at)
        return session

    def _join(self, device: torch.device) -> Ranks:
        """Connect to the other ranks; from now on they vote on a stop."""
        link, shutdown, terms = self.rank_link, self._shutdown, self._entered.terms
        link.progress.enter(Phase.LOAD)
        raise_open_file_limit()
        network = terms.network if terms else "{}"
        section = DistributedSection.model_validate_json(network)
        ranks = adopt(link.world, device, section)
        link = self.rank_link = replace(link, world=ranks.world)
        shutdown.join_group(terms.stop_grace if terms else None, link.tell_of_signal)
        patience = terms.patience if terms else ResilienceSection().patience
        storage_waits().configure(patience, shutdown.should_shutdown)
        return ranks


class Session:
    """A rank's session in its run. After the loop, call `end` and `give_back`."""

    def __init__(
        self,
        rank_link: RankLink,
        claim: Ownership,
        home: Home,
        ranks: Ranks,
        shutdown: StopListener,
        last_words: LastWords,
    ) -> None:
        self._rank_link, self._claim, self._home = rank_link, claim, home
        self.fence = Fence(home.run.attempts, claim.attempt)
        self._last_words, self._released = last_words, False
        self.ranks, self.shutdown = ranks, shutdown
        self.standing = RunComparison(home.folder, None, RunIdentity())
        """The comparison with the run's last start."""
        self.accepted: Collection[str] = ()
        """Names of differences that the user accepts, also for `CheckpointEngine.restore`."""

    @cached_property
    def durations(self) -> Durations:
        """How long the saves of this run took; known to rank 0."""
        return self._history.durations

    @cached_property
    def _history(self) -> RunHistory:
        if self.ranks.world.rank != 0:
            return RunHistory()
        return read_history(self._rank_link.run, self._claim.attempt)

    def context(self, optimizer: str | None, seed: int | None) -> CheckpointContext:
        ranks = self.ranks
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
            path=self._home.folder.checkpoints,
            identity=identity,
            fence=self.fence,
            group=ranks.saves,
            record=self.record,
            waiting=self.progress.waiting,
            known=self._history.last_step_in(self._home.place),
            local_ranks=ranks.world.local_size,
        )

    def tell_ready(self, step: int) -> None:
        """Report that training continues from `step`. Raises `DataError`, on all ranks, as
        `RunComparison.refuse_if_complete`."""
        self.standing.refuse_if_complete(step)
        if self.ranks.world.rank == 0:
            self.standing.keep(self._home.run)
        self.progress.made(step, before=True)
        self.progress.enter(Phase.COMPILE)
        if step:
            self.say(f"resumed at step {step}{self._which}")
        done, reached = self.progress.step, dict(self.progress.reached)
        self.record(RankReady(done, str(self.ranks.device), reached))
        self.note_trackers()
        logger().info("ready", step=step, pid=os.getpid())

    def seed_step(self, seed: int, step: int) -> None:
        set_rng(seed, step, 0, self.ranks.world.rank)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Mark the block as an evaluation, or other work than steps: it is never a hang, and other
        ranks may wait for it."""
        with self.progress.during(Phase.EVAL):
            yield

    def note_trackers(self) -> None:
        """Record what the next start needs to resume the same run of a tracker."""
        launch = self._rank_link.launch
        if self.ranks.world.rank == 0 and launch is not None and launch.terms is not None:
            note_mlflow_run(RunDirectory(launch.terms.run).trackers)

    def end(self, code: ExitCode, words: str, complete: bool) -> None:
        """Leave the other ranks; the supervisor gets `code` when this process exits. `complete`: no
        step is left."""
        self.say(f"{words}{self._which}")
        if complete:
            LOOPS.complete(self._home, self.standing.now.facts)
        self.progress.phase = Phase.EXIT
        self.ranks.final_barrier()
        self._last_words.code = code
        self.note_trackers()
        if code is ExitCode.COMPLETED:
            begin_next_loop()

    def leave_uncommitted(self, words: str) -> None:
        """Print `words` at the exit, if the program ends without an error after leaving its loop
        without a commit."""
        if self.ranks.world.rank == 0:
            self._last_words.uncommitted = words

    def give_back(self, code: ExitCode | None) -> None:
        """Release the run and the signals. `code` is how the loop ended; None for an exception."""
        self.release()
        # A rank that the supervisor stops is about to exit, and must not die of a signal now.
        if code is None or code is ExitCode.COMPLETED or self._rank_link.launch is None:
            self.shutdown.uninstall()
            heed_for_children(False)

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._claim.release()

    def end_with(self, error: RunError) -> NoReturn:
        """End this process at once, with the error's sentence and code."""
        self._last_words.end_with(error)

    @property
    def run(self) -> RunDirectory:
        return self._home.folder

    def trap_signals(self) -> None:
        self.shutdown.install()
        heed_for_children(True)

    @property
    def progress(self) -> Progress:
        return self._rank_link.progress

    def record(self, event: LedgerEvent) -> None:
        if isinstance(event, CheckpointCommitted | Resumed):
            event = replace(event, place=self._home.place)
        self._rank_link.record(self._claim.attempt, event)

    @property
    def _which(self) -> str:
        """The number of the loop in its process, for a sentence; empty for the first."""
        return f" (loop {self._home.number})" if self._home.number > 1 else ""

    def say(self, words: str) -> None:
        self.ranks.say(words)


def at_prompt() -> bool:
    """Whether this process is interactive: a notebook, IPython or Python's own prompt."""
    return hasattr(sys, "ps1")


def _supervisor_timeouts(terms: LaunchTerms | None) -> SuperviseSection:
    """The supervisor's timeouts; without one the defaults, which are not used."""
    if terms is None:
        return SuperviseSection()
    return SuperviseSection(
        supervisor_timeout=terms.supervisor_timeout, stop_grace=terms.stop_grace
    )


def _usual(name: str, script: str) -> Path:
    """The default run directory, named as by `kempner supervise`. Raises `UsageError` without a
    script, since two notebooks would share a run."""
    stem = Path(script).stem
    if at_prompt() or stem in ("", "-c", "-"):
        raise UsageError(
            f'{name}(): there is no script to name the run after; add run_dir="runs/NAME"'
        )
    return Path("runs") / stem
