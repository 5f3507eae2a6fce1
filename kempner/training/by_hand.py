"""`CheckpointManager` and `ShutdownHandler`: the parts of `survive`, for a loop that calls them.

    checkpoints = CheckpointManager("runs/x", model, optimizer, keep_last=3)
    start = checkpoints.restore() or 0
    with ShutdownHandler() as shutdown:
        for step in range(start + 1, 1001):
            ...
            if step % 50 == 0 or shutdown.should_shutdown():
                checkpoints.save(step)

Both are a thin layer over what `survive` uses: claiming the run and comparing it with its last
start (`session.py`), the vote and the final save (`own_loop.py`), the checkpoint engine.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from kempner.checkpoint.format.manifest import TrainState
from kempner.checkpoint.registered.groups import gather, is_optimizer_of
from kempner.config.sections import CheckpointSection
from kempner.run.control.protocol import Phase
from kempner.run.output.console import protect, say
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import ExitCode, StopReason, UsageError
from kempner.run.process.worker_process import heed_for_children
from kempner.run.record.events import Completed
from kempner.training.compute.forward_backward import program_seed
from kempner.training.final_save import time_to_spare
from kempner.training.groups.process_groups import open_votes
from kempner.training.homes import LOOPS
from kempner.training.own_loop import OwnLoop
from kempner.training.rank_link.rank_link import find_place
from kempner.training.rank_link.shutdown import StopListener
from kempner.training.session import RunEntry, at_prompt, describe_optimizer
from kempner.training.survive import check_whole, device_of, open_checkpoints, parameters_of
from kempner.training.vote import Vote, VoteGroup, VoteResult, commit_last_step, unwritten
from kempner.training.watch import (
    GENERATORS,
    LOOKS,
    GlobalGenerators,
    HeldObjects,
    UnheldObjects,
    find_living,
)


@dataclass
class _Process:
    """The managers and the handler of this process."""

    managers: list[CheckpointManager] = field(default_factory=list)
    """The open managers."""
    handler: ShutdownHandler | None = None
    """The handler whose block is active."""
    pid: int = 0
    _listener: StopListener | None = None

    @property
    def listener(self) -> StopListener:
        """The listener for stop signals while a handler's block is active."""
        if LOOPS.supervised is not None:  # one for all loops of the process
            return LOOPS.supervised.shutdown
        self._listener = self._listener or StopListener(at_prompt(), on_demand=True)
        return self._listener

    def add(self, manager: CheckpointManager) -> None:
        self.managers.append(manager)
        self.pid = os.getpid()

    def forget_request(self) -> None:
        """Forget a stop request once all managers are closed, so that it does not stop the next
        loop."""
        if not self.managers:
            self._listener = None

    @property
    def stop(self) -> StopReason:
        """The stop that the ranks have agreed on; NONE if they have not."""
        return StopReason.NONE if self.handler is None else self.handler._agreed


_PROCESS = _Process()


@dataclass
class _UnheldObjects:
    """Finds objects that the loop changes and no checkpoint holds, at the first saves."""

    strangers: UnheldObjects
    looks: int = LOOKS

    def look(self) -> str:
        """A sentence about such an object, once; empty if there is none."""
        if not self.looks:
            return ""
        self.looks -= 1
        self.strangers.end_step(find_living())
        finding = next(self.strangers.findings(), "")
        if finding:
            self.looks = 0
        return finding


class CheckpointManager:
    """Saves a model and its optimizer in the background, and loads the newest checkpoint.

    Create it on every rank, after `init_process_group`, when `model` and `optimizer` are final, and
    call each method on every rank. The checkpoints are in `run_dir/checkpoints`; `kempner status`,
    `report` and `checkpoint` read that folder. The last `keep_last` are kept. A run is tied to its
    command, optimizer and ranks, and refused to another program, see docs/own_loop.md;
    `accept_changes` names differences to accept.

    A checkpoint holds the model, the optimizer, the random number generators of torch, NumPy and
    `random` on each rank, and the objects in `state` and `per_rank`, as in `survive`:
    `state={"scheduler": scheduler}`. If the loop changes an optimizer, scheduler, scaler or module
    that no checkpoint holds, a line says so at the first saves. The position in the data is not
    held: derive the batch from the step, or register a loader with `state_dict`.

    Raises `UsageError` if an argument is wrong, another manager of this process or another process
    has the folder, or a checkpoint cannot hold the state; `DataError` if the run in `run_dir` is
    another program's.
    """

    def __init__(
        self,
        run_dir: str | Path,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        keep_last: int = CheckpointSection().keep_last,
        state: Mapping[str, object] | None = None,
        per_rank: Mapping[str, object] | None = None,
        accept_changes: Collection[str] = (),
    ) -> None:
        name = type(self).__name__
        entry = RunEntry(name, run_dir, accept_changes, _PROCESS.listener)
        with entry.guard():
            check_whole(name, "keep_last", keep_last, 2)
            device = device_of(name, model, optimizer)
            _refuse_second(Path(run_dir))
            given = HeldObjects(model, optimizer, state or {}, per_rank or {}, watches_data=False)
            everything = gather(model, optimizer, given.state, given.per_rank)
            self._unheld = _UnheldObjects(UnheldObjects(given))
            self._generators = GlobalGenerators(torchs=True)
            session = entry.meet(
                device,
                {"run_dir": str(run_dir), "keep_last": keep_last, **parameters_of(model)},
                {"optimizer": describe_optimizer(optimizer)},
            )
            registered, generators = everything.registered, {GENERATORS: self._generators.held()}
            registered = replace(registered, per_rank={**registered.per_rank, **generators})
            everything = replace(everything, registered=registered)
            self._engine = open_checkpoints(session, everything, optimizer, keep_last, None)
        self.run_dir = Path(run_dir)
        """The run's directory."""
        self._session, self._optimizer = session, optimizer
        self._loop: OwnLoop | None = None
        self._saved: int | None = None
        self._trained, self._closed = 0, False
        # For every optimizer: another one may step other parts of the model.
        self._hook = register_optimizer_step_pre_hook(self._before_optimizer)
        self._answered = False  # whether a save has followed the agreed stop
        _PROCESS.add(self)

    def restore(self) -> int | None:
        """Load the newest checkpoint that verifies; returns its step, or None if there is none.

        Random number generators are restored, too; on another number of ranks they get new seeds. A
        damaged checkpoint is set aside, never deleted. Raises `MismatchError` if the model, the
        optimizer or a registered object does not fit the checkpoint, and `DataError` if no
        checkpoint can be used.
        """
        self._refuse_if_closed()
        self._engine.join()
        found = self._engine.restore(self._session.accepted)
        self._begin(found)
        return None if found is None else found.step

    def save(self, step: int) -> None:
        """Save the state as of `step`, the number of completed steps.

        The state is copied while the next forward and backward pass run; a hook makes
        `optimizer.step` wait for the copy. It is written and committed in the background, after the
        save before. A failed save is logged, and leaves the checkpoint before intact.

        Once `should_shutdown` has returned True, this is the final save: it waits for the commit,
        and then ends the program by `SystemExit` with 75; with several managers, the last one to
        save does so.

        Raises `UsageError` if a checkpoint cannot hold the state, `CheckpointWriteError` if the
        last one cannot be written.
        """
        check_whole("CheckpointManager.save", "step", step, 1)
        if self._answered:  # another manager has not saved yet
            _leave_now(_PROCESS.stop)
        loop = self._begun()
        if step == self._saved and not self._trained and not _PROCESS.stop:
            return
        self._saved, self._trained = step, 0
        loop.train_state = TrainState(step=step, cursor=step)
        if finding := self._unheld.look():
            self._session.say(finding)
        self._session.progress.made(step)
        if _PROCESS.stop:
            with self._session.progress.during(Phase.SAVE):
                commit_last_step(loop)
            self._answered = True
            if all(manager._answered for manager in _PROCESS.managers):
                _leave_now(_PROCESS.stop)
        else:
            loop.save(None)

    def close(self) -> None:
        """Wait for the save in flight, and release the run for another manager. The end of a
        `ShutdownHandler`'s block and the end of the process do this, too. Raises
        `CheckpointWriteError` if the last save has failed."""
        if not self._closed:
            with self._session.progress.during(Phase.SAVE):
                self._engine.settle()
            failed = bool(self._engine.failures.count) and self._loop is not None
            self._release()
            self._engine.close()
            if failed and self._loop is not None:
                raise unwritten(self._loop)

    def _vote_to_stop(self) -> StopReason:
        """The stop that the ranks vote for. Raises `CheckpointWriteError`, on all ranks, if saves
        keep failing."""
        return self._begun().agree().stop

    def _leave(self, stop: StopReason) -> ExitCode:
        """Commit what can be committed, and leave the other ranks; returns how the loop ended.
        Raises `CheckpointWriteError`, on all ranks, if the last save has failed."""
        loop, code = self._loop, ExitCode.STOPPED if stop else ExitCode.COMPLETED
        if loop is not None:
            if self._trained:
                self._give_up_unsaved(loop)
            code = loop.leave(VoteResult(stop=stop))
        self._release()
        return code

    def _break_off(self) -> None:
        """Leave after an exception in the loop: the newest checkpoint stays."""
        if self._loop is not None:
            self._loop.wait_for_save()
        self._release()

    def _end(self) -> None:
        """Close at the end of the process, if no handler's block did."""
        if self._loop is not None:
            self._loop.wait_for_save()
        raised = hasattr(sys, "last_value")  # by an exception that ended the program
        if self._saved is not None and not raised:
            self._session.record(Completed(self._saved))
        self._release()

    def _begin(self, found: TrainState | None) -> OwnLoop:
        loop = self._loop = OwnLoop(self._session, self._engine, found)
        self._saved, self._trained = loop.train_state.step or None, 0
        seed = self._session.ranks.broadcast(program_seed())
        assert isinstance(seed, int)  # from rank 0
        if self._generators.begin(seed):
            self._session.say("random numbers are other ones: the number of ranks differs")
        self._unheld.strangers.begin(find_living())
        loop.begin()
        return loop

    def _begun(self) -> OwnLoop:
        """The loop, also if the program has not called `restore`, since there is no checkpoint."""
        self._refuse_if_closed()
        if self._loop is None:
            found = any(self._session.run.checkpoints.glob("step-*"))
            if self._session.ranks.broadcast(found):
                raise UsageError(
                    f"{self.run_dir} has checkpoints: call restore() before the loop, or name "
                    "another folder"
                )
        return self._loop or self._begin(None)

    def _before_optimizer(self, optimizer: Optimizer, *_: object) -> None:
        if is_optimizer_of(optimizer, self._optimizer):
            self._session.progress.made((self._saved or 0) + self._trained)
            self._trained += 1
        self._unheld.strangers.stepped(optimizer, (self._saved or 0) + self._trained)
        self._engine.release_staging()

    def _give_up_unsaved(self, loop: OwnLoop) -> None:
        """Leave with a state that has changed since the last save: that step cannot be saved
        again."""
        with self._session.progress.during(Phase.SAVE):
            self._engine.settle(time_to_spare(self._session.shutdown.seconds_left()))
        if not loop.ask().failed_saves:
            steps = "1 step" if self._trained == 1 else f"{self._trained} steps"
            after = f" after step {self._saved}" if self._saved else ""
            self._session.say(f"{steps} of the optimizer{after} are in no checkpoint")
        elif not _PROCESS.stop:
            raise unwritten(loop)
        else:
            loop.train_state = TrainState(step=self._engine.committed_step or 0)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise UsageError(
                f"the checkpoints of {self.run_dir} are closed, as at the end of the block of a "
                "ShutdownHandler: save inside of it, or make another CheckpointManager"
            )

    def _release(self) -> None:
        self._closed = True
        self._hook.remove()
        self._engine.release_staging()  # without the hook nothing waits for the copy
        if self in _PROCESS.managers:
            _PROCESS.managers.remove(self)
        self._session.release()


class ShutdownHandler:
    """Tells a loop when to stop: `with ShutdownHandler() as shutdown`.

    In its block the stop signals (SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2) only make
    `should_shutdown` return True; afterwards they have their earlier effect again. In a process
    group the ranks vote: all of them stop after the same step, whichever was signalled. Under
    `kempner supervise` its stop requests count, too.

    The end of the block waits for the saves of each `CheckpointManager`, and closes it. After a
    stop it raises `SystemExit` with 75 (`ExitCode.STOPPED`) unless a save has done so: code after
    the block runs only if the loop was not stopped, and a batch script can tell the difference. At
    a prompt it raises `KeyboardInterrupt` after a Ctrl-C. A second Ctrl-C within two seconds ends
    the process at once.

    Outside of the main thread Python cannot trap signals. Raises `UsageError` if another handler's
    block is active.
    """

    def __init__(self) -> None:
        self._agreed = StopReason.NONE
        self._listener: StopListener | None = None
        self._votes: VoteGroup | None = None

    def __enter__(self) -> Self:
        if _PROCESS.handler is not None:
            raise UsageError("there is a ShutdownHandler already: one block is for all loops in it")
        protect()
        self._agreed, self._listener = StopReason.NONE, _PROCESS.listener
        if not _PROCESS.managers and LOOPS.supervised is None:
            self._listener.join_group(on_signal=_tell_of_signal)
        self._listener.install()
        heed_for_children(True)
        _PROCESS.handler = self
        return self

    def should_shutdown(self) -> bool:
        """Whether to save and leave the loop; the same on every rank. Every rank must call it after
        the same steps, such as each or every tenth. Raises `CheckpointWriteError` if saves have
        kept failing for `resilience.patience`."""
        if self._listener is None:
            raise UsageError("should_shutdown() belongs into `with ShutdownHandler() as shutdown:`")
        if not self._agreed:
            votes = [manager._vote_to_stop() for manager in _PROCESS.managers]
            self._agreed = max(votes) if votes else self._vote(self._listener)
        return bool(self._agreed)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        code: ExitCode | None = None
        try:
            stopping = self._agreed and isinstance(error, SystemExit | KeyboardInterrupt)
            if error is None or stopping:
                code = self._finish()
            else:
                for manager in list(_PROCESS.managers):
                    manager._break_off()
        finally:
            self._give_back(code)
        if error is None and code is not ExitCode.COMPLETED:
            _leave_now(self._agreed)

    def _vote(self, listener: StopListener) -> StopReason:
        """Vote without a manager, in the program's own process group if it has one."""
        if self._votes is None:
            if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
                return listener.reason()
            self._votes = VoteGroup(open_votes(find_place()))
        return self._votes.open(Vote(stop=listener.reason())).close().stop

    def _finish(self) -> ExitCode:
        """Commit what can be committed, on all ranks; returns how the loop ended."""
        if not _PROCESS.managers and self._agreed:
            if _is_first_rank():
                say(f"stopped ({self._agreed.words}); start again to continue")
            return ExitCode.STOPPED
        codes = [manager._leave(self._agreed) for manager in list(_PROCESS.managers)]
        return max(codes, default=ExitCode.COMPLETED)

    def _give_back(self, code: ExitCode | None) -> None:
        """Restore the signals' earlier effect, except in a rank that the supervisor stops: it is
        about to exit, and must not die of a signal now."""
        _PROCESS.handler, listener, self._listener = None, self._listener, None
        if listener is not None and (code is not ExitCode.STOPPED or LOOPS.supervised is None):
            listener.uninstall()
            heed_for_children(False)
        _PROCESS.forget_request()


def _leave_now(reason: StopReason) -> NoReturn:
    if at_prompt() and reason is StopReason.INTERRUPT:
        raise KeyboardInterrupt
    raise SystemExit(int(ExitCode.STOPPED))


def _refuse_second(run_dir: Path) -> None:
    """Raise `UsageError` if an open manager has the folder: each would take the other's checkpoints
    for its own."""
    for manager in _PROCESS.managers:
        if manager.run_dir.resolve() == run_dir.resolve():
            raise UsageError(
                f"{run_dir} is the folder of another CheckpointManager of this process: give each "
                "a folder of its own, or close() the other one first"
            )


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _tell_of_signal(sentence: str) -> None:
    if _is_first_rank():
        logger().warning(f"{sentence}: stopping after this step")


def _end_with_process() -> None:
    if _PROCESS.pid != os.getpid():  # a forked worker
        return
    for manager in list(_PROCESS.managers):
        manager._end()


# Runs while threads can still be started, and before Python joins those of the saves.
threading._register_atexit(_end_with_process)  # type: ignore[attr-defined]
