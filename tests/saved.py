"""Real checkpoints for tests: written by one process in the place of any number of ranks, or by a
manager as a script over ranks uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from kempner.checkpoint.context import CheckpointContext
from kempner.checkpoint.format import compact_index
from kempner.checkpoint.format.manifest import (
    FileEntry,
    Identity,
    Manifest,
    TrainState,
    encode_sidecar,
    sidecar_name,
    whole_sum,
)
from kempner.checkpoint.format.names import METADATA, CheckpointFolder, in_progress_name
from kempner.checkpoint.format.shard_plan import TensorSpec, data_file, place
from kempner.checkpoint.io.file_writer import write_stream
from kempner.checkpoint.manager import CheckpointEngine
from kempner.checkpoint.store import commit
from kempner.checkpoint.store.retention import Keep
from kempner.checkpoint.tensors.dcp_metadata import build_metadata
from kempner.checkpoint.tensors.file_buffer import FileBuffer, container, tensor_specs
from kempner.run.process.durable_io import write_durable
from kempner.run.record.attempts import Fence, begin_attempt
from kempner.run.record.run_dir import RunDirectory

Model = Mapping[str, object]


def small_state() -> dict[str, Tensor]:
    """A model of two parameters with AdamW's state, in several types; the same at every call."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        "first.weight": torch.randn(700, 500, generator=generator),
        "last.weight": torch.randn(3, 700, generator=generator).bfloat16(),
    }
    table = {f"model.{name}": tensor for name, tensor in weights.items()}
    for name, tensor in weights.items():
        table[f"optimizer.{name}.step"] = torch.tensor(7.0)
        table[f"optimizer.{name}.exp_avg"] = tensor * 2
    return table


def commit_state(
    run: RunDirectory,
    state: Mapping[str, Tensor],
    step: int,
    world: int = 1,
    model: Model | None = None,
    metadata: bool = True,
    **identity: Any,
) -> Path:
    """Commit `state`, its matrices cut by rows over `world` ranks, as the checkpoint of `step`.

    Without `metadata` there is the index alone, as in a large world; `identity` is of its manifest.
    """
    fence = Fence(run.attempts, begin_attempt(run))
    attempt = fence.attempt
    path = run.checkpoints / in_progress_name(step, attempt.number, attempt.nonce)
    path.mkdir(parents=True)
    specs = [
        TensorSpec(spec.key, spec.shape, spec.dtype, (world,), (0 if spec.shape else None,))
        for spec in tensor_specs(state, 1)
    ]
    files: dict[str, FileEntry] = {}
    for rank in range(world):
        files |= _write_rank(path, state, specs, rank)
    files |= _write_small(path / compact_index.INDEX, compact_index.encode(specs, world, container))
    if metadata:
        files |= _write_small(path / METADATA, build_metadata(specs, world))
    known = Identity(world, {"fsdp": world}, 0, "", model or {}, **identity)
    manifest = Manifest(TrainState(step, 8 * step, 64 * step), known, attempt.number, 0.5, files)
    return commit.commit(CheckpointFolder(run.checkpoints), path, manifest, fence, print)


def _write_rank(
    path: Path, state: Mapping[str, Tensor], specs: list[TensorSpec], rank: int
) -> dict[str, FileEntry]:
    placed = place(specs, rank, container)
    image = FileBuffer(placed)
    for view, item in zip(image.views, placed, strict=True):
        part = state[item.chunk.key]
        for dim, at in enumerate(item.chunk.offsets):
            part = part.narrow(dim, at, item.chunk.sizes[dim])
        view.copy_(part)
    name = data_file(rank)
    sums = write_stream(path / name, image.content)
    files = _write_small(path / sidecar_name(rank), encode_sidecar({name: sums}))
    return {name: FileEntry(bytes=sums.bytes, sums=sidecar_name(rank)), **files}


def _write_small(path: Path, content: bytes) -> dict[str, FileEntry]:
    write_durable(path, content)
    return {path.name: FileEntry(len(content), xxh3_128=whole_sum(content))}


def open_manager(
    run: RunDirectory,
    model: nn.Module,
    optimizer: Optimizer,
    group: dist.ProcessGroup,
    **options: Any,
) -> CheckpointEngine:
    """Keeps the last two checkpoints of `run`; called on every rank of `group`.

    `options` go into its context.
    """
    world = dist.get_world_size(group)
    box = [begin_attempt(run) if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(box, group_src=0, group=group)
    assert box[0] is not None
    context = CheckpointContext(
        path=run.checkpoints,
        identity=Identity(world, {"fsdp": world}, 0, "", {}),
        fence=Fence(run.attempts, box[0]),
        group=group,
        **options,
    )
    return CheckpointEngine(context, model, optimizer, keep=Keep(last=2))
