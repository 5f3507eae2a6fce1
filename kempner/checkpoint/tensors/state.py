"""Converts model and optimizer state to a flat table of tensors, and back.

Keys are `model.<parameter>` and `optimizer.<parameter>.<entry>`. Hyper-parameters are not among
them: they follow from the configuration and the step.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kempner.checkpoint.format.contents import Contents, Saved
from kempner.run.process.exit_codes import DataError, UsageError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_OPTIMIZER = "optimizer."


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is a `DTensor`.

    Importing `DTensor` takes half as long as importing torch, and a process that is alone has none.
    Until somebody has imported it, no tensor can be one; another thread, that of a save, may be in
    the middle of it.
    """
    found = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return found is not None and isinstance(tensor, found)


def capture(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """References to every tensor of the state (no copies); sharded ones as DTensors.

    Raises `UsageError` if the optimizer steps parameters that the model no longer has: what it
    keeps for them would be missing in every checkpoint.
    """
    table = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    if strangers := len(optimizer.state.keys() - set(parameters.values())):
        raise UsageError(
            f"the optimizer has state for {strangers} parameters that the model does not have: "
            "they were replaced (by load_state_dict(assign=True)?); create the optimizer afterwards"
        )
    for name, parameter in parameters.items():
        for entry, value in optimizer.state.get(parameter, {}).items():
            table[f"{_OPTIMIZER}{name}.{entry}"] = value
    return table


def local_part(tensor: Tensor) -> Tensor:
    """The memory in which this rank holds its part."""
    return (tensor.to_local() if is_sharded(tensor) else tensor).detach()


class Binding:
    """The tensors of the state, looked up once.

    Looking them up takes milliseconds, at every save, of the thread that trains; `intact` takes
    microseconds, and tells when they must be looked up again: after `load_state_dict(assign=True)`,
    say, or while FSDP holds parameters unsharded.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.table = capture(model, optimizer)
        """What `capture` returned."""
        self._optimizer = optimizer
        self._states = list(optimizer.state.values())
        modules = (module._parameters for module in model.modules())
        holders: list[Mapping[str, Tensor | None]] = [*modules, *optimizer.state.values()]
        self._sizes = [(holder, len(holder)) for holder in holders]
        self._held = [
            (holder, name, tensor, _memory(tensor), _memory(tensor).data_ptr())
            for holder in holders
            for name, tensor in holder.items()
            if tensor is not None
        ]
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self.buffers = {
            key
            for key in self.table
            if not key.startswith(_OPTIMIZER) and key.removeprefix("model.") not in parameters
        }
        """Keys of what a forward pass may write, unlike parameters and optimizer state."""

    def intact(self) -> bool:
        """Whether model and optimizer still consist of these very tensors, at their addresses."""
        states = self._optimizer.state.values()
        if len(states) != len(self._states):
            return False
        if any(now is not then for now, then in zip(states, self._states, strict=True)):
            return False
        if any(len(holder) != size for holder, size in self._sizes):
            return False
        for holder, name, tensor, memory, address in self._held:  # thousands, at every save
            if (
                holder.get(name) is not tensor
                or _memory(tensor) is not memory
                or memory.data_ptr() != address
            ):
                return False
        return True


def _memory(tensor: Tensor) -> Tensor:
    # Not to_local(): it makes a tensor, and there are thousands to check.
    return tensor._local_tensor if is_sharded(tensor) else tensor


def create_optimizer_state(
    model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Saved]
) -> None:
    """Give the optimizer empty state of the saved shapes, for a load to fill.

    A fake step, the usual way to get there, would move counters. Raises `DataError` if the
    checkpoint has state for a parameter that the model lacks.
    """
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
            raise DataError(f"the checkpoint has {key}, but the model has no parameter {name}")
        parameter = parameters[name]
        dtype = getattr(torch, tensor.dtype)
        if tensor.shape == parameter.shape:
            value = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        else:
            device = parameter.device if on_device[id(parameter)] else torch.device("cpu")
            value = torch.zeros(tensor.shape, dtype=dtype, device=device)
        optimizer.state[parameter][entry] = value


def saved_optimizer_tensors(contents: Contents) -> dict[str, Saved]:
    """The optimizer's share of what a checkpoint holds."""
    tensors = contents.tensors
    return {key: saved for key, saved in tensors.items() if key.startswith(_OPTIMIZER)}


def check_shapes(table: Mapping[str, Tensor], contents: Contents) -> None:
    """Raise `DataError` unless the checkpoint holds just these tensors, by name, shape and type."""
    saved = contents.tensors
    if missing := sorted(table.keys() ^ saved.keys()):
        where = "checkpoint" if missing[0] in table else "model"
        raise DataError(f"{missing[0]} is missing in the {where} ({len(missing)} names differ)")
    for key, tensor in table.items():
        if saved[key].shape != tensor.shape:
            raise DataError(f"{key} has shape {tuple(tensor.shape)}, the checkpoint's differs")
        if f"torch.{saved[key].dtype}" != str(tensor.dtype):
            raise DataError(
                f"{key} is {tensor.dtype}, the checkpoint's is torch.{saved[key].dtype}"
            )
