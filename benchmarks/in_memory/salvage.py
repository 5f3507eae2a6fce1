"""How long it takes to make a checkpoint of what dead ranks have left in memory.

    python benchmarks/in_memory/salvage.py [--ranks 2] [--gib 0.5] [--rounds 9] [--folder DIR]

In turns: the slots of all ranks are poured into a folder and committed (checksums, fsync, manifest,
link), and the same bytes are written and fsynced by as many threads, with nothing else.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from kempner.checkpoint.format.manifest import Identity, Manifest, TrainState
from kempner.checkpoint.format.names import CheckpointFolder, in_progress_name
from kempner.checkpoint.slots.memory import Branch, Notes, SlotContents, SlotHolder, SlotMemory
from kempner.checkpoint.slots.pour import offers, pour
from kempner.checkpoint.store import commit
from kempner.run.record.attempts import Fence, begin_attempt
from kempner.run.record.run_dir import RunDirectory

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
import records

PIECE = 1 << 24


def fill(holder: SlotHolder, ranks: int, size: int, nonce: str) -> list[memoryview]:
    """Have every rank hold step 1; the images."""
    images = []
    for rank in range(ranks):
        lent = holder.lend(rank, {})
        assert lent is not None
        memory = SlotMemory.grown(lent.slots[0], size)
        for at in range(0, size, PIECE):
            memory.image[at : at + PIECE] = os.urandom(min(PIECE, size - at))
        identity = asdict(Identity(ranks, {}, 0, None, {})) if rank == 0 else {}
        memory.publish(
            SlotContents(TrainState(1), Branch(nonce), rank, ranks, 7, 0, size, identity)
        )
        Notes(7, {}).write(lent.notes)
        images.append(memory.image)
    return images


def salvage(holder: SlotHolder, run: RunDirectory, fence: Fence, number: int) -> float:
    """Seconds of a salvage."""
    folder, begin = CheckpointFolder(run.checkpoints), time.perf_counter()
    assert len(offers(holder, fence.attempt.nonce)) > 0
    path = run.checkpoints / in_progress_name(1, fence.attempt.number, f"{number:08x}")
    poured = pour(holder, fence.attempt.nonce, 1, path)
    files = {name: entry for each in poured for name, entry in each.files.items()}
    manifest = Manifest(TrainState(1), Identity(len(poured), {}, 0, None, {}), 1, 0.0, files)
    commit.commit(folder, path, manifest, fence, lambda sentence: None)
    return time.perf_counter() - begin


def raw(images: list[memoryview], folder: Path, number: int) -> float:
    """Seconds of writing the same bytes."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(len(images)) as pool:
        list(pool.map(lambda n: write(folder / f"raw-{number}-{n}", images[n]), range(len(images))))
    return time.perf_counter() - begin


def write(path: Path, content: memoryview) -> None:
    """One file, fsynced."""
    with open(path, "wb", buffering=0) as file:
        while content:
            content = content[file.write(content[: 1 << 30]) :]
        os.fsync(file.fileno())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gib", type=float, default=0.5, help="of one rank")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, default=None)
    records.add_option(parser)
    arguments = parser.parse_args()
    ratios, taken = [], []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        run = RunDirectory(Path(place))
        run.checkpoints.mkdir(parents=True)
        fence = Fence(run.attempts, begin_attempt(run))
        holder = SlotHolder()
        size = int(arguments.gib * 2**30) // 4096 * 4096
        images = fill(holder, arguments.ranks, size, fence.attempt.nonce)
        for number in range(arguments.rounds):
            seconds = salvage(holder, run, fence, number)
            plain = raw(images, Path(place), number)
            for n in range(arguments.ranks):
                (Path(place) / f"raw-{number}-{n}").unlink()
            ratios.append(seconds / plain)
            taken.append(seconds)
        images.clear()
    low, middle, high = statistics.quantiles(ratios, n=4)
    row = {"ranks": arguments.ranks, "GiB a rank": arguments.gib, "rounds": arguments.rounds}
    row |= {"salvage, s": statistics.median(taken), "to a raw write and fsync": middle}
    proves = ("kempner/checkpoint/slots", "kempner/checkpoint/io", "kempner/checkpoint/store")
    records.result(arguments.record, "salvage", proves, [row | {"quartiles": [low, high]}])


if __name__ == "__main__":
    main()
