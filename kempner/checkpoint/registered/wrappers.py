"""Modules that wrap another one, such as `torch.compile` and `DistributedDataParallel` return.

A parameter has the name that it has without them, so that a run may go on with others.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping

from torch import nn

_WRAPPERS = {
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "module",
    ("torch.nn.parallel.data_parallel", "DataParallel"): "module",
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
    ): "_checkpoint_wrapped_module",
    ("lightning.fabric.wrappers", "_FabricModule"): "_forward_module",
}
"""Where each class is, and under which name it has the module that it wraps."""


def unwrap(module: nn.Module) -> nn.Module:
    """The module within all that wraps it, or the module itself."""
    kinds = _imported()
    while (attribute := _attribute(module, kinds)) is not None:
        module = module._modules[attribute]  # type: ignore[assignment]
    return module


def has_wrappers(module: nn.Module) -> bool:
    """Whether any part of it is wrapped."""
    kinds = tuple(_imported())
    return any(issubclass(kind, kinds) for kind in {type(part) for part in module.modules()})


def plain_name(module: nn.Module, name: str) -> str:
    """The name of a parameter or buffer of `module` without what wraps the modules on its way.

    A state dict may have left out some of them by itself.
    """
    kinds, kept, at = _imported(), [], module
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
    """As `plain_name` of a name alone, where the module is not there: by the usual names."""
    return _USUAL.sub("", name)


_USUAL = re.compile(rf"(?<![^./])(?:{'|'.join(sorted(set(_WRAPPERS.values())))})\.")
_NOTHING = nn.Module()


def _imported() -> Mapping[type, str]:
    """Those of the classes that anything has imported: torch's compiler takes seconds."""
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
