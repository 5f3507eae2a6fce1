"""Builds a model of the user's own: `model.factory` names a function that returns a module.

The module is created whole on the CPU of every rank, under the run's seed, and only then sharded:
so its weights are the same bits for every world, whatever way it initialises itself.
"""

from __future__ import annotations

import importlib
import random
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from kempner.config.sections import Config
from kempner.model.sharding import compute_dtype, shard
from kempner.model.spec.communication import EACH_MICRO_BATCH, Choice
from kempner.run.process.exit_codes import UsageError


def create(config: Config, vocab_size: int) -> nn.Module:
    """What `model.factory` makes of `model.options`, whole, float32, on the CPU. Raises
    `UsageError` if there is no such function, or it returns something that kempner cannot train.
    What the function itself raises goes on as it is."""
    name, options = str(config.model.factory), dict(config.model.options or {})
    function = _find(name)
    seed = config.train.seed
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        model = function(options, vocab_size)
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise UsageError(f"model.factory={name} returned a {kind}; it must return a torch module")
    for refusal in _refusals(model):
        raise UsageError(f"model.factory={name} cannot be trained: {refusal}")
    return model


def digest(model: nn.Module) -> str:
    """A checksum of all weights and buffers, the same wherever they are."""
    whole = xxhash.xxh3_128()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        whole.update(name.encode())
        whole.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    return whole.hexdigest()


def place(
    model: nn.Module,
    config: Config,
    vocab_size: int,
    device: torch.device,
    mesh: DeviceMesh | None,
    choice: Choice = EACH_MICRO_BATCH,
) -> nn.Module:
    """Bring what `create` returned to its device, sharded in a world of more than one rank. As with
    `build_model`, matrices multiply in `train.dtype`, and gradients come out as sums."""
    dtype = compute_dtype(config.train.dtype, device)
    if mesh is not None and mesh.size() > 1:
        # FSDP warns of logits that are a view, which many modules return: nothing is done to them
        # in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
        shard(model, mesh, dtype, choice)
    model.to(device)
    model.forward = _checked(model.forward, str(config.model.factory), vocab_size, device, dtype)
    return model


def _find(name: str) -> Callable[..., object]:
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    beside = [] if here in sys.path else [here]
    sys.path[:0] = beside  # as Python does for a program that lies there
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks another
        raise UsageError(
            f"model.factory={name}: there is no module {error.name} in the working directory, on "
            "PYTHONPATH or among the installed packages"
        ) from None
    finally:
        if beside:  # what Python itself imports later is not to be found there first
            sys.path.remove(here)
            sys.path.append(here)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UsageError(f"model.factory={name}: the module {module_name} has no {attribute}")
        found = getattr(found, part)
    if not callable(found):
        kind = type(found).__name__
        raise UsageError(f"model.factory={name} is a {kind}; it must be a function, or a class")
    function: Callable[..., object] = found
    return function


def _refusals(model: nn.Module) -> list[str]:
    """Why a module cannot be trained; empty if it can."""
    names: dict[Tensor, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    if not names:
        return ["it has no parameters"]
    found = []
    for tensor, called in names.items():
        if tensor.device.type != "cpu" or tensor.dtype != torch.float32:
            found.append(
                f"{called[0]} is {tensor.dtype} on {tensor.device}; create it as float32 on "
                "the CPU, and kempner brings it where it belongs"
            )
        elif tensor.ndim == 0:
            found.append(f"{called[0]} has no dimension to shard; give it shape [1]")
        elif len({_block_of(name) for name in called}) > 1:
            found.append(f"{' and '.join(called)} are one parameter, but not of one block")
    parameters = {name for called in names.values() for name in called}
    if kept := [key for key in model.state_dict() if key not in parameters]:
        found.append(
            f"its buffer {kept[0]} is part of its state_dict, and could differ between the ranks; "
            "register it with persistent=False if it is constant, or make it a parameter"
        )
    return found


def _block_of(name: str) -> str:
    """The block that a parameter is sharded with; empty for the rest of the model."""
    parts = name.split(".")
    return parts[1] if parts[0] == "layers" else ""


def _checked(
    forward: Callable[[Tensor], object],
    name: str,
    vocab_size: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Callable[[Tensor], Tensor]:
    """`forward` in the compute type, refused if it does not return logits."""

    @wraps(forward)
    def run(tokens: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
            logits = forward(tokens)
        expected = (*tokens.shape, vocab_size)
        if not isinstance(logits, Tensor) or tuple(logits.shape) != expected:
            what = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise UsageError(
                f"model.factory={name}: the module returned {what} for tokens of shape "
                f"{list(tokens.shape)}; it must return logits of shape {list(expected)}"
            )
        return logits

    return run
