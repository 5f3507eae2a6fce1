"""Builds a model ready to train: sharded, materialised, initialised; on demand compiled, or with
products in eight bits.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from kempner.config.sections import Config, TrainSection
from kempner.model.adapter import adapt
from kempner.model.initial_weights import fill_rotary, initialise
from kempner.model.spec.adapter import Adapter
from kempner.model.spec.communication import EACH_MICRO_BATCH, Choice
from kempner.model.spec.shape import Shape
from kempner.model.transformer import Transformer
from kempner.run.control.heartbeat import Waiting
from kempner.run.process.exit_codes import UsageError

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


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

    `model` is on the meta device, not sharded yet, and will be on `device`; `tokens` are those of a
    micro batch. With `emulate` it multiplies in a wider type, as any device can.
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


def build_model(
    config: Config,
    vocab_size: int,
    device: torch.device,
    mesh: DeviceMesh | None,
    choice: Choice = EACH_MICRO_BATCH,
) -> Transformer:
    """The model of a run, with float32 weights drawn from `train.seed`; with an adapter that is
    drawn so, beside weights of any content that do not train.

    Weights are the same bits for every mesh. In a world of more than one rank, parameters are
    `DTensor` shards over `mesh` and gradients come out as the sum, not the mean, over the ranks
    that have samples of their own: divide the loss by the global number of tokens. A single rank
    keeps plain tensors.

    `mesh` has all ranks: one dimension to shard over, or the named ones of `MeshDegrees`; None for
    a process that is alone.

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
    if (adapter := Adapter.of(config.adapter)) is not None:
        adapt(model, adapter)
    if config.train.fp8:
        use_float8(model, device, config.train.micro_batch_size * config.train.seq_len)
    anywhere = bool(config.train.same_on_any_world)
    # What multiplies in bfloat16 is cast by FSDP, also where a rank is alone, to round alike.
    if mesh is not None and (mesh.size() > 1 or (anywhere and dtype is not torch.float32)):
        if "tensor" in (mesh.mesh_dim_names or ()):
            # A run without tensor parallelism is spared the import.
            from kempner.model.parallel.tensor import parallelize

            parallelize(model, mesh["tensor"])
        shard(model, data_parallel(mesh), dtype, choice)
        model.to_empty(device=device)
    else:
        model.autocast_dtype = None if dtype is torch.float32 else dtype
        model.fused_head = not anywhere or model.output is None
        allocate(model, device)
    return model


def _choose_memory(model: Transformer, train: TrainSection) -> None:
    """What the model keeps for its backward, and how much of its logits exists at once."""
    model.loss_chunk = train.loss_chunk
    if train.activation_checkpointing != "none":
        for block in model.blocks[:: train.activation_checkpointing_every or 1]:
            block.checkpointing = train.activation_checkpointing


def build_to_load(
    shape: Shape, dtype: torch.dtype, device: torch.device, adapter: Adapter | None = None
) -> Transformer:
    """A model on one device, to generate with; its parameters are of any content, to be loaded.
    `dtype` is the type in which matrices multiply."""
    with torch.device("meta"):
        model = Transformer(shape)
        if adapter is not None:
            adapt(model, adapter)
    model.autocast_dtype = None if dtype is torch.float32 else dtype
    allocate(model, device)
    fill_rotary(model)
    return model.eval()


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give plain parameters and buffers memory on `device`, its content undefined. `to_empty` does
    so, too, but from the meta device it imports sympy, to reason about strides."""
    for module in model.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            memory = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            setattr(module, name, nn.Parameter(memory, parameter.requires_grad))
        for name, buffer in [*module.named_buffers(recurse=False)]:
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))


def compute_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """The type in which matrices multiply; "auto" is bfloat16 on CUDA and float32 on CPU."""
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
    gathered: stale full parameters would be left behind when the shards are changed. But in
    training, as of preferences, another one follows in the same step, for which they are kept.

    `mesh` is one-dimensional; or replicas x shards, over the first of which gradients are summed
    once a step, after the reduce-scatter over the second.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard  # not if alone

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

    free = partial(_free_without_gradients, sharded, choice.keep_parameters)
    model.register_forward_hook(free)


def _free_without_gradients(
    sharded: Sequence[FSDPModule], kept: bool, model: nn.Module, *_: object
) -> None:
    if not torch.is_grad_enabled() and not (kept and model.training):
        for module in sharded:
            module.reshard()


def _shard_in_order(model: Transformer, fsdp: Callable[..., Any], keep: bool) -> None:
    """Shard what a forward uses, one after the other; each is gathered while its neighbour works.
    What a forward ends with is not freed for the backward to gather it again at once. A tied
    embedding is part of both ends: it stays with the root, which is gathered all the time."""
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


def time_collectives(model: nn.Module, waiting: Waiting) -> None:
    """Enter `waiting` whenever the shards of `model` are gathered, or its gradients reduced.

    Ranks that train together take the same time for a step, however slow one of them is: the others
    wait for it, in the first collective that it comes late to. A rank's own work is what is left.

    On a CPU a collective holds the main thread until all have come, so its time is the wait, and
    what the transfer takes, which is the same for all. On a GPU the host waits for nothing in a
    collective: what is told apart there is only the vote.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
        DefaultAllGather,
        DefaultReduceScatter,
    )

    class AllGather(DefaultAllGather):
        def __call__(self, *arguments: Any, **options: Any) -> dist.Work | None:
            with waiting("an all-gather of weights"):
                return super().__call__(*arguments, **options)

    class ReduceScatter(DefaultReduceScatter):
        def __call__(self, *arguments: Any, **options: Any) -> dist.Work:
            with waiting("a reduce-scatter of gradients"):
                return super().__call__(*arguments, **options)

    gather, reduce = AllGather(), ReduceScatter()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(reduce)


def keep_compiled(cache: Path) -> None:
    """Have this process keep what it compiles in a folder, from which another start takes it.

    To be called before anything imports torch's compiler, which chooses a folder in /tmp as soon as
    it is imported, and names it in the environment. FSDP2 imports it, too.
    A folder that TORCHINDUCTOR_CACHE_DIR names takes precedence.
    """
    # Kernels are compiled for the processor (-march=native), by which torch does not look for them:
    # another one could end with an illegal instruction.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache.absolute() / _processor()))


def compile_blocks(model: Transformer) -> None:
    """Have every block compile what it computes when it first trains; evaluations compute as ever.

    Blocks are alike, so that one is compiled for all. It is compiled whole, or not at all: what
    shards and gathers a block stays outside, and so do the names of its parameters. What is made is
    kept where `keep_compiled` says.
    """
    import torch._inductor.config as inductor  # imports torch's compiler

    # In this process: a pool of compiling processes could outlive a rank that is killed, and for
    # one block it gains little.
    inductor.compile_threads = 1
    # It warns of operations in place where "selective" computes again; a block has none.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    for block in model.blocks:
        block.compiled = torch.compile(block.run, fullgraph=True, dynamic=False)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return blake2b(line.encode(), digest_size=4).hexdigest()
    return platform.machine()
