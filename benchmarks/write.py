"""Writing a rank's file against a raw write and fsync of the same bytes.

    python benchmarks/write.py [--megabytes 1000] [--rounds 20] [--folder DIR]

A round writes the bytes in every way, in an order that is shuffled anew each time. `raw` is
write(2) in 16 MiB pieces, then fsync(2). `kempner` reserves the space, sums every block, writes
back early, drops what is written from the page cache, and ends in the same fsync. `stock` is DCP's
`FileSystemWriter` with one tensor per 4 MiB.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from kempner.checkpoint.io.file_writer import SLAB_BYTES, write_stream
from kempner.checkpoint.tensors.file_buffer import page_aligned

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import records


def raw(path: Path, data: torch.Tensor) -> None:
    """The floor."""
    content = data.numpy().data
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    for start in range(0, len(content), SLAB_BYTES):
        os.write(descriptor, content[start : start + SLAB_BYTES])
    os.fsync(descriptor)
    os.close(descriptor)


def kempner(path: Path, data: torch.Tensor) -> None:
    """A rank's file, as a save writes it."""
    write_stream(path, data.numpy().data)


def stock(path: Path, data: torch.Tensor) -> None:
    """DCP's own writer; it writes and syncs one file, and its metadata."""
    table = {f"{n:05}": part for n, part in enumerate(data.split(4 << 20))}
    dcp.save(table, checkpoint_id=path, no_dist=True)


WAYS: dict[str, Callable[[Path, torch.Tensor], None]] = {
    "raw": raw,
    "kempner": kempner,
    "stock": stock,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--folder", default=None, help="where to write; a temporary one otherwise")
    records.add_option(parser)
    arguments = parser.parse_args()
    data = page_aligned(arguments.megabytes * 1_000_000).random_()
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for number in range(arguments.rounds):
            for name in random.sample(list(WAYS), len(WAYS)):
                path = Path(folder) / f"{name}-{number}"
                os.sync()
                start = time.perf_counter()
                WAYS[name](path, data)
                seconds[name].append(time.perf_counter() - start)
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    floor = statistics.median(seconds["raw"])
    print(f"{arguments.megabytes} MB, {arguments.rounds} rounds; raw takes {floor:.2f} s")
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    rows = [
        {
            "writer": name,
            "median, to raw": middle[name] / floor,
            "slowest, to its own median": max(times) / middle[name],
        }
        for name, times in seconds.items()
    ]
    records.result(arguments.record, "write", ("kempner/checkpoint/io",), rows)


if __name__ == "__main__":
    main()
