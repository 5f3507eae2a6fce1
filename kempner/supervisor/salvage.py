"""Makes a checkpoint of the last step that the ranks of an attempt have left in memory."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from kempner.checkpoint.format.manifest import FileEntry, Identity, Manifest, Origin
from kempner.checkpoint.format.names import CheckpointFolder, in_progress_name
from kempner.checkpoint.slots.pour import Offer, Poured
from kempner.checkpoint.store import commit, retention
from kempner.run.output.logs import logger
from kempner.run.process.awake_clock import AwakeClock
from kempner.run.process.durable_io import fsync_directory
from kempner.run.process.retry import StorageUnavailableError, storage_waits
from kempner.run.process.signals import insists
from kempner.run.process.threads import unless
from kempner.run.record.attempts import Attempt, Fence
from kempner.run.record.events import (
    CheckpointCommitted,
    SalvageDismissed,
    StepSalvaged,
)
from kempner.supervisor.attempt import AttemptFollower
from kempner.supervisor.context import SupervisorContext
from kempner.supervisor.policy.outcome import Decision
from kempner.supervisor.policy.salvage import (
    WORTH_IT,
    decide_salvage,
    dismissed_steps,
    in_vain,
    salvage_patience,
)


def salvage(context: SupervisorContext, follower: AttemptFollower, decision: Decision) -> None:
    """After an attempt that ended with `decision`: its last step becomes the newest checkpoint, if
    it is held in memory by all ranks. What cannot be salvaged is lost, and the run goes on.

    Raises `SupersededError` if a newer attempt owns the run.
    """
    wanted = context.program.ours and context.config.checkpoint.in_memory
    if not wanted or decision.code not in WORTH_IT:
        return
    try:
        attempt, history = follower.attempt, context.history.refresh()
        patience = context.config.resilience.patience
        seconds = salvage_patience(history, attempt.number, time.time(), patience)
        too_late = partial(_is_too_late, context, AwakeClock(), seconds)
        if unless(too_late, partial(_salvage, context, attempt), "salvage") is None:
            logger().warning("the steps in memory are not waited for any longer")
    except (OSError, StorageUnavailableError) as error:
        logger().warning("the steps in memory cannot be salvaged", reason=str(error))


def dismiss_if_in_vain(context: SupervisorContext, attempt: Attempt, reached: int) -> None:
    """After a failure in step `reached`: a salvaged step gets one chance, and where none was made
    after it, the checkpoint before it is the newest again.

    Raises as `StorageWaits.retry`.
    """
    history = context.history.refresh()
    step = in_vain(history, attempt.number, reached)
    if step is None:
        return
    folder = _folder(context)
    patient = partial(storage_waits().retry, worked=True, path=folder.path)
    older = [s for s in patient(folder.committed) if s < step]
    if not older:
        return
    patient(Fence(context.run.attempts, attempt).check)
    unique = f"a{attempt.number}-{attempt.nonce}"
    # Each by itself: what has worked must not be done again after what has not.
    patient(partial(folder.point_latest, older[-1], unique=unique))
    aside = patient(partial(folder.set_aside, step, "abandoned", attempt.number))
    patient(partial(fsync_directory, folder.path))
    logger().warning(f"step {step} was salvaged, and did not help: going back to step {older[-1]}")
    event = SalvageDismissed(step, older[-1], aside.name)
    context.ledger.record(event, attempt.number)


def _is_too_late(context: SupervisorContext, clock: AwakeClock, seconds: float) -> bool:
    """Whether a salvage is no longer waited for: storage may hang, or be unavailable on one node.
    The fence stops what is left of it once the next attempt begins."""
    over = clock.now() > seconds
    return over or insists(context.signals.received) or context.lease.lost


def _salvage(context: SupervisorContext, attempt: Attempt) -> int:
    """How many steps need not be made again."""
    folder, began = _folder(context), time.monotonic()
    latest = storage_waits().retry(folder.latest, worked=True, path=folder.path)
    offers = context.launcher.offers(attempt.nonce)
    chosen = decide_salvage(offers, latest, dismissed_steps(context.history.refresh()))
    if chosen.step is None:
        logger().info("nothing is salvaged", reason=chosen.reason)
        return 0
    step, held = chosen.step, [offer for offer in offers if offer.step == chosen.step]
    own = {offer.rank for offer in held if not offer.copied}
    copied = len({offer.rank for offer in held} - own)
    write = partial(_make_checkpoint, context, attempt, folder, step, offers)
    size = storage_waits().retry(write, worked=True, path=folder.path)
    seconds, saved = round(time.monotonic() - began, 3), step - (latest or 0)
    context.ledger.record(CheckpointCommitted(step, size), attempt.number)
    context.ledger.record(StepSalvaged(step, saved, size, seconds, copied), attempt.number)
    steps = "1 step" if saved == 1 else f"{saved} steps"
    logger().warning(
        f"step {step} was saved from memory: {steps} need not be made again", from_buddies=copied
    )
    return saved


def _make_checkpoint(
    context: SupervisorContext,
    attempt: Attempt,
    folder: CheckpointFolder,
    step: int,
    offers: Sequence[Offer],
) -> int:
    """Have the files written, and commit them; their size in bytes. Raises `OSError`."""
    written = folder.path / in_progress_name(step, attempt.number, secrets.token_hex(4))
    try:
        poured = context.launcher.pour(attempt.nonce, step, written)
        missing = {offer.rank for offer in offers} - {each.rank for each in poured}
        if missing:
            raise FileNotFoundError(f"ranks {sorted(missing)} are not held in memory any more")
        manifest = _manifest(poured, attempt)
        fence = Fence(context.run.attempts, attempt)
        commit.commit(folder, written, manifest, fence, logger().warning)
    except OSError:
        retention.discard(written)
        raise
    return sum(entry.bytes for entry in manifest.files.values())


def _manifest(poured: Sequence[Poured], attempt: Attempt) -> Manifest:
    first = next(each for each in poured if each.train_state is not None)
    assert first.train_state is not None
    files: Mapping[str, FileEntry] = {
        name: entry for each in poured for name, entry in each.files.items()
    }
    told = dict(first.identity)
    identity = Identity(**told | {"origin": Origin(**told["origin"])})
    return Manifest(first.train_state, identity, attempt.number, time.time(), files)


def _folder(context: SupervisorContext) -> CheckpointFolder:
    given = context.config.checkpoint.dir
    return CheckpointFolder(Path(given) if given else context.run.checkpoints)
