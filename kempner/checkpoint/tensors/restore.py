"""Finds a checkpoint that verifies and fits the run, and loads the state from it, on all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from kempner.checkpoint.context import CheckpointContext
from kempner.checkpoint.format.manifest import Base, Manifest, TrainState, read
from kempner.checkpoint.format.names import MANIFEST, SHARED_OBJECTS, objects_file
from kempner.checkpoint.io.verify import Damage, read_checked
from kempner.checkpoint.registered.objects import GROUPS, NOTHING, RegisteredObjects, take, unpack
from kempner.checkpoint.slots.memory import LentSlots, images_of
from kempner.checkpoint.store import retention
from kempner.checkpoint.store.commit import go_on_from
from kempner.checkpoint.store.retention import reading
from kempner.checkpoint.store.selection import (
    BRING_BACK,
    MissingError,
    compare_identities,
    find_base,
    read_base,
    refuse_if_missing,
)
from kempner.checkpoint.tensors import state
from kempner.checkpoint.tensors.load import LoadedBytes, fill, not_seen, open_contents
from kempner.run.output.logs import logger
from kempner.run.process.durable_io import probe_file_system
from kempner.run.process.exit_codes import (
    DataError,
    MismatchError,
    PeersLostError,
    RunError,
    UsageError,
)
from kempner.run.process.retry import (
    StorageUnavailableError,
    WaitStoppedError,
    describe,
    storage_waits,
)
from kempner.run.record.events import CheckpointDamaged

T = TypeVar("T")


def beside_a_base(context: CheckpointContext) -> CheckpointContext:
    """The same, with the checkpoint that has the weights beside which the run trains an adapter.
    Called on every rank; raises as `find_base` and `Restorer.prepare_folder`."""

    def find() -> Base:
        _prepare_folder(context)
        return find_base(context.folder)

    base = context.broadcast_from_rank0(find)
    return replace(context, identity=replace(context.identity, base=base))


def _prepare_folder(context: CheckpointContext) -> None:
    folder = context.folder
    here = context.known is not None and context.known_here
    try:
        storage_waits().retry(partial(_make_folder, context), worked=here, path=folder.path)
    except MissingError as error:
        raise DataError(describe(error)) from error
    except OSError as error:
        raise UsageError(
            f"the checkpoint folder {folder.path} cannot be made ({error.strerror}); "
            "set checkpoint.dir to one that can"
        ) from error
    if refusal := probe_file_system(folder.path).refusal(folder.path):
        raise UsageError(refusal)
    for leftover, failure in retention.sweep(folder, context.fence.attempt.number):
        logger().warning("cannot delete a leftover", path=str(leftover), error=str(failure))


def _make_folder(context: CheckpointContext) -> None:
    """Raises `OSError`, also if the run's checkpoints are missing: storage may be unavailable."""
    refuse_if_missing(context.folder, context.known)
    context.folder.path.mkdir(parents=True, exist_ok=True)


class Restorer(ABC):
    """Tries checkpoints until one verifies; methods are called on every rank."""

    def __init__(self, context: CheckpointContext) -> None:
        self._context, self._folder = context, context.folder

    def prepare_folder(self) -> None:
        """Create the folder, and delete unfinished saves of earlier attempts. Raises `UsageError`
        if it cannot be created or its file system cannot hold checkpoints, and `DataError` if its
        checkpoints are missing."""
        self._context.broadcast_from_rank0(partial(_prepare_folder, self._context))

    def load_newest(
        self, choose: Callable[[], int | None], accept: Collection[str]
    ) -> TrainState | None:
        """Load the step that `choose` returns, called on rank 0 only; if it is damaged, set it
        aside and choose again. None if `choose` returns None."""
        on_rank0 = self._context.broadcast_from_rank0
        while (step := on_rank0(choose)) is not None:
            here = self._context.rank == 0
            with reading(self._folder, step) if here else nullcontext():
                manifest, damages = on_rank0(partial(self._read_manifest, step))
                if manifest is not None:
                    damages = self._load(step, manifest, accept)
                    if not damages:
                        return manifest.train_state
            on_rank0(partial(self._reject, step, damages))
        return None

    def refuse_fresh_start(self) -> None:
        """Raise `DataError`, on all ranks alike, if the run had a checkpoint, of which none could
        be used."""

        def refuse() -> None:
            link, known = self._folder.latest(), self._context.known
            if link is not None or known is not None:
                who = f"the ledger says that step {known} was committed"
                who = who if link is None else f"`latest` names step {link}"
                raise DataError(
                    f"no checkpoint in {self._folder.path} verifies, although {who}; to start over "
                    "from step 0, use another run.name"
                )

        self._context.broadcast_from_rank0(refuse)

    def _read_manifest(self, step: int) -> tuple[Manifest | None, list[Damage]]:
        try:
            return read(self._folder.step(step), worked=True), []
        except DataError as error:
            return None, [Damage(MANIFEST, str(error))]

    def _load(self, step: int, manifest: Manifest, accept: Collection[str]) -> list[Damage]:
        """Load the state; the damages found, the same on all ranks."""
        path = self._folder.step(step)
        judgement = compare_identities(manifest.identity, self._context.identity, accept)
        if judgement.refusals:
            raise DataError(judgement.sentence(path))
        damages = self._fill(path, manifest)
        if not damages:
            self._context.broadcast_from_rank0(partial(self._go_on_from, step, judgement.remarks))
        return damages

    @abstractmethod
    def _fill(self, path: Path, manifest: Manifest) -> list[Damage]:
        """Load the contents of `path`; the damages found, the same on all ranks."""

    def _together(self, path: Path, work: Callable[[], T]) -> tuple[T | None, list[Damage]]:
        """Do this rank's part of a load; its result, or None and the damages if any rank found
        some. If a rank cannot do its part, every rank raises, that one its own error."""
        result: T | None = None
        found: Damage | RunError | None = None
        try:
            result = work()
        except DataError as error:
            found = Damage(f"rank {self._context.rank}", str(error))
        except RunError as error:
            found = error
        gathered = self._context.gather(found)
        if isinstance(found, RunError):
            if gathered[0] is None and isinstance(found.__cause__, FileNotFoundError):
                raise not_seen(path) from found
            raise found
        for other, words in enumerate(gathered):
            if isinstance(words, RunError):
                raise _of_another(other, words)
        damages = [damage for damage in gathered if isinstance(damage, Damage)]
        return (None if damages else result), damages

    def _reject(self, step: int, damages: list[Damage]) -> None:
        aside = self._folder.set_aside(step, "damaged", self._context.fence.attempt.number)
        found = [str(damage) for damage in damages[:10]]
        logger().warning("checkpoint is damaged", step=step, kept_as=aside.name, damage=found)
        self._context.record(CheckpointDamaged(step, aside.name, tuple(found)))

    def _go_on_from(self, step: int, remarks: Collection[str]) -> None:
        if (named := self._folder.latest()) != step:
            logger().warning("`latest` names another step than the one in use", latest=named)
        go_on_from(self._folder, step, self._context.fence, logger().warning)
        for remark in remarks:
            logger().warning(remark)


class StateRestorer(Restorer):
    def __init__(
        self,
        context: CheckpointContext,
        model: nn.Module,
        optimizer: Optimizer,
        registered: RegisteredObjects = NOTHING,
        memory: LentSlots | None = None,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        """`memory` may still hold this rank's last steps. `begin` gives what trains beside a base
        its first values."""
        super().__init__(context)
        self._model, self._optimizer = model, optimizer
        self._registered, self._memory = registered, memory
        self._begin, self._base_is_read = begin, False

    def _fill(self, path: Path, manifest: Manifest) -> list[Damage]:
        base = self._context.identity.base
        if base is not None and not self._base_is_read:
            self._read_base(base)
        if base is not None and manifest.identity.base is None:  # this is it
            self._optimizer.state.clear()
            self._begin()
            return []
        return self._fill_from(path, manifest)

    def _read_base(self, base: Base) -> None:
        """Fill what does not train, once: it stays as it is. Raises `DataError`, on all ranks
        alike, if that is damaged: no other checkpoint has it."""
        tell, folder = self._context.broadcast_from_rank0, self._context.folder
        manifest, path = tell(partial(read_base, folder, base)), folder.step(base.step)
        rank, world = self._context.rank, self._context.world
        frozen = {
            f"model.{name}": parameter
            for name, parameter in self._model.named_parameters()
            if not parameter.requires_grad
        }

        def read() -> LoadedBytes:
            contents = open_contents(path, manifest, rank, world)
            state.check_shapes(frozen, contents, others=True)
            return fill(frozen, path, manifest, contents)

        _, damages = self._together(path, read)
        if damages:
            raise DataError(
                f"the weights beside which the adapter is trained are damaged ({path.name}: "
                f"{damages[0]}); {BRING_BACK}"
            )
        self._base_is_read = True

    def _fill_from(self, path: Path, manifest: Manifest) -> list[Damage]:
        rank, world = self._context.rank, self._context.world
        contents, damages = self._together(path, lambda: open_contents(path, manifest, rank, world))
        if contents is None:
            return damages
        objects, damages = self._together(path, lambda: self._read_objects(path, manifest))
        if objects is None:
            return damages
        groups = {name: of_one for name, of_one in objects.items() if name.endswith(GROUPS)}
        # First the groups: an optimizer has no state of parameters outside of its groups.
        _, damages = self._together(path, lambda: take(groups, self._registered.shared))
        contents = state.by_plain_names(contents, self._model)
        saved = state.saved_optimizer_tensors(contents)
        state.create_optimizer_state(self._model, self._optimizer, saved)
        table = state.capture(self._model, self._optimizer)
        state.check_shapes(table, contents)
        memory = images_of(self._memory, manifest.train_state.step)
        work = partial(fill, table, path, manifest, contents, memory)
        loaded, damages = self._together(path, work)
        if loaded is not None:
            if loaded.from_memory:
                read, remembered = loaded.bytes, loaded.from_memory
                logger().info("the state was in memory", bytes=read, from_memory=remembered)
            state.adopt_numbers(self._model, self._optimizer, table)
            others = {name: of_one for name, of_one in objects.items() if name not in groups}
            _, damages = self._together(path, lambda: self._take_objects(path, manifest, others))
        return damages

    def _read_objects(self, path: Path, manifest: Manifest) -> dict[str, Any]:
        """Raises `MismatchError` if other names are registered than the checkpoint has."""
        shared = read_checked(path, manifest, SHARED_OBJECTS)
        return unpack(shared, self._registered.shared, "state", str(path))

    def _take_objects(self, path: Path, manifest: Manifest, shared: Mapping[str, Any]) -> None:
        """Raises `MismatchError` if other names are registered than the checkpoint has."""
        registered, rank = self._registered, self._context.rank
        take(shared, registered.shared)
        saved_by, world = manifest.identity.world, self._context.world
        per_rank = registered.per_rank
        if saved_by == world:
            own = read_checked(path, manifest, objects_file(rank))
            take(unpack(own, per_rank, "per_rank", str(path)), per_rank)
            return
        if not all(held.automatic for held in per_rank.values()):
            names = ", ".join(sorted(name for name, one in per_rank.items() if not one.automatic))
            raise MismatchError(
                f"what each rank has for itself ({names}) was saved by {saved_by} ranks ({path}), "
                f"and this run has {world}, among which it cannot be divided: start as many ranks "
                "again"
            )
        first = read_checked(path, manifest, objects_file(0))
        states = unpack(first, per_rank, "per_rank", str(path))
        for name, held in per_rank.items():
            if held.anew is not None:
                held.anew(states.get(name), manifest.train_state.step, rank)


def _of_another(rank: int, error: RunError) -> RunError:
    if isinstance(error, StorageUnavailableError | WaitStoppedError):
        return type(error)(f"rank {rank}: {error}")
    if isinstance(error, MismatchError):
        return error  # the same on all ranks
    return PeersLostError(f"rank {rank} cannot load its part: {error}")
