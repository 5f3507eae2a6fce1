"""How long a load takes, beside the stock reader, as a ratio to reading and summing the same bytes.

    python benchmarks/load.py [--megabytes 300] [--runs 7]

One process loads the state that it saved, and one that three ranks saved. The floor is a plain read
of the data files into an aligned buffer, with their checksums. All from a warm page cache, in turn.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor

from kempner.checkpoint.format.manifest import (
    BLOCK_BYTES,
    FileEntry,
    Identity,
    Manifest,
    encode_sidecar,
    sidecar_name,
    whole_sum,
)
from kempner.checkpoint.format.names import METADATA
from kempner.checkpoint.format.shard_plan import data_file, place
from kempner.checkpoint.format.train_state import TrainState
from kempner.checkpoint.io.file_writer import write_stream
from kempner.checkpoint.tensors.dcp_metadata import build_metadata
from kempner.checkpoint.tensors.dcp_reader import open_contents
from kempner.checkpoint.tensors.file_buffer import FileBuffer, container, tensor_specs
from kempner.checkpoint.tensors.load import fill

WIDTH = 1024


def save(state: dict[str, Tensor], folder: Path, world: int) -> Manifest:
    """Write a state as `world` ranks would that cut every matrix by its rows."""
    specs = [
        replace(s, mesh=(world,), placements=(0 if len(s.shape) > 1 else None,))
        for s in tensor_specs(state, 1)
    ]
    folder.mkdir()
    described = build_metadata(specs, world)
    (folder / METADATA).write_bytes(described)
    files = {METADATA: FileEntry(len(described), xxh3_128=whole_sum(described))}
    for rank in range(world):
        placed = place(specs, rank, container)
        image = FileBuffer(placed, pinned=False)
        for view, item in zip(image.views, placed, strict=True):
            part = state[item.chunk.key]
            for dim, at in enumerate(item.chunk.offsets):
                part = part.narrow(dim, at, item.chunk.sizes[dim])
            view.copy_(part)
        sums = write_stream(folder / data_file(rank), image.content)
        sidecar = encode_sidecar({data_file(rank): sums})
        (folder / sidecar_name(rank)).write_bytes(sidecar)
        files[data_file(rank)] = FileEntry(sums.bytes, sums=sidecar_name(rank))
        files[sidecar_name(rank)] = FileEntry(len(sidecar), xxh3_128=whole_sum(sidecar))
    return Manifest(TrainState(), Identity(world, {}, 0, "", {}), 1, 0.0, files)


def read_raw(folder: Path, buffer: mmap.mmap) -> None:
    """The floor."""
    view = memoryview(buffer)
    for path in sorted(folder.glob("*.distcp")):
        descriptor = os.open(path, os.O_RDONLY)
        at = 0
        while count := os.preadv(descriptor, [view[: 16 * BLOCK_BYTES]], at):
            for start in range(0, count, BLOCK_BYTES):
                xxhash.xxh3_64_hexdigest(view[start : min(start + BLOCK_BYTES, count)])
            at += count
        os.close(descriptor)


def timed(work: Callable[[], object]) -> float:
    """Seconds of wall time."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--runs", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    count = max(1, round(arguments.megabytes * 1e6 / (4 * WIDTH * WIDTH)))
    state = {f"weight.{n}": torch.randn(WIDTH, WIDTH) for n in range(count)}
    state |= {f"step.{n}": torch.tensor(float(n)) for n in range(count)}
    buffer = mmap.mmap(-1, 16 * BLOCK_BYTES)
    print(f"{count * 4 * WIDTH * WIDTH / 1e6:.0f} MB in {len(state)} tensors; median, worst ratio")
    with tempfile.TemporaryDirectory() as temporary:
        for world in (1, 3):
            folder = Path(temporary) / str(world)
            manifest = save(state, folder, world)
            table = {key: torch.empty_like(tensor) for key, tensor in state.items()}
            ours, stock, read = [], [], 0
            for _ in range(arguments.runs):
                floor = timed(lambda: read_raw(folder, buffer))  # noqa: B023
                begun = time.perf_counter()
                read = fill(table, folder, manifest, open_contents(folder, manifest))
                ours.append((time.perf_counter() - begun) / floor)
                assert all(torch.equal(table[key], state[key]) for key in state)
                stock.append(
                    timed(lambda: dcp.load(table, checkpoint_id=folder, no_dist=True))  # noqa: B023
                    / floor
                )
            needed = sum(t.numel() * t.element_size() for t in state.values())
            print(
                f"saved by {world}, loaded by 1: kempner {statistics.median(ours):.2f}, "
                f"{max(ours):.2f}; stock {statistics.median(stock):.2f}, {max(stock):.2f}; "
                f"bytes read against needed {read / needed:.3f}"
            )


if __name__ == "__main__":
    main()
