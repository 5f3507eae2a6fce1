"""What the ranks spend on agreeing, apart from the bytes of a save.

    python benchmarks/coordination.py [--ranks 8] [--items 3000] [--saves 40]
    python benchmarks/coordination.py --simulate 64 512 1024 4096 16384

The first measures whole saves of `--items` tiny tensors per rank whose data is not written: what is
left is the work of the training thread, the sidecars, index and `.metadata`, the exchange, the
manifest, and the commit with its fsyncs. The second is rank 0 alone, with a 70B Llama and AdamW
over that many ranks (2,892 items each): the first plan, made once, and what every save then costs
rank 0.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from load import llama_70b
from torch import nn
from torch.distributed.fsdp import fully_shard
from ways_to_save import open_manager

from kempner.checkpoint.format.manifest import (
    FileSums,
    Identity,
    Manifest,
    TrainState,
    sidecar_name,
)
from kempner.checkpoint.format.names import CheckpointFolder
from kempner.checkpoint.format.shard_plan import data_file, place
from kempner.checkpoint.io.file_writer import write_stream
from kempner.checkpoint.store.commit import commit
from kempner.checkpoint.tensors import save
from kempner.checkpoint.tensors.file_buffer import container
from kempner.checkpoint.tensors.route import FileLayout
from kempner.run.record.attempts import Fence, begin_attempt
from kempner.run.record.run_dir import RunDirectory

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import records

PROVES = ("kempner/checkpoint",)


def write_no_data(path: Path, content: memoryview) -> FileSums:
    """In place of a rank's data file an empty one; index and `.metadata` as they are."""
    if path.suffix != ".distcp":
        return write_stream(path, content)
    path.touch()
    return FileSums(0, ())


def measure_saves(items: int, saves: int, folder: Path, record: Path | None) -> None:
    """Saves without their data, in this process group; rank 0 tells."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = nn.ParameterList([torch.ones(world, 4) for _ in range(items // 4)])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    run = RunDirectory(folder)
    manager = open_manager(run, model, optimizer, dist.new_group(backend="gloo"))
    save.write_stream = write_no_data  # type: ignore[attr-defined]
    seconds = []
    for number in range(saves + 1):
        dist.barrier()
        start = time.perf_counter()
        manager.save(TrainState(number + 1))
        manager.join()
        took = torch.tensor(time.perf_counter() - start)
        assert manager.committed_step == number + 1
        dist.all_reduce(took, dist.ReduceOp.MAX)
        seconds.append(took.item())
    if rank == 0:
        first, rest = seconds[0], seconds[1:]
        row: dict[str, object] = {"ranks": world, "tensors of each": items, "saves": saves}
        row |= {"slowest rank, s": statistics.median(rest), "at worst, s": max(rest)}
        records.result(record, "agreeing", PROVES, [row | {"the first save, s": first}])
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def simulate(world: int, saves: int, folder: Path) -> dict[str, object]:
    """Rank 0's part at `world` ranks, with the notes of the others made up."""
    specs = list(llama_70b(world))
    start = time.perf_counter()
    place(specs, 0, container)
    own = time.perf_counter() - start
    layout = FileLayout(specs, [], None, world)  # type: ignore[arg-type]
    start = time.perf_counter()
    described = layout.described
    first = time.perf_counter() - start
    run = RunDirectory(folder / str(world))
    fence = Fence(run.attempts, begin_attempt(run))
    checkpoints = CheckpointFolder(run.checkpoints)
    note = save._Note(True, layout.digest, 0, data_bytes=1 << 30, sidecar_bytes=40_000)
    identity = Identity(world, {"fsdp": world}, 0, "", {})
    seconds, busy = [], []
    for number in range(saves):
        encoded = [note.encode() for _ in range(world)]
        path = checkpoints.path / f".step-{number:08}.a1-00000000"
        path.mkdir(parents=True)
        for rank in range(world):  # what the others have made, and made durable
            (path / data_file(rank)).touch()
            (path / sidecar_name(rank)).touch()
        os.sync()
        start, cpu = time.perf_counter(), time.thread_time()
        for name, content in described.items():
            write_stream(path / name, content)
        notes = [save._Note.decode(numbers) for numbers in encoded]
        assert save._agreed(notes)
        files = save._list_files(notes, layout.described_entries)
        manifest = Manifest(TrainState(number), identity, 1, time.time(), files)
        commit(checkpoints, path, manifest, fence, print)
        seconds.append(time.perf_counter() - start)
        busy.append(time.thread_time() - cpu)
    size = sum(map(len, described.values())) / 1e6
    plans: dict[str, object] = {
        "ranks": world,
        "own plan, s": own,
        "first plan, s": first,
        "size, MB": size,
    }
    return plans | {
        "a save, s": statistics.median(seconds),
        "busy, s": statistics.median(busy),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--items", type=int, default=3000)
    parser.add_argument("--saves", type=int, default=40)
    parser.add_argument("--simulate", type=int, nargs="+", default=[])
    parser.add_argument("--folder", default=None, help="where to write; a temporary one otherwise")
    records.add_option(parser)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        folder = Path(arguments.folder)
        measure_saves(arguments.items, arguments.saves, folder, arguments.record)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        if arguments.simulate:
            rows = [simulate(world, 7, Path(folder)) for world in arguments.simulate]
            records.result(arguments.record, "agreeing, simulated", PROVES, rows)
        else:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc-per-node={arguments.ranks}", __file__, *sys.argv[1:]]
            subprocess.run([*command, "--folder", folder], check=True)


if __name__ == "__main__":
    main()
