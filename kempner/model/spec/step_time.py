"""How long a training step takes at least, and what holds it up: arithmetic on data sheets.

The model is a roofline (Williams et al., "Roofline", 2009): an operation takes as long as what it
computes, or what it reads and writes, whichever is longer. What ranks send each other goes on
beside it, where FSDP's prefetch lets it; what a tensor group exchanges is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Literal

from kempner.config.sections import TrainSection
from kempner.model.spec.adapter import Adapter
from kempner.model.spec.shape import Shape
from kempner.run.process.exit_codes import UsageError


def step_flops(
    shape: Shape,
    train: TrainSection,
    sequences: int,
    tensor: int = 1,
    adapter: Adapter | None = None,
    reference: bool = False,
) -> int:
    """What one rank multiplies for its `sequences` of a step, recomputation included.

    Two operations per parameter and token forward and four backward. Attention has two products
    forward and five backward, one of which computes the scores again, without a discount for the
    causal mask. A block with full activation checkpointing computes its forward again, but for the
    last product of its feed-forward, which nothing but dropout needs. The loss in chunks leaves out
    rows of the vocabulary that are no token. `shape.flops_per_token` is what a model needs at
    least, by which its utilisation (MFU) is judged; this is what a GPU computes.
    `sequences` are those that it shares with its `tensor` group, too. Beside an `adapter` weights
    have no gradients: four operations for each parameter, and six for each of the adapter's, half
    of which each rank of a group has whole. In the first block, below which nothing trains, the
    inputs of queries, keys and values have no gradients either. A `reference` adds a forward of the
    weights alone.
    """
    matrices = shape.dim * (2 * shape.q_dim + 2 * shape.kv_dim + 3 * shape.ffn_dim)
    attention = 2 * train.seq_len * shape.q_dim
    block = 6 * matrices + 7 * attention
    needless = 0 if shape.dropout else shape.dim * shape.ffn_dim
    again = 2 * (matrices - needless) + 2 * attention
    recomputing = 0
    if train.activation_checkpointing == "full":
        recomputing = -(-shape.n_layers // (train.activation_checkpointing_every or 1))
    rows = shape.vocab_size if train.loss_chunk > 0 or tensor > 1 else shape.vocab_rows
    # The first rank of a tensor group has a full part of the rows.
    rows = min(rows, shape.vocab_rows // tensor) if tensor > 1 else rows
    blocks = shape.n_layers * (block + reference * 2 * (matrices + attention)) + recomputing * again
    if adapter is None:
        per_token = blocks // tensor + 6 * shape.dim * rows
    else:
        more, whole = _beside_weights(shape, adapter, matrices, recomputing)
        per_token = (blocks + more) // tensor + whole + 4 * shape.dim * rows
    return sequences * train.seq_len * (per_token + reference * 2 * shape.dim * rows)


def _beside_weights(
    shape: Shape, adapter: Adapter, matrices: int, recomputing: int
) -> tuple[int, int]:
    """What an adapter adds per token to the blocks of a model that trains whole: divided among the
    ranks of a tensor group, and by each of them."""
    each = adapter.rank * shape.dim  # of a pair, the matrix that is whole on every rank
    whole = each * len(adapter.targets)
    cut = adapter.block_elements(shape) - whole
    times = 6 * shape.n_layers + 2 * recomputing
    first = sum(name in ("q_proj", "k_proj", "v_proj") for name in adapter.targets)
    saved = 2 * shape.n_layers * matrices + 2 * shape.dim * (shape.q_dim + 2 * shape.kv_dim)
    return times * cut - saved, times * whole - 2 * first * each


@dataclass(frozen=True)
class GpuModel:
    """One GPU.

    Attributes:
        name: part of the name by which its driver calls it, or what it is known by.
        memory: bytes, as sold: 80 GB are 80e9.
        flops: dense bfloat16 products, FLOP/s.
        memory_rate: bytes/s that it reads or writes.
        link_rate: bytes/s that it sends to GPUs of its node, in one direction.
        source: where the figures are from.
    """

    name: str
    memory: int
    flops: float
    memory_rate: float
    link_rate: float
    source: str


_GB = 10**9
_ALL = (
    GpuModel("A100-40GB", 40 * _GB, 312e12, 1.555e12, 300e9, "NVIDIA A100 data sheet, SXM, 2021"),
    GpuModel("A100-80GB", 80 * _GB, 312e12, 2.039e12, 300e9, "NVIDIA A100 data sheet, SXM, 2021"),
    GpuModel("H100", 80 * _GB, 989e12, 3.35e12, 450e9, "NVIDIA H100 data sheet, SXM, 2024"),
    GpuModel("H200", 141 * _GB, 989e12, 4.8e12, 450e9, "NVIDIA H200 data sheet, SXM, 2024"),
    GpuModel("B200", 180 * _GB, 2250e12, 8e12, 900e9, "NVIDIA DGX B200 data sheet, 2024"),
    GpuModel(
        "L40S", 48 * _GB, 362e12, 0.864e12, 32e9, "NVIDIA L40S data sheet, 2023; PCIe 4.0 x16"
    ),
    GpuModel("MI300X", 192 * _GB, 1307e12, 5.3e12, 448e9, "AMD Instinct MI300X data sheet, 2023"),
)
GPUS: Mapping[str, GpuModel] = MappingProxyType({gpu.name: gpu for gpu in _ALL})
"""By name."""
_SHORT = {"A100": "A100-80GB"}


def find_gpu(name: str) -> GpuModel:
    """The GPU of that name, in any case; "A100" is that of 80 GB. Raises `UsageError`, with the
    names that there are."""
    wanted = name.upper()
    wanted = _SHORT.get(wanted, wanted)
    by_name = {known.upper(): gpu for known, gpu in GPUS.items()}
    if wanted in by_name:
        return by_name[wanted]
    close = get_close_matches(wanted, by_name, 1)
    meant = f"; did you mean {by_name[close[0]].name}?" if close else ""
    raise UsageError(f"no figures are known of the GPU {name}, only of {', '.join(GPUS)}{meant}")


def peak_flops_of(device_name: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device by its driver's name for it; None if it is not known."""
    for gpu in GPUS.values():
        if gpu.name.partition("-")[0] in device_name:
            return gpu.flops
    return None


@dataclass(frozen=True)
class Assumptions:
    """What cannot be traced. Rates are of one direction.

    Attributes:
        network: bytes/s that a node sends to others, of all its adapters together.
        storage: bytes/s at which all ranks together write a checkpoint.
        to_host: bytes/s at which a rank copies its state to its host, which holds up training.
        node_failure: seconds between two failures of one node. Llama 3 counted 419 interruptions in
            54 days on 2,048 nodes (arXiv:2407.21783, section 3.3.4): one in 264 days.
        compute_share, memory_share, network_share: of the peak figures that are reached.
    """

    network: float = 400e9 / 8
    storage: float = 5e9
    to_host: float = 20e9
    node_failure: float = 264 * 86_400.0
    compute_share: float = 0.7
    memory_share: float = 0.8
    network_share: float = 0.8


DEFAULTS = Assumptions()


Bound = Literal["compute", "memory", "within_node", "between_nodes"]
"""What a step waits for: products of matrices, a GPU's own memory, other GPUs of its node, or
other nodes."""


@dataclass(frozen=True)
class Load:
    """What one rank does in a part of a step, and its node, `times` in the step.

    Attributes:
        operations: FLOPs, bytes read and written, and how many operations are so.
        within: bytes that one rank sends to others of its node, beside computing.
        between: bytes that a node sends to others, beside computing.
        waited: bytes that one rank sends within its tensor group, which computing waits for.
    """

    times: int
    operations: Sequence[tuple[int, int, int]]
    within: float
    between: float
    waited: float


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by what they are spent on; those of the network are not hidden by others.

    Attributes:
        compute: products of matrices.
        memory: operations that read and write more than they compute.
        within_node: waiting for GPUs of the same node.
        between_nodes: waiting for other nodes.
    """

    compute: float
    memory: float
    within_node: float
    between_nodes: float

    @property
    def total(self) -> float:
        return self.compute + self.memory + self.within_node + self.between_nodes

    @property
    def bound(self) -> Bound:
        parts: tuple[Bound, ...] = ("compute", "memory", "within_node", "between_nodes")
        return max(parts, key=lambda part: float(getattr(self, part)))


def step_time(loads: Sequence[Load], gpu: GpuModel, given: Assumptions) -> StepTime:
    """How long a step takes. Within a load everything overlaps but `waited`; between them nothing.
    Within a node and between nodes things are sent at the same time, as a ring over both does."""
    compute = memory = within = between = 0.0
    for load in loads:
        computing, moving = _own_time(load, gpu, given)
        waited = load.waited / (gpu.link_rate * given.network_share)
        inside = load.within / (gpu.link_rate * given.network_share)
        outside = load.between / (given.network * given.network_share)
        hidden = computing + moving + waited
        exposed = max(inside, outside) - hidden
        compute += load.times * computing
        memory += load.times * moving
        within += load.times * (waited + (max(exposed, 0) if inside >= outside else 0))
        between += load.times * (max(exposed, 0) if outside > inside else 0)
    return StepTime(compute, memory, within, between)


def _own_time(load: Load, gpu: GpuModel, given: Assumptions) -> tuple[float, float]:
    """Seconds of operations that compute longer than they read and write, and of the others."""
    computing = moving = 0.0
    for flops, size, number in load.operations:
        multiplying = flops / (gpu.flops * given.compute_share)
        streaming = size / (gpu.memory_rate * given.memory_share)
        if multiplying >= streaming:
            computing += number * multiplying
        else:
            moving += number * streaming
    return computing, moving
