"""Watches every operation of a step: the memory that it takes, what it computes, what it sends."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from kempner.training.plan.timeline import (
    BACKWARD,
    GATHERED,
    GRADIENTS,
    KINDS,
    OTHER,
    PARAMETERS,
    Collective,
    Place,
    Segment,
    Work,
)

_ATEN = torch.ops.aten
_ATTENTION = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: (0, 4),
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: (1, 10),
}
"""Where the queries are among the arguments, and FLOPs for each query, key and element of a head:
two products forward, five backward, one of which computes the scores again (Dao,
"FlashAttention-2", arXiv:2307.08691, section 4.1). Without a discount for the causal mask."""
_FREE_OF_CHARGE = frozenset({"empty", "empty_like", "new_empty", "empty_strided"})
"""What neither reads nor writes."""
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
    """Operation, bytes of its whole buffer, and process group, if `func` is a collective.

    None for any other function, and for the collectives of a scalar.
    """
    name = func._schema.name.partition("::")[2]
    if func.namespace not in ("c10d", _FUNCTIONAL) or name not in _OPERATIONS:
        return None
    if func.namespace == _FUNCTIONAL:
        parts = args[1] if name == "all_gather_into_tensor" else 1
        return _OPERATIONS[name], args[0].nbytes * parts, args[-1]
    # All-gathers list the output first, and reduce-scatters the input second.
    buffer = args[1] if name.startswith("_reduce_scatter") else args[0]
    tensors = [buffer] if isinstance(buffer, Tensor) else buffer
    if sum(tensor.numel() for tensor in tensors) <= 1:
        return None
    group = args[1] if name == "allreduce_" else args[2]
    return _OPERATIONS[name], sum(tensor.nbytes for tensor in tensors), group


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered, operation by operation.

    Memory is that of storages: one is there from the operation that returned it, or from its
    `resize_`, until nobody refers to it or it is resized to nothing. What a kernel allocates for
    itself only is not seen.

    Args:
        dimension: to which of the mesh a process group belongs, by its name.
    """

    def __init__(self, dimension: Callable[[str], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dimension = dimension
        self._event = 0
        self._deltas: list[tuple[int, int, int]] = []
        """At which event which storage has how many bytes more."""
        self._known: dict[int, int] = {}
        """Storages that are there, by their address."""
        self._references: dict[int, object] = {}
        self._kinds: list[int] = []
        self._sizes: list[int] = []
        self._segments: list[tuple[Place, int]] = []
        self._work: list[Work] = []
        self._sent: list[Counter[Collective]] = []
        self.kind = OTHER
        """Of what kind new tensors are."""

    def __enter__(self) -> Self:
        self._resize = UntypedStorage.resize_
        recorder, resize = self, self._resize

        def resize_(storage: UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            recorder._resized(storage)
            return result

        # FSDP frees and allocates so, and no operation tells of it.
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
            return NotImplemented  # a DTensor: what it does to its local tensor is what counts
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

    def mark(self, place: Place, kind: int) -> None:
        """A new part of the step begins, whose new tensors are of this kind, unless told."""
        self.kind = kind
        self._segments.append((place, self._event + 1))
        self._work.append(Counter())
        self._sent.append(Counter())

    @property
    def met(self) -> int:
        """How many storages there have been."""
        return len(self._kinds)

    def kind_of(self, tensor: Tensor) -> int | None:
        """What a tensor's storage is; None of one that was never seen."""
        number = self._known.get(tensor.untyped_storage()._cdata)
        return None if number is None else self._kinds[number]

    def label(self, tensors: Iterable[Tensor], kind: int) -> None:
        """Say what tensors are, from when they were made."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not self._meet(storage, kind) and storage._cdata in self._known:
                self._kinds[self._known[storage._cdata]] = kind

    def relabel_since(self, number: int, kind: int, more_than: int, but: Tensor) -> None:
        """As `label`, for storages met since there were `number`, of more bytes than so many."""
        kept = self._known.get(but.untyped_storage()._cdata)
        for storage in range(number, len(self._kinds)):
            if storage != kept and self._sizes[storage] > more_than:
                self._kinds[storage] = kind

    def keep_gradients(self) -> None:
        """What a backward has made and left behind is gradients."""
        for number in self._known.values():
            if self._kinds[number] == BACKWARD:
                self._kinds[number] = GRADIENTS

    def segments(self) -> list[Segment]:
        """All parts, from their marks on."""
        # The last column is what is not to be counted.
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
        """Take note of a storage; whether it is new."""
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
