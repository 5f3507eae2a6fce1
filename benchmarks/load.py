"""How long a load takes, beside the stock reader, as a ratio to reading and summing the same bytes.

    python benchmarks/load.py [--megabytes 300] [--runs 7]
    python benchmarks/load.py --simulate 128 512 1024 16384

The first: one process loads the state that it saved, and one that three ranks saved. The floor is a
plain read of the data files into an aligned buffer, with their checksums. All from a warm page
cache, in turn. `from memory`: the files are in shared memory, too, as after a salvage.

The second: what a rank needs before it reads, with a 70B Llama and AdamW (2,892 tensors) saved and
loaded by that many ranks: from the chosen checkpoint to which bytes of which files go where. Of the
stock reader only that it reads `.metadata`, before it plans anything. Each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader

from kempner.checkpoint.format.compact_index import INDEX, METADATA_UP_TO, encode
from kempner.checkpoint.format.manifest import (
    BLOCK_BYTES,
    FileEntry,
    Identity,
    Manifest,
    TrainState,
    encode_sidecar,
    read,
    sidecar_name,
    whole_sum,
)
from kempner.checkpoint.format.manifest import encode as encode_manifest
from kempner.checkpoint.format.names import MANIFEST, METADATA
from kempner.checkpoint.format.shard_plan import TensorSpec, chunk_of, data_file, place
from kempner.checkpoint.io.file_writer import write_stream
from kempner.checkpoint.io.verify import MemoryCopy
from kempner.checkpoint.tensors import load
from kempner.checkpoint.tensors.dcp_metadata import build_metadata, metadata_of
from kempner.checkpoint.tensors.file_buffer import FileBuffer, container, tensor_specs
from kempner.checkpoint.tensors.load import fill, open_contents

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import records

PROVES = ("kempner/checkpoint",)

WIDTH = 1024
NAMES = {"ours": "kempner", "stock": "stock, .metadata alone"}


def save(state: dict[str, Tensor], folder: Path, world: int) -> Manifest:
    """Write a state as `world` ranks would that cut every matrix by its rows."""
    specs = [
        replace(s, mesh=(world,), placements=(0 if len(s.shape) > 1 else None,))
        for s in tensor_specs(state, 1)
    ]
    folder.mkdir()
    files = {}
    for name, content in {
        INDEX: encode(specs, world, container),
        METADATA: build_metadata(specs, world),
    }.items():
        (folder / name).write_bytes(content)
        files[name] = FileEntry(len(content), xxh3_128=whole_sum(content))
    for rank in range(world):
        placed = place(specs, rank, container)
        image = FileBuffer(placed)
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


def llama_70b(world: int) -> Iterator[TensorSpec]:
    """The state of a 70B Llama under FSDP2 and AdamW."""
    dim, ffn, kv, vocab = 8192, 28672, 1024, 128256
    shapes = {"embedding": (vocab, dim), "output": (vocab, dim), "norm": (dim,)}
    for layer in range(80):
        square, narrow = {"wq": (dim, dim), "wo": (dim, dim)}, {"wk": (kv, dim), "wv": (kv, dim)}
        wide = {"w1": (ffn, dim), "w2": (dim, ffn), "w3": (ffn, dim)}
        block = square | narrow | wide | {"norm_1": (dim,), "norm_2": (dim,)}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in block.items()}
    for name, shape in shapes.items():
        for key in (f"model.{name}", f"optimizer.{name}.exp_avg", f"optimizer.{name}.exp_avg_sq"):
            yield TensorSpec(key, shape, "float32", (world,), (0,))
        yield TensorSpec(f"optimizer.{name}.step", (), "float32", (world,), (None,))


def simulate(world: int, folder: Path) -> Iterator[dict[str, object]]:
    """Describe a checkpoint of `world` ranks, and plan its load as ranks of several worlds do."""
    folder.mkdir()
    specs = list(llama_70b(world))
    described = {INDEX: encode(specs, world, container)}
    if world <= METADATA_UP_TO:
        described[METADATA] = bytes(metadata_of(specs, world))
    files = {}
    for name, content in described.items():
        (folder / name).write_bytes(content)
        files[name] = FileEntry(len(content), xxh3_128=whole_sum(content))
    for rank in range(world):
        files[data_file(rank)] = FileEntry(8 * 10**11 // world, sums=sidecar_name(rank))
        files[sidecar_name(rank)] = FileEntry(20_000, xxh3_128="0" * 32)
    identity = Identity(world, {"fsdp": world}, 0, "", {})
    manifest = Manifest(TrainState(1), identity, 1, 0.0, files)
    (folder / MANIFEST).write_bytes(encode_manifest(manifest))
    readers = [(world, 1), (world, world // 2), (world * 3 // 4, 0), (8, 1)]
    ways = ["ours", *(["stock"] if METADATA in described else [])]
    for way in ways:
        for readers_world, rank in readers if way == "ours" else readers[:1]:
            command = [sys.executable, __file__, "--plan", way, str(folder)]
            command += [str(readers_world), str(rank)]
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            yield json.loads(said)


def plan(way: str, folder: Path, world: int, rank: int) -> None:
    """Plan the load of `rank` of `world`, and print what that took."""
    specs = list(llama_70b(world))
    before, start = memory("VmRSS"), time.process_time()
    manifest = read(folder)
    pieces = 0
    if way == "ours":
        # Not rank 0, which checks `.metadata` besides: a read and a sum of its bytes.
        contents = open_contents(folder, manifest, 1, 2)
        pieces = len(load._plan({spec.key: box(spec, rank) for spec in specs}, contents))
    else:
        FileSystemReader(folder).read_metadata()
    took, more = time.process_time() - start, memory("VmHWM") - before
    saved = manifest.identity.world
    row = {"saved by": saved, "loaded by": world, "rank": rank, "reader": NAMES[way]}
    print(json.dumps({**row, "processor s": took, "MB": more, "reads": pieces}))


def memory(name: str) -> float:
    """MB that this process has now (`VmRSS`) or had at most (`VmHWM`)."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) / 1e3


def box(spec: TensorSpec, rank: int) -> load._Box:
    """What a rank holds of a tensor."""
    if None in spec.placements:
        return load._Box((0,) * len(spec.shape), spec.shape, 4)
    chunk = chunk_of(spec, rank)
    if chunk is None:
        return load._Box((0,) * len(spec.shape), (0, *spec.shape[1:]), 4)
    return load._Box(chunk.offsets, chunk.sizes, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--simulate", type=int, nargs="+", default=[])
    parser.add_argument("--plan", nargs=4, help=argparse.SUPPRESS)
    records.add_option(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.plan:
        way, folder, world, rank = arguments.plan
        plan(way, Path(folder), int(world), int(rank))
        return
    with tempfile.TemporaryDirectory() as temporary:
        rows = [row for n in arguments.simulate for row in simulate(n, Path(temporary) / str(n))]
    name = "load, simulated" if rows else "load"
    rows = rows or compare(arguments.megabytes, arguments.runs)
    records.result(arguments.record, name, PROVES, rows)


def in_memory(folder: Path) -> dict[str, MemoryCopy]:
    """The data files of a checkpoint in shared memory, by name."""
    copies = {}
    for path in folder.glob("*.distcp"):
        descriptor = os.memfd_create(path.name)
        os.write(descriptor, path.read_bytes())
        copies[path.name] = MemoryCopy(descriptor, 0, path.stat().st_size)
    return copies


def compare(megabytes: int, runs: int) -> list[dict[str, object]]:
    """Load what one rank and what three saved, beside the stock reader."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    count = max(1, round(megabytes * 1e6 / (4 * WIDTH * WIDTH)))
    state = {f"weight.{n}": torch.randn(WIDTH, WIDTH) for n in range(count)}
    state |= {f"step.{n}": torch.tensor(float(n)) for n in range(count)}
    buffer = mmap.mmap(-1, 16 * BLOCK_BYTES)
    print(f"{count * 4 * WIDTH * WIDTH / 1e6:.0f} MB in {len(state)} tensors; median, worst ratio")
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for world in (1, 3):
            folder = Path(temporary) / str(world)
            manifest = save(state, folder, world)
            memory = in_memory(folder)
            table = {key: torch.empty_like(tensor) for key, tensor in state.items()}
            ours, stock, remembered, taken = [], [], [], 0
            for _ in range(runs):
                floor = timed(lambda: read_raw(folder, buffer))  # noqa: B023
                begun = time.perf_counter()
                taken = fill(table, folder, manifest, open_contents(folder, manifest)).bytes
                ours.append((time.perf_counter() - begun) / floor)
                begun = time.perf_counter()
                read = fill(table, folder, manifest, open_contents(folder, manifest), memory)
                remembered.append((time.perf_counter() - begun) / floor)
                assert read.from_memory == read.bytes
                assert all(torch.equal(table[key], state[key]) for key in state)
                stock.append(
                    timed(lambda: dcp.load(table, checkpoint_id=folder, no_dist=True))  # noqa: B023
                    / floor
                )
            needed = sum(t.numel() * t.element_size() for t in state.values())
            row = {"saved by": world, "loaded by": 1}
            found = {"kempner": ours, "kempner, from memory": remembered, "stock": stock}
            for way, ratios in found.items():
                each = {"reader": way, "median": statistics.median(ratios), "at worst": max(ratios)}
                share = {"bytes read, to needed": taken / needed} if way == "kempner" else {}
                rows.append(row | each | share)
    return rows


if __name__ == "__main__":
    main()
