"""One rank of a test: what it holds at the peak of a step. Usage: memory_ranks.py OUT"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from real_step import WIDE, config, resident_at_peak
from torch.distributed.device_mesh import init_device_mesh

from kempner.model.spec.communication import Choice

sys.path.insert(0, str(Path(__file__).parents[2]))

MICRO_STEPS, WORLD = 2, 2
_PLAIN = config(model=WIDE, seq_len=512)
_RECOMPUTED = config(model=WIDE, seq_len=512, activation_checkpointing="full", loss_chunk=64)
_SLOTS = config(model=WIDE, seq_len=512, global_batch_size=8, same_on_any_world=True, threads=1)
CASES = {
    "each micro batch": (_PLAIN, Choice()),
    "once a step": (_PLAIN, Choice(reduce_once=True, keep_parameters=True)),
    "recomputed": (_RECOMPUTED, Choice()),
    "slots": (_SLOTS, Choice(reduce_once=True)),
}


def main(out: str) -> None:
    """All cases; rank 0 keeps what it has seen."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("shard",))
    held = {
        name: resident_at_peak(asked, mesh, choice, MICRO_STEPS)
        for name, (asked, choice) in CASES.items()
    }
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(held))
    print(f"rank {dist.get_rank()} has seen it all", flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
