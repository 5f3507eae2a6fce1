"""Converts model and optimizer state to a flat table of tensors, and back.

Keys are `model.<parameter>` and `optimizer.<parameter>.<entry>`; a Python number in an optimizer's
state is a zero-dimensional tensor under `optimizer.<parameter>.<entry>:number`. Hyperparameters are
not included: they follow from the configuration and the step.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kempner.checkpoint.format.contents import Contents, RenamedContents, Saved
from kempner.checkpoint.registered.composite import without_wrappers
from kempner.run.process.exit_codes import MismatchError, UsageError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_OPTIMIZER = "optimizer."
_NUMBER = ":number"
_NUMBER_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is a `DTensor`. Does not import `DTensor`, which takes half as long as
    importing torch: if it was not imported, or while the first save's thread imports it, no tensor
    can be one."""
    sharded = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return sharded is not None and isinstance(tensor, sharded)


def capture(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """References (no copies) to all tensors of the state; sharded ones are DTensors. Raises
    `UsageError` for state that a checkpoint cannot hold: other objects than plain tensors and
    DTensors, entries of the state dict that are copies, trained parameters missing in it, and
    optimizer state of parameters that the model no longer has."""
    table = {f"model.{name}": value for name, value in model.state_dict().items()}
    for key, value in table.items():
        _refuse_unless_tensor(key, value)
    _refuse_copies(model, table)
    parameters = dict(model.named_parameters())
    if strangers := len(optimizer.state.keys() - set(parameters.values())):
        raise UsageError(
            f"the optimizer has state for {strangers} parameters that the model does not have: "
            "they were replaced (by load_state_dict(assign=True)?); create the optimizer afterwards"
        )
    for name, entries in _states(model, optimizer):
        for entry, value in entries.items():
            key = _entry_key(name, entry, value)
            if type(value) in _NUMBER_DTYPES:
                value = torch.tensor(value, dtype=_NUMBER_DTYPES[type(value)])
            _refuse_unless_tensor(key, value)
            table[key] = value
    return table


def _states(
    model: nn.Module, optimizer: Optimizer
) -> Iterator[tuple[str, MutableMapping[str, Any]]]:
    """The optimizer's state of each named parameter."""
    for name, parameter in model.named_parameters():
        yield name, optimizer.state.get(parameter, {})


def _entry_key(name: str, entry: object, value: object) -> str:
    if not isinstance(entry, str) or "." in entry or entry.endswith(_NUMBER):
        raise UsageError(
            f"the optimizer keeps {entry!r} for {name}, and a checkpoint only holds entries whose "
            "names are strings without a dot"
        )
    return f"{_OPTIMIZER}{name}.{entry}{_NUMBER if type(value) in _NUMBER_DTYPES else ''}"


def _refuse_unless_tensor(key: str, value: object) -> None:
    """Raise `UsageError` for a value without plain memory that could be copied and filled."""
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        raise UsageError(
            f"{key} is of type {kind}; a checkpoint only holds tensors, and numbers of optimizers"
        )
    memory = _memory(value)
    try:
        memory.untyped_storage().data_ptr()
        usable = memory.device.type != "meta" and not memory.is_quantized
    except (RuntimeError, NotImplementedError, ValueError):  # wrappers; sparse ones; lazy ones
        usable = False
    if not usable:
        kind = "lazy" if nn.parameter.is_lazy(memory) else str(memory.layout)
        raise UsageError(
            f"{key} is a {type(memory).__name__} ({kind}, on {memory.device}), and a checkpoint "
            "only holds plain tensors and DTensors of them"
        )


def _refuse_copies(model: nn.Module, table: Mapping[str, Tensor]) -> None:
    """Raise `UsageError` unless the state dict shares the model's memory and has all trained
    parameters."""
    own = _storages(chain(model.parameters(), model.buffers()))
    for key, tensor in table.items():
        if not own.issuperset(_storages([tensor])):
            raise UsageError(
                f"{key} of model.state_dict() is a copy, not the memory of a parameter or buffer, "
                "so that a checkpoint could not be loaded into it: state_dict hooks that copy or "
                "convert and FullyShardedDataParallel are not supported; fully_shard is"
            )
    saved = _storages(table.values())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not saved.issuperset(_storages([parameter])):
            raise UsageError(
                f"{name} is trained, but model.state_dict() leaves it out, so that no checkpoint "
                "would contain it"
            )


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    """The addresses of the storages that are not empty."""
    memories = (_memory(tensor) for tensor in tensors)
    return {m.untyped_storage().data_ptr() for m in memories if m.numel()}


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element: the type as which its bits are read."""


def local_part(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if is_sharded(tensor) else tensor).detach()


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """As `local_part`, for many tensors."""
    if (sharded := getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)) is None:
        return [tensor.detach() for tensor in tensors]
    return [(t.to_local() if isinstance(t, sharded) else t).detach() for t in tensors]


def _held(
    model: nn.Module, holders: Iterable[Mapping[str, object]]
) -> list[tuple[Mapping[str, object], str, Tensor, Tensor, int]]:
    unsaved = {
        (id(module._buffers), name)
        for module in model.modules()
        for name in module._non_persistent_buffers_set
    }
    return [
        (holder, name, tensor, _memory(tensor), _memory(tensor).data_ptr())
        for holder in holders
        for name, tensor in holder.items()
        if isinstance(tensor, Tensor) and (id(holder), name) not in unsaved
    ]


class Binding:
    """The tensors of the state, looked up once. A lookup takes milliseconds of the training thread;
    `intact` takes microseconds, and says whether another lookup is needed, as after
    `load_state_dict(assign=True)` or while FSDP holds parameters unsharded."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.table = capture(model, optimizer)  # what `capture` returned
        self._optimizer = optimizer
        self._states = list(optimizer.state.values())
        modules: list[Mapping[str, object]] = [module._parameters for module in model.modules()]
        modules += [module._buffers for module in model.modules()]
        holders: list[Mapping[str, object]] = [*modules, *optimizer.state.values()]
        parts = [module._modules for module in model.modules()]
        self._parts = [(h, name, part) for h in parts for name, part in h.items()]
        self._sizes = [(holder, len(holder)) for holder in (*holders, *parts)]
        self._empty = [(h, name) for h in modules for name, value in h.items() if value is None]
        self._held = _held(model, holders)
        self._numbers = [
            (state, entry, type(value), self.table[_entry_key(name, entry, value)])
            for name, state in _states(model, optimizer)
            for entry, value in state.items()
            if type(value) in _NUMBER_DTYPES
        ]
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self.buffers = {
            key
            for key in self.table
            if not key.startswith(_OPTIMIZER) and key.removeprefix("model.") not in parameters
        }  # keys of buffers, which a forward pass may write
        trained = {
            f"model.{name}"
            for name, parameter in parameters.items()
            if parameter.requires_grad or parameter in optimizer.state
        }
        self.frozen = self.table.keys() & {f"model.{name}" for name in parameters} - trained
        """Keys of parameters that are not trained."""
        self.numbers = {key for key in self.table if key.endswith(_NUMBER)}
        """Keys of the optimizer's Python numbers."""
        self._parameters = parameters

    def read_numbers(self) -> None:
        """Update the table's copies of the optimizer's Python numbers."""
        for state, entry, _, tensor in self._numbers:
            tensor.fill_(state[entry])

    def written_as(self, key: str) -> tuple[Tensor, ...]:
        """The tensors whose version counters count writes to the tensor of `key`. A DTensor and its
        local tensor count separately, and the DTensor in a state dict shares only the former's
        counter."""
        tensor = self.table[key]
        if not key.startswith(_OPTIMIZER):
            tensor = self._parameters.get(key.removeprefix("model."), tensor)
        return (tensor, _memory(tensor)) if is_sharded(tensor) else (tensor,)

    def intact(self) -> bool:
        """Whether model and optimizer still consist of the same tensors, at the same addresses."""
        states = self._optimizer.state.values()
        if len(states) != len(self._states):
            return False
        if any(now is not then for now, then in zip(states, self._states, strict=True)):
            return False
        if any(len(holder) != size for holder, size in self._sizes):
            return False
        if any(holder.get(name) is not None for holder, name in self._empty):
            return False
        if any(holder.get(name) is not part for holder, name, part in self._parts):
            return False
        if any(type(state.get(entry)) is not kind for state, entry, kind, _ in self._numbers):
            return False
        for holder, name, tensor, memory, address in self._held:  # fast: thousands, at every save
            if (
                holder.get(name) is not tensor
                or _memory(tensor) is not memory
                or memory.data_ptr() != address
            ):
                return False
        return True


def _memory(tensor: Tensor) -> Tensor:
    # Not to_local(), which creates a tensor: there are thousands to check.
    return tensor._local_tensor if is_sharded(tensor) else tensor


def create_optimizer_state(
    model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Saved]
) -> None:
    """Create optimizer state of the saved shapes, for a load to fill. (A fake step, as is common,
    would advance counters.) Raises `MismatchError` if the checkpoint has state of a parameter that
    the model lacks."""
    parameters = dict(model.named_parameters())
    on_device = {
        id(parameter): bool(group.get("fused") or group.get("capturable"))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    optimizer.state.clear()
    for key, tensor in saved.items():
        name, _, entry = key.removeprefix(_OPTIMIZER).rpartition(".")
        if name not in parameters:
            raise MismatchError(
                f"the checkpoint has {key}, but the model has no parameter {name}; {_BUILD_IT}"
            )
        parameter = parameters[name]
        dtype = getattr(torch, tensor.dtype)
        if entry.endswith(_NUMBER):
            number = torch.zeros((), dtype=dtype).item()
            optimizer.state[parameter][entry.removesuffix(_NUMBER)] = number
            continue
        if tensor.shape == parameter.shape:
            value = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        else:
            device = parameter.device if on_device.get(id(parameter)) else torch.device("cpu")
            value = torch.zeros(tensor.shape, dtype=dtype, device=device)
        optimizer.state[parameter][entry] = value


def adopt_numbers(model: nn.Module, optimizer: Optimizer, table: Mapping[str, Tensor]) -> None:
    """Set the optimizer's Python numbers from a `table` that a load has filled."""
    for name, entries in _states(model, optimizer):
        for entry, value in entries.items():
            if type(value) in _NUMBER_DTYPES:
                entries[entry] = table[_entry_key(name, entry, value)].item()


def check_names(table: Mapping[str, Tensor], begun: Collection[str]) -> None:
    """Raise `UsageError` if the model has other parameters or buffers than at the start
    (`begun`)."""
    now = {key for key in table if not key.startswith(_OPTIMIZER)}
    if differing := sorted(now.symmetric_difference(begun)):
        key = differing[0]
        how = "appeared after the start" if key in now else "is gone since the start"
        raise UsageError(
            f"{key} {how}, and a resumed run, which begins without that change, could not load a "
            "checkpoint of it: create or remove parameters, buffers and adapters before the start"
        )


def by_plain_names(contents: Contents, model: nn.Module) -> Contents:
    """`contents` under the names of `model`, if the saved names contain other wrapper modules."""
    names = {*model.state_dict(), *(name for name, _ in model.named_parameters())}
    plain = {without_wrappers(name): name for name in names}
    before: dict[str, str] = {}
    for key in contents.tensors:
        kind, _, rest = key.partition(".")
        name, dot, entry = rest.rpartition(".") if key.startswith(_OPTIMIZER) else (rest, "", "")
        known = name if name in names else plain.get(without_wrappers(name), name)
        before[f"{kind}.{known}{dot}{entry}"] = key
    renamed = len(before) == len(contents.tensors) and any(
        new != old for new, old in before.items()
    )
    return RenamedContents(contents, before) if renamed else contents


def saved_optimizer_tensors(contents: Contents) -> dict[str, Saved]:
    tensors = contents.tensors
    return {key: saved for key, saved in tensors.items() if key.startswith(_OPTIMIZER)}


_BUILD_IT = "build model and optimizer as they were, or begin a run in another folder"


def check_shapes(table: Mapping[str, Tensor], contents: Contents, others: bool = False) -> None:
    """Raise `MismatchError` unless the checkpoint has exactly these tensors, by name, shape and
    dtype; with `others` it may have more."""
    saved = contents.tensors
    names = table.keys() & saved.keys() if others else saved.keys()
    if missing := sorted(table.keys() ^ names):
        where = "checkpoint" if missing[0] in table else "model"
        raise MismatchError(
            f"{missing[0]} is missing in the {where} ({len(missing)} names differ); {_BUILD_IT}"
        )
    for key, tensor in table.items():
        if saved[key].shape != tensor.shape:
            now, before = tuple(tensor.shape), tuple(saved[key].shape)
            raise MismatchError(f"{key} has shape {now}, the checkpoint's {before}; {_BUILD_IT}")
        if f"torch.{saved[key].dtype}" != str(tensor.dtype):
            raise MismatchError(
                f"{key} is {tensor.dtype}, the checkpoint's is torch.{saved[key].dtype}; "
                f"{_BUILD_IT}"
            )
