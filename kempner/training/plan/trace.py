"""Runs a training step on fake tensors, on one rank of a simulated world, and records the memory,
FLOPs and communication of every operation."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from kempner.checkpoint.tensors.state import is_sharded, local_part
from kempner.config.sections import Config
from kempner.data.serve.loader import MicroBatch
from kempner.model.sharding import assemble
from kempner.model.spec.communication import Choice
from kempner.model.spec.memory import slots_of_step
from kempner.model.spec.mesh import MeshDegrees
from kempner.model.spec.slot_tree import keeps_most
from kempner.model.transformer import Transformer, block_mask
from kempner.run.control.heartbeat import untimed
from kempner.training.compute.forward_backward import StepGradient
from kempner.training.compute.optimizer import build_optimizer, update
from kempner.training.compute.slot_gradient import SlotGradient
from kempner.training.plan.timeline import (
    ACTIVATIONS,
    BACKWARD,
    GATHERED,
    GRADIENTS,
    KINDS,
    LOSS,
    NOT_THERE,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    Collective,
    Segment,
    Stage,
    StepPlace,
    Trace,
    TracedStep,
    Work,
    extrapolate,
    whole,
)

# The only store whose ranks need not exist; torch ships it, and registers its backend with it.


@contextmanager
def fake_ranks(degrees: MeshDegrees, rank: int = 0) -> Iterator[DeviceMesh]:
    """A mesh of which this process is a rank; its collectives return at once, without moving data.
    The process must not be part of another process group."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=degrees.world)
    sizes = degrees.dimensions()
    try:
        yield init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    finally:
        dist.destroy_process_group()
        if degrees.tensor > 1:
            # DTensor's caches for a mesh refer to groups that are gone.
            from torch.distributed.tensor.debug import _clear_sharding_prop_cache

            _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


_ATEN = torch.ops.aten
_ATTENTION = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: (0, 4),
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: (1, 10),
}
"""Index of the queries in the arguments, and FLOPs for each query, key and element of a head: two
products forward, five backward, one of which recomputes the scores (Dao, "FlashAttention-2",
arXiv:2307.08691, section 4.1). Without a discount for the causal mask."""
_FREE_OF_CHARGE = frozenset({"empty", "empty_like", "new_empty", "empty_strided"})
"""Operations that neither read nor write."""
_OPERATIONS: dict[str, str] = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
}
_FUNCTIONAL = "_c10d_functional"


def sent_by(func: Any, args: tuple[Any, ...]) -> tuple[str, int, Any] | None:
    """Operation, bytes of its whole buffer, and process group of a collective; None for any other
    function, and for collectives of a few numbers, such as losses."""
    name = func._schema.name.partition("::")[2]
    if func.namespace not in ("c10d", _FUNCTIONAL) or name not in _OPERATIONS:
        return None
    if func.namespace == _FUNCTIONAL:
        parts = args[1] if name == "all_gather_into_tensor" else 1
        return _OPERATIONS[name], args[0].nbytes * parts, args[-1]
    # All-gathers list the output first, and reduce-scatters the input second.
    buffer = args[1] if name.startswith("_reduce_scatter") else args[0]
    tensors = [buffer] if isinstance(buffer, Tensor) else buffer
    if sum(tensor.numel() for tensor in tensors) <= 3:
        return None
    group = args[1] if name == "allreduce_" else args[2]
    return _OPERATIONS[name], sum(tensor.nbytes for tensor in tensors), group


class OperationRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each operation while the context is entered.

    Memory is that of storages: one exists from the operation that returned it, or from its
    `resize_`, until its last reference is gone or it is resized to zero. Temporaries inside of
    kernels are not recorded. `dimension` maps the name of a process group to its mesh dimension.
    """

    def __init__(self, dimension: Callable[[str], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dimension = dimension
        self._event = 0
        self._deltas: list[tuple[int, int, int]] = []
        """Changes of memory: event, storage, bytes."""
        self._known: dict[int, int] = {}
        """The existing storages, by address."""
        self._references: dict[int, object] = {}
        self._kinds: list[int] = []
        self._sizes: list[int] = []
        self._segments: list[tuple[StepPlace, int]] = []
        self._work: list[Work] = []
        self._sent: list[Counter[Collective]] = []
        self.kind = OTHER
        """The kind of new tensors."""

    def __enter__(self) -> Self:
        self._resize = UntypedStorage.resize_
        recorder, resize = self, self._resize

        def resize_(storage: UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            recorder._resized(storage)
            return result

        # FSDP frees and allocates this way, without an operation.
        UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor: its operations on the local tensor are recorded
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "prim":
            return result
        self._event += 1
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        fresh = [tensor for tensor in made if self._meet(tensor.untyped_storage(), self.kind)]
        if func is _ATEN._to_copy.default and self.kind_of(given[0]) == PARAMETERS:
            self.label(made, GATHERED)  # autocast's
        if self._segments:
            self._count(func, args, kwargs, result, given, made, bool(fresh))
        return result

    def mark(self, place: StepPlace, kind: int) -> None:
        """Begin a part of the step, whose new tensors are of this kind unless labelled."""
        self.kind = kind
        self._segments.append((place, self._event + 1))
        self._work.append(Counter())
        self._sent.append(Counter())

    @property
    def met(self) -> int:
        return len(self._kinds)

    def kind_of(self, tensor: Tensor) -> int | None:
        """The kind of a tensor's storage; None if it was never seen."""
        number = self._known.get(tensor.untyped_storage()._cdata)
        return None if number is None else self._kinds[number]

    def label(self, tensors: Iterable[Tensor], kind: int) -> None:
        """Set the kind of tensors, from their creation on."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not self._meet(storage, kind) and storage._cdata in self._known:
                self._kinds[self._known[storage._cdata]] = kind

    def relabel_since(self, number: int, kind: int, more_than: int, but: Tensor) -> None:
        """As `label`, for storages of more than `more_than` bytes seen after the first `number`."""
        kept = self._known.get(but.untyped_storage()._cdata)
        for storage in range(number, len(self._kinds)):
            if storage != kept and self._sizes[storage] > more_than:
                self._kinds[storage] = kind

    def keep_gradients(self) -> None:
        """Label what a backward has left as gradients."""
        for number in self._known.values():
            if self._kinds[number] == BACKWARD:
                self._kinds[number] = GRADIENTS

    def segments(self) -> list[Segment]:
        # The last column, NOT_THERE, does not count.
        rows = np.zeros((self._event + 2, len(KINDS) + 1), np.int64)
        events, storages, sizes = np.array(self._deltas, np.int64).T
        np.add.at(rows, (events, np.array(self._kinds)[storages]), sizes)
        held = rows.cumsum(0)[:, :-1]
        bounds = [first for _, first in self._segments] + [self._event + 1]
        return [
            Segment(place, held[bounds[i] - 1 : bounds[i + 1]], self._work[i], self._sent[i])
            for i, (place, _) in enumerate(self._segments)
        ]

    def _meet(self, storage: UntypedStorage, kind: int) -> bool:
        """Add a storage; returns whether it is new."""
        address = storage._cdata
        if address in self._known:
            return False
        number = len(self._kinds)
        self._known[address] = number
        self._kinds.append(kind)
        self._sizes.append(storage.nbytes())
        self._deltas.append((self._event, number, storage.nbytes()))

        def gone(_: object) -> None:
            self._known.pop(address)
            self._references.pop(number)
            self._deltas.append((self._event + 1, number, -self._sizes[number]))

        self._references[number] = weakref.ref(storage, gone)
        return True

    def _resized(self, storage: UntypedStorage) -> None:
        number = self._known.get(storage._cdata)
        if number is None:
            return
        change = storage.nbytes() - self._sizes[number]
        self._sizes[number] += change
        self._kinds[number] = GATHERED
        if change > 0:
            self._event += 1
        self._deltas.append((self._event + (change < 0), number, change))

    def _count(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: object,
        given: list[Tensor],
        made: list[Tensor],
        fresh: bool,
    ) -> None:
        if (sent := sent_by(func, args)) is not None:
            operation, size, group = sent
            name = group if isinstance(group, str) else dist.ProcessGroup.unbox(group).group_name
            dimension = self._dimension(name)
            self._sent[-1][Collective(operation, dimension)] += size  # type: ignore[arg-type]
            if operation == "all_gather" and dimension != "tensor":
                self.label([args[0]], GATHERED)
            return
        packet = func._overloadpacket
        free = packet.__name__ in _FREE_OF_CHARGE or func.namespace != "aten"
        if free and func.namespace != "fsdp":
            return
        if not fresh and not func._schema.is_mutable:
            return  # a view
        written = made or given[:1]
        size = sum(tensor.nbytes for tensor in given) + sum(tensor.nbytes for tensor in written)
        self._work[-1][self._flops(packet, args, kwargs, result), size] += 1

    @staticmethod
    def _flops(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> int:
        if packet in _ATTENTION:
            position, per_pair = _ATTENTION[packet]
            q, k = args[position], args[position + 1]
            return int(per_pair * q.numel() * k.shape[-2])
        formula = flop_registry.get(packet)
        return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


_CPU = torch.device("cpu")
_MICRO_STEPS = 3
"""The first micro step, one between, and the last."""
_EXCHANGE = "the exchange of gradients"
"""What `SlotGradient` says that it waits in."""


@dataclass(frozen=True)
class Step:
    """A step to trace. `config.train.dtype` is the compute type, not "auto". `micro_steps` is their
    number in a step. `as_on_gpu`: count RMSNorm as one kernel, and document masks as a GPU has
    them."""

    config: Config
    vocab_size: int
    mesh: MeshDegrees
    choice: Choice
    micro_steps: int
    as_on_gpu: bool

    @property
    def slots(self) -> int:
        """As `SlotGradient.slots`; 0 without `train.same_on_any_world`."""
        return slots_of_step(self.config) if self.config.train.same_on_any_world else 0

    @property
    def rank(self) -> int:
        """The one to trace: the first, which has the largest shards; of slots the first of those
        that keep the most sums."""
        if not self.slots:
            return 0
        turns = self.choice.turns(self.mesh.shard)
        return turns * keeps_most(self.slots, self.mesh.data_world // turns)


def traced(step: Step) -> TracedStep:
    """Memory, operations and communication of one rank. For a deep model, two shallow ones are
    traced and extrapolated, except with Muon."""
    layers = step.config.model.n_layers
    period = step.config.train.activation_checkpointing_every or 1
    fewest = 3 + 2 * period
    shorter = fewest + (layers - fewest) % period
    # Muon distributes matrices over ranks, and whether they divide evenly depends on the depth.
    if shorter + period >= layers or step.config.optimizer.name == "muon":
        return whole(trace(step, layers), step.micro_steps)
    pair = trace(step, shorter), trace(step, shorter + period)
    return extrapolate(*pair, layers, step.micro_steps)


def trace(step: Step, layers: int) -> Trace:
    """Trace the second step of a run, when the optimizer has its state, with `layers` layers."""
    model_section = step.config.model.model_copy(update={"n_layers": layers})
    config = step.config.model_copy(update={"model": model_section})
    train = config.train
    with fake_ranks(step.mesh, step.rank) as mesh, _undisturbed():
        names = {str(mesh.get_group(name).group_name): name for name in mesh.mesh_dim_names or ()}
        recorder = OperationRecorder(lambda group: names.get(group, "world"))
        # The mesh's coordinates are computed with tensors, which must be real.
        model = assemble(config, step.vocab_size, torch.device("meta"), mesh, step.choice)
        with FakeTensorMode(allow_non_fake_inputs=True), recorder:
            model.to_empty(device=_CPU)
            recorder.label(map(local_part, model.parameters()), PARAMETERS)
            optimizer = build_optimizer(model, config.optimizer, bool(train.same_on_any_world))
            tokens = torch.zeros(train.micro_batch_size, train.seq_len, dtype=torch.int64)
            masked = config.data.document_mask or config.preferences.on
            numbers = tokens.to(torch.int32) if masked else None
            # FlexAttention has no trace here: its mask is built beside causal attention.
            batch = MicroBatch(tokens, tokens.clone(), None if step.as_on_gpu else numbers)
            run = partial(_step, step, model, mesh, optimizer, batch)
            run(1, step.mesh.data_world)
            recorder.label(_state_of(optimizer), OPTIMIZER)
            marks = _Marks(recorder, layers, numbers)
            marks.attach(model, step.as_on_gpu)
            # With sums over slots, which are kept, no micro step is like another.
            number = step.micro_steps if step.slots else min(step.micro_steps, _MICRO_STEPS)
            run(number, step.slots, marks)
            segments = recorder.segments()
        return Trace(layers, segments, _saved_bytes(model, optimizer))


def _step(
    step: Step,
    model: nn.Module,
    mesh: DeviceMesh,
    optimizer: Optimizer,
    batch: MicroBatch,
    micro_steps: int,
    slots: int,
    marks: _Marks | None = None,
) -> None:
    if marks is not None:
        marks.begin("start", None)
    anywhere, clip = bool(step.config.train.same_on_any_world), step.config.train.clip_grad_norm
    gradient: StepGradient | SlotGradient = _step_gradient(step, model)
    if anywhere:
        waiting = untimed if marks is None else marks.waiting
        gradient = SlotGradient(model, _CPU, 0, slots, mesh, step.choice, waiting)
    (loss, *_) = gradient.add([batch] * micro_steps, step=1)
    if marks is not None:
        marks.update()
    update(model, optimizer, loss, rate=1e-3, max_norm=clip, any_shard=anywhere)


def _step_gradient(step: Step, model: nn.Module) -> StepGradient:
    return StepGradient(
        *(model, _CPU),
        seed=0,
        rank=0,
        copies=step.mesh.tensor,
        choice=step.choice,
        beta=step.config.preferences.beta,
    )


class _Marks:
    """Marks the parts of a step in a recorder, by hooks that do not change the computation."""

    def __init__(self, recorder: OperationRecorder, layers: int, numbers: Tensor | None) -> None:
        self._recorder, self._layers, self._numbers = recorder, layers, numbers
        self._micro_step = -1
        self._stage: Stage = "forward"
        self._mask: object = None

    def attach(self, model: Transformer, as_on_gpu: bool) -> None:
        model.register_forward_pre_hook(self._forward, prepend=True)
        model.register_forward_hook(self._loss)
        for number, block in enumerate(model.blocks):
            block.register_forward_pre_hook(partial(self._block, number), prepend=True)
            block.register_forward_hook(partial(self._after_block, number))
        if as_on_gpu and self._numbers is not None:
            model.register_forward_pre_hook(self._build_mask)
        if as_on_gpu:
            for norm in (m for m in model.modules() if isinstance(m, nn.RMSNorm)):
                self._fuse(norm)

    def begin(self, stage: Any, block: int | None) -> None:
        kinds = {"forward": ACTIVATIONS, "backward": BACKWARD}
        kind = kinds.get(stage, OTHER)
        if stage in ("forward", "reference") and block is None:
            kind = LOSS
        self._recorder.mark(StepPlace(stage, max(self._micro_step, 0), block), kind)

    def update(self, kind: int = OTHER) -> None:
        """From now on new tensors are of this kind."""
        if self._stage != "update":
            self._stage, self._mask = "update", None
            self._recorder.keep_gradients()
            self._recorder.mark(StepPlace("update"), kind)
        self._recorder.kind = kind

    @contextmanager
    def waiting(self, reason: str) -> Iterator[None]:
        """As `Progress.waiting`: what a whole step has summed is exchanged after its backwards."""
        if reason == _EXCHANGE and torch._C._current_graph_task_id() == -1:
            self.update(GRADIENTS)
        yield

    def _forward(self, module: nn.Module, inputs: object) -> None:
        self._recorder.keep_gradients()
        # In a micro step the reference comes first.
        behind_it = self._stage == "reference" and torch.is_grad_enabled()
        self._micro_step += not behind_it
        self._stage = "forward" if torch.is_grad_enabled() else "reference"
        self.begin(self._stage, -1)

    def _build_mask(self, module: nn.Module, inputs: object) -> None:
        """The mask of blocks, which is there until the next forward."""
        assert self._numbers is not None
        self._mask = block_mask(self._numbers)

    def _block(self, number: int, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.begin(self._stage, number)
        if number == 0 and inputs[0].requires_grad:
            inputs[0].register_hook(self._in_backward(-1))  # type: ignore[no-untyped-call]

    def _after_block(self, number: int, module: nn.Module, inputs: object, output: Tensor) -> None:
        self._expect_backward(output, number)
        if number == self._layers - 1:
            self.begin(self._stage, None)

    def _loss(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        self._expect_backward(output, None)

    def _expect_backward(self, output: Tensor, block: int | None) -> None:
        if output.requires_grad:
            output.register_hook(self._in_backward(block))  # type: ignore[no-untyped-call]

    def _in_backward(self, block: int | None) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            self.begin("backward", block)

        return hook

    def _fuse(self, norm: nn.Module) -> None:
        """Count a norm's forward as one kernel, which leaves only the output and a scale per
        row."""
        since = 0

        def before(module: nn.Module, inputs: object) -> None:
            nonlocal since
            since = self._recorder.met

        def after(module: nn.Module, inputs: object, output: Tensor) -> None:
            local = _local(output)
            scales = 4 * local.numel() // local.shape[-1]
            self._recorder.relabel_since(since, NOT_THERE, more_than=scales, but=local)

        norm.register_forward_pre_hook(before)
        norm.register_forward_hook(after)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if is_sharded(tensor) else tensor


def _state_of(optimizer: Optimizer) -> Iterator[Tensor]:
    for entries in optimizer.state.values():
        yield from (_local(value) for value in entries.values() if isinstance(value, Tensor))


def _saved_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """The bytes of a checkpoint of all ranks."""
    optimized = (value for state in optimizer.state.values() for value in state.values())
    saved = [*model.state_dict().values(), *optimized]
    return sum(t.numel() * t.element_size() for t in saved if isinstance(t, Tensor))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Disable the garbage collector, so that memory is freed exactly with the last reference."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            # About a tensor group's embedding, which is not changed in place.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
            yield
    finally:
        if was_enabled:
            gc.enable()
