"""Combines several modules into one, and several optimizers into one, for saving and loading
tensors.

Parameters of the first module keep their names; those of the others are `<name>/<parameter>`.
Wrapper modules, such as those of `torch.compile` and `DistributedDataParallel`, are left out of
names, so that a run may resume with other wrappers."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from itertools import chain
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from kempner.run.process.exit_codes import UsageError

_WRAPPERS = {
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "module",
    ("torch.nn.parallel.data_parallel", "DataParallel"): "module",
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
    ): "_checkpoint_wrapped_module",
    ("lightning.fabric.wrappers", "_FabricModule"): "_forward_module",
}  # module and name of each wrapper class, and its attribute with the wrapped module


def unwrap(module: nn.Module) -> nn.Module:
    kinds = _imported_classes()
    while (attribute := _attribute(module, kinds)) is not None:
        module = module._modules[attribute]  # type: ignore[assignment]
    return module


def has_wrappers(module: nn.Module) -> bool:
    kinds = tuple(_imported_classes())
    return any(issubclass(kind, kinds) for kind in {type(part) for part in module.modules()})


def plain_name(module: nn.Module, name: str) -> str:
    """The name of a parameter or buffer of `module` without wrapper modules, some of which a state
    dict may have left out itself."""
    kinds, kept, at = _imported_classes(), [], module
    for part in name.split("."):
        while (attribute := _attribute(at, kinds)) is not None:
            at = at._modules[attribute]  # type: ignore[assignment]
            if part == attribute:
                break
        else:
            kept.append(part)
            at = at._modules.get(part) or _NOTHING
    return ".".join(kept)


def without_wrappers(name: str) -> str:
    """As `plain_name`, without the module: removes the wrappers' usual attribute names."""
    return _USUAL.sub("", name)


_USUAL = re.compile(rf"(?<![^./])(?:{'|'.join(sorted(set(_WRAPPERS.values())))})\.")
_NOTHING = nn.Module()


def _imported_classes() -> Mapping[type, str]:
    """The wrapper classes that are already imported: importing torch's compiler takes seconds."""
    found = {}
    for (home, name), attribute in _WRAPPERS.items():
        if (kind := getattr(sys.modules.get(home), name, None)) is not None:
            found[kind] = attribute
    return found


def _attribute(module: nn.Module, kinds: Mapping[type, str]) -> str | None:
    for kind, attribute in kinds.items():
        if isinstance(module, kind):
            return attribute
    return None


T = TypeVar("T")


class Modules(nn.Module):
    """A module and others registered by name, as one module without wrappers. `wrapped` are the
    modules as given."""

    def __init__(self, first: nn.Module, others: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.wrapped = (first, *others.values())
        starts = ["", *(f"{name}/" for name in others)]
        self._named = dict(zip(starts, map(unwrap, self.wrapped), strict=True))
        for at, module in enumerate(self._named.values()):
            self.add_module(str(at), module)

    def state_dict(self, *arguments: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        return {
            start + name: value
            for start, module in self._named.items()
            for name, value in _plain(module, module.state_dict(*arguments, **options).items())
        }

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of all modules; one that two modules share has its first name."""
        seen: set[nn.Parameter] = set()
        for start, module in self._named.items():
            found = module.named_parameters(prefix, recurse, remove_duplicate)
            for name, parameter in _plain(module, found):
                if not (remove_duplicate and parameter in seen):
                    seen.add(parameter)
                    yield start + name, parameter


def plainly_named(model: nn.Module) -> nn.Module:
    """A module with the state of `model`, whose names do not depend on wrappers."""
    if isinstance(model, Modules) or not has_wrappers(model):
        return model
    return Modules(model, {})


def _plain(module: nn.Module, named: Iterable[tuple[str, T]]) -> Iterable[tuple[str, T]]:
    if not has_wrappers(module):
        return named
    return [(plain_name(module, name), value) for name, value in named]


class Optimizers(Optimizer):
    """Several optimizers as one; each parameter belongs to one of them."""

    def __init__(self, all_of_them: Iterable[Optimizer]) -> None:
        # Without Optimizer's constructor, since this one never steps.
        self._all = list(all_of_them)
        self.state = _States(self._all)  # type: ignore[assignment]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [*chain.from_iterable(optimizer.param_groups for optimizer in self._all)]


class _States(MutableMapping[Tensor, Any]):
    """The states of all parameters, each in its own optimizer."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self._optimizers = optimizers
        self._owners: dict[Tensor, Optimizer] = {}
        self._sizes: list[int] = []
        self._of(None)  # raises if two optimizers share a parameter

    def _of(self, parameter: Tensor | None) -> Optimizer | None:
        """The optimizer of a parameter, which may have been added since."""
        groups = [group["params"] for one in self._optimizers for group in one.param_groups]
        if (sizes := [*map(len, groups)]) != self._sizes:
            self._owners, self._sizes = _owners(self._optimizers), sizes
        return None if parameter is None else self._owners.get(parameter)

    def _state(self, parameter: Tensor) -> MutableMapping[Tensor, Any]:
        optimizer = self._of(parameter)
        if optimizer is None:
            raise KeyError(parameter)
        return optimizer.state

    def __getitem__(self, parameter: Tensor) -> Any:
        return self._state(parameter)[parameter]

    def __setitem__(self, parameter: Tensor, value: Any) -> None:
        self._state(parameter)[parameter] = value

    def __delitem__(self, parameter: Tensor) -> None:
        del self._state(parameter)[parameter]

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        """As `dict.get`: creates no entry."""
        optimizer = self._of(parameter)
        return default if optimizer is None else optimizer.state.get(parameter, default)

    def __iter__(self) -> Iterator[Tensor]:
        return chain.from_iterable(optimizer.state for optimizer in self._optimizers)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)

    def clear(self) -> None:
        for optimizer in self._optimizers:
            optimizer.state.clear()


def _owners(optimizers: Iterable[Optimizer]) -> dict[Tensor, Optimizer]:
    owners: dict[Tensor, Optimizer] = {}
    for optimizer in optimizers:
        for parameter in chain.from_iterable(g["params"] for g in optimizer.param_groups):
            if owners.setdefault(parameter, optimizer) is not optimizer:
                raise UsageError(
                    "two optimizers have the same parameter, and a checkpoint holds one state "
                    "for each: give every parameter to one of them"
                )
    return owners
