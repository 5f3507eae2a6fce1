"""Builds a model ready to train: sharded, materialised, initialised.

Matrix products of the blocks in eight bits, with torchao.

Initial weights, bit-identical for every world size and sharding.

Every parameter is cut into blocks of rows. The numbers of a block come from a generator of its
own, seeded by (seed, parameter name, block), so that a rank makes only the blocks that its shard
touches and needs nothing from the others. Bits agree between machines of one processor type.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from kempner.config.sections import Config, TrainSection
from kempner.model.spec.communication import EACH_MICRO_BATCH, Choice
from kempner.model.spec.shape import Shape
from kempner.model.transformer import Transformer, rotary_table
from kempner.run.process.exit_codes import UsageError

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


_MULTIPLE = 16
"""What the widths of a product must be multiples of (`torch._scaled_mm`)."""
_CAPABILITY = (8, 9)
"""The first GPUs that multiply float8: Ada, Hopper."""


def use_float8(
    model: Transformer, device: torch.device, tokens: int, emulate: bool = False
) -> None:
    """Have every linear layer of the blocks round what it multiplies to float8.

    Each tensor is scaled by its largest element (Micikevicius et al., "FP8 Formats for Deep
    Learning", arXiv:2209.05433). Parameters stay as they are, and so do their names; embedding,
    output and attention are as ever.

    Args:
        model: not sharded yet; on the meta device.
        device: where it will be.
        tokens: of a micro batch.
        emulate: round, but multiply in a wider type, as any device can.

    Raises `UsageError` if torchao is missing, or device or sizes cannot do it.
    """
    if not emulate:
        _refuse(model, device, tokens)
    try:
        from torchao.float8 import (  # type: ignore[import-untyped]
            Float8LinearConfig,
            convert_to_float8_training,
        )
    except ImportError:
        raise UsageError(
            "train.fp8 needs the package torchao: pip install 'kempner[fp8]'"
        ) from None
    convert_to_float8_training(model.layers, config=Float8LinearConfig(emulate=emulate))


def _refuse(model: Transformer, device: torch.device, tokens: int) -> None:
    if device.type != "cuda":
        raise UsageError("train.fp8 needs a GPU; remove it, or train on one")
    if (found := torch.cuda.get_device_capability(device)) < _CAPABILITY:
        raise UsageError(
            f"train.fp8 needs a GPU that multiplies float8, of compute capability "
            f"{'.'.join(map(str, _CAPABILITY))} or later; "
            f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, found))}: remove it"
        )
    shape = model.shape
    widths = {
        "model.dim": shape.dim,
        "the width of all query heads": shape.q_dim,
        "the width of all key heads": shape.kv_dim,
        "model.ffn_dim": shape.ffn_dim,
        "train.micro_batch_size * train.seq_len": tokens,
    }
    for name, width in widths.items():
        if width % _MULTIPLE:
            raise UsageError(
                f"train.fp8 needs multiples of {_MULTIPLE}, and {name} is {width}: "
                "change it, or remove train.fp8"
            )


BLOCK_ROWS = 64
STD = 0.02


def initialise(model: Transformer, seed: int) -> None:
    """Fill every parameter and buffer of a model in place.

    Matrices are normal with standard deviation 0.02; those that write to the residual stream
    (`attention.wo`, `ffn.w2`) have it divided by sqrt(2 * n_layers) (Radford et al., "Language
    Models are Unsupervised Multitask Learners", section 2.3), norms are 1.

    Args:
        model: plain or sharded (`DTensor` parameters, any placement but partial), its storage
            allocated and of any content.
        seed: the run's seed.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local, offsets = _local_part(parameter)
            std = _std(name, model.shape.n_layers)
            if std is None:
                local.fill_(1.0)
            else:
                _fill(local, offsets, parameter.shape, std, (seed, name))
    fill_rotary(model)


def fill_rotary(model: Transformer) -> None:
    """Fill the table of positions, the one buffer; a checkpoint does not have it."""
    shape = model.shape
    table = rotary_table(shape.head_dim, shape.max_seq_len, shape.rope_theta, shape.rope_scaling)
    with torch.no_grad():
        model.rotary.copy_(table)


def _std(name: str, n_layers: int) -> float | None:
    """Standard deviation of a parameter's initial values; None for norms, which are all 1."""
    if name.endswith("norm.weight"):
        return None
    if name.endswith(("attention.wo.weight", "ffn.w2.weight")):
        return STD / math.sqrt(2 * n_layers)
    return STD


def _local_part(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """What this rank holds of a parameter, and where in the whole it begins."""
    if not hasattr(parameter, "__create_chunk_list__"):  # only a DTensor has it
        return parameter, (0,) * parameter.ndim
    (chunk,) = parameter.__create_chunk_list__()
    return cast("DTensor", parameter).to_local(), tuple(chunk.offsets)


def _fill(
    local: Tensor,
    offsets: tuple[int, ...],
    whole: torch.Size,
    std: float,
    key: tuple[int, str],
) -> None:
    """Fill a shard block of rows by block of rows.

    Args:
        local: the shard, filled in place.
        offsets: where the shard begins in the whole, one per dimension.
        whole: shape of the whole parameter.
        std: standard deviation.
        key: (seed, parameter name).
    """
    if local.numel() == 0:
        return
    first, end = offsets[0], offsets[0] + local.shape[0]
    inner = tuple(
        slice(offset, offset + size)
        for offset, size in zip(offsets[1:], local.shape[1:], strict=True)
    )
    for block in range(first // BLOCK_ROWS, -(-end // BLOCK_ROWS)):
        top = block * BLOCK_ROWS
        rows = min(BLOCK_ROWS, whole[0] - top)
        values = torch.empty((rows, *whole[1:]), dtype=torch.float32, device="cpu")
        values.normal_(0.0, std, generator=_generator(*key, block))
        low, high = max(first, top), min(end, top + rows)
        local[low - first : high - first].copy_(values[(slice(low - top, high - top), *inner)])


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    """The source of one block's numbers."""
    digest = blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    # Bit 63 stays clear: manual_seed maps what exceeds a signed 64-bit integer.
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)


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

    Raises `UsageError` if `train.fp8` is set where it cannot be used.
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
    gathered: stale full parameters would be left behind when the shards are changed.

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
