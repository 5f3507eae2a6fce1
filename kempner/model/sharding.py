"""Builds a model ready to train: sharded, materialised, initialised."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from kempner.config.sections import Config, TrainSection
from kempner.model.float8 import use_float8
from kempner.model.init import fill_rotary, initialise
from kempner.model.spec.shape import Shape
from kempner.model.transformer import Transformer

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def build_model(
    config: Config, vocab_size: int, device: torch.device, mesh: DeviceMesh | None
) -> Transformer:
    """The model of a run, with float32 weights drawn from `train.seed`.

    Weights are the same bits for every world. In a world of more than one rank, parameters are
    `DTensor` shards over `mesh` and gradients come out as the sum, not the mean, over its ranks:
    divide the loss by the global number of tokens. A single rank keeps plain tensors.

    Args:
        config: the run's configuration; reads `model` and, of `train`, the seed, the
            compute type and what saves memory.
        vocab_size: number of token ids.
        device: where the parameters live.
        mesh: the data-parallel ranks, one-dimensional, on `device`'s type (Gloo for CPU, NCCL
            for CUDA); None for a process that is alone.

    Raises `UsageError` if `train.fp8` is asked for in vain.
    """
    dtype = compute_dtype(config.train.dtype, device)
    with torch.device("meta"):
        model = Transformer(Shape.of(config.model, vocab_size))
    _choose_memory(model, config.train)
    if config.train.fp8:
        use_float8(model, device, config.train.micro_batch_size * config.train.seq_len)
    if mesh is not None and mesh.size() > 1:
        shard(model, mesh, dtype)
        model.to_empty(device=device)
    else:
        model.autocast_dtype = None if dtype is torch.float32 else dtype
        allocate(model, device)
    initialise(model, config.train.seed)
    return model


def _choose_memory(model: Transformer, train: TrainSection) -> None:
    """What the model keeps for its backward, and how much of its logits exists at once."""
    model.loss_chunk = train.loss_chunk
    if train.activation_checkpointing != "none":
        for block in model.blocks[:: train.activation_checkpointing_every or 1]:
            block.checkpointing = train.activation_checkpointing


def build_to_load(shape: Shape, dtype: torch.dtype, device: torch.device) -> Transformer:
    """A model on one device, to generate with; its parameters are of any content, to be loaded.

    `dtype` is the type in which matrices multiply.
    """
    with torch.device("meta"):
        model = Transformer(shape)
    model.autocast_dtype = None if dtype is torch.float32 else dtype
    allocate(model, device)
    fill_rotary(model)
    return model.eval()


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give plain parameters and buffers memory on `device`, its content undefined.

    `to_empty` does so, too, but from the meta device it imports sympy, to reason about strides.
    """
    for module in model.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            memory = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            setattr(module, name, nn.Parameter(memory, parameter.requires_grad))
        for name, buffer in [*module.named_buffers(recurse=False)]:
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))


def compute_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """The type in which matrices multiply.

    As `wanted` by `train.dtype`, of which "auto" is bfloat16 on CUDA and float32 on CPU.
    """
    if wanted == "auto":
        wanted = "bfloat16" if device.type == "cuda" else "float32"
    return torch.bfloat16 if wanted == "bfloat16" else torch.float32


def shard(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shard a model's parameters over the mesh with FSDP2, in place.

    Each block of the `ModuleList` called `layers` is gathered by itself, and what is left of the
    model at once; all of it, if there is no such list.

    Parameters, gradients and optimizer state stay float32; blocks are gathered in `dtype` and
    gradients are summed over the ranks in float32.

    Args:
        model: on any device, meta included.
        mesh: one-dimensional.
        dtype: compute type.
    """
    # A process that is alone shards nothing, and is spared the import.
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # Inputs are not cast: the rotary table would lose its float32 on the way into each block, and
    # everything else that goes in is computed from gathered weights, in `dtype` already.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for module in (*_blocks(model), model):
        # Not left to the default, which keeps the root gathered after a forward: an evaluation
        # would then leave stale full parameters behind for whoever changes the shards next.
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        _sum_gradients(sharded)


def _blocks(model: nn.Module) -> list[nn.Module]:
    layers = getattr(model, "layers", None)
    return [*layers] if isinstance(layers, nn.ModuleList) else []


def _sum_gradients(module: FSDPModule) -> None:
    """Make a module's gradients the sum over ranks, with the one reduction every backend has."""
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
