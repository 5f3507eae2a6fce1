"""A rank that only meets the others: says where it is and what it is connected to, as JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from kempner.cluster.world import discover
from kempner.config.loading import load
from kempner.run.process.exit_codes import RunError
from kempner.training.groups.process_groups import connect


def main(config: str) -> int:
    world = discover(os.environ)
    try:
        ranks = connect(world, load(Path(config)))
    except RunError as error:
        print(error, file=sys.stderr, flush=True)
        return error.code
    total = torch.ones(1)
    dist.all_reduce(total)
    sockets = [c for c in psutil.Process().net_connections("tcp") if c.raddr]
    said = {
        "rank": world.rank,
        "local_rank": world.local_rank,
        "node": platform.node(),
        "total": total.item(),
        "port": ranks.store.port,
        "peers": sorted({c.raddr.ip.removeprefix("::ffff:") for c in sockets}),
    }
    print(json.dumps(said), flush=True)
    ranks.final_barrier()
    return 0


if __name__ == "__main__":
    os._exit(main(sys.argv[1]))
