"""Builds a model ready to train: sharded, materialised, initialised."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from kempner.config.sections import Config, TrainSection
from kempner.model.float8 import use_float8
from kempner.model.init import fill_rotary, initialise
from kempner.model.spec.communication import EACH_MICRO_BATCH, Choice
from kempner.model.spec.shape import Shape
from kempner.model.transformer import Transformer

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def build_model(
    config: Config,
    vocab_size: int,
    device: torch.device,
    mesh: DeviceMesh | None,
    choice: Choice = EACH_MICRO_BATCH,
) -> Transformer:
    """The model of a run, with float32 weights drawn from `train.seed`.

    Weights are the same bits for every mesh. In a world of more than one rank, parameters are
    `DTensor` shards over `mesh` and gradients come out as the sum, not the mean, over the ranks
    that have samples of their own: divide the loss by the global number of tokens. A single rank
    keeps plain tensors.

    Args:
        config: the run's configuration; reads `model` and, of `train`, the seed, the
            compute type and what saves memory.
        vocab_size: number of token ids.
        device: where the parameters live.
        mesh: all ranks, on `device`'s type (Gloo for CPU, NCCL for CUDA): one dimension to shard
            over, or the named ones of `MeshDegrees`; None for a process that is alone.
        choice: whether parameters are kept between forward and backward.

    Raises `UsageError` if `train.fp8` is asked for in vain.
    """
    model = assemble(config, vocab_size, device, mesh, choice)
    initialise(model, config.train.seed)
    return model


def assemble(
    config: Config,
    vocab_size: int,
    device: torch.device,
    mesh: DeviceMesh | None,
    choice: Choice = EACH_MICRO_BATCH,
) -> Transformer:
    """As `build_model`, with weights and positions of any content."""
    dtype = compute_dtype(config.train.dtype, device)
    with torch.device("meta"):
        model = Transformer(Shape.of(config.model, vocab_size))
    _choose_memory(model, config.train)
    if config.train.fp8:
        use_float8(model, device, config.train.micro_batch_size * config.train.seq_len)
    if mesh is not None and mesh.size() > 1:
        if "tensor" in (mesh.mesh_dim_names or ()):
            # A run without tensor parallelism is spared the import.
            from kempner.model.parallel.tensor import parallelize

            parallelize(model, mesh["tensor"])
        shard(model, data_parallel(mesh), dtype, choice)
        model.to_empty(device=device)
    else:
        model.autocast_dtype = None if dtype is torch.float32 else dtype
        allocate(model, device)
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


def data_parallel(mesh: DeviceMesh) -> DeviceMesh:
    """What of a mesh `shard` takes: ranks with samples of their own."""
    names = mesh.mesh_dim_names or ()
    if "tensor" not in names:
        return mesh
    # Also where it is a single rank: FSDP casts, and adds up what tensor ranks know of a norm.
    return mesh["replicate", "shard"] if "replicate" in names else mesh["shard"]


def shard(
    model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, choice: Choice = EACH_MICRO_BATCH
) -> None:
    """Shard a model's parameters over the mesh with FSDP2, in place.

    Each block of the `ModuleList` called `layers` is gathered by itself, and what is left of the
    model at once; all of it, if there is no such list. Of a `Transformer` the embedding is gathered
    by itself, too, and the last norm with the output projection, unless they are one and the same;
    the next in either direction is gathered beside the one at work, and what the backward begins
    with stays gathered.

    Parameters, gradients and optimizer state stay float32; blocks are gathered in `dtype` and
    gradients are summed over the ranks in float32. After a forward without gradients nothing stays
    gathered: stale full parameters would be left behind for whoever changes the shards next.

    Args:
        model: on any device, meta included.
        mesh: one-dimensional; or replicas x shards, over the first of which gradients are summed
            once a step, after the reduce-scatter over the second.
        dtype: compute type.
        choice: whether parameters are kept between forward and backward.
    """
    # A process that is alone shards nothing, and is spared the import.
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    # Inputs are not cast: the rotary table would lose its float32 on the way into each block, and
    # everything else that goes in is computed from gathered weights, in `dtype` already.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    fsdp = partial(fully_shard, mesh=mesh, mp_policy=policy)
    if isinstance(model, Transformer):
        _shard_in_order(model, fsdp, choice.keep_parameters)
    else:
        for module in (*_blocks(model), model):
            fsdp(module, reshard_after_forward=not choice.keep_parameters)
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        _sum_gradients(module)

    def free(*_: object) -> None:
        if not torch.is_grad_enabled():
            for module in sharded:
                module.reshard()

    model.register_forward_hook(free)


def _shard_in_order(model: Transformer, fsdp: Callable[..., Any], keep: bool) -> None:
    """Shard what a forward uses, one after the other; each is gathered while its neighbour works.

    What a forward ends with is not freed for the backward to gather it again at once. A tied
    embedding is part of both ends: it stays with the root, which is gathered all the time.
    """
    *blocks, last = model.layers
    chain: list[FSDPModule] = [fsdp(block, reshard_after_forward=not keep) for block in blocks]
    chain.append(fsdp(last, reshard_after_forward=False))
    for one, following in pairwise(chain):
        following.set_modules_to_backward_prefetch([one])
    if model.output is not None:
        embed: FSDPModule = fsdp(model.embed, reshard_after_forward=not keep)
        embed.set_unshard_in_backward(False)  # which needs the rows' number only
        head: list[FSDPModule] = fsdp([model.norm, model.output], reshard_after_forward=False)
        head[0].set_modules_to_backward_prefetch([chain[-1]])
        chain = [embed, *chain, head[0]]
    root: FSDPModule = fsdp(model, reshard_after_forward=False)
    for one, following in pairwise([root, *chain]):
        one.set_modules_to_forward_prefetch([following])


def _blocks(model: nn.Module) -> list[nn.Module]:
    layers = getattr(model, "layers", None)
    return [*layers] if isinstance(layers, nn.ModuleList) else []


def _sum_gradients(module: FSDPModule) -> None:
    """Make a module's gradients the sum over ranks, with the one reduction every backend has."""
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
