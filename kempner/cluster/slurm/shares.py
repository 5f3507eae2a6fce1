"""What a job has of each of its nodes, which need not be the same: `scontrol show job -d`.

`--gpus=12` may come as 8 on one node and 4 on another, and `--ntasks=8` as 7 CPUs and 1. What the
environment of the batch process says is about its own node alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kempner.cluster.slurm.hostlist import expand_hosts
from kempner.cluster.slurm.resources import count_gpus

_SHARE = re.compile(r"(?:^|\s)Nodes=(\S+) CPU_IDs=(\S*) Mem=\d+ GRES=(\S*)")


@dataclass(frozen=True)
class NodeShare:
    """What a job has of a node: CPUs (hardware threads) and GPUs."""

    cpus: int
    gpus: int


def node_shares(
    text: str, hosts: Callable[[str], Sequence[str]] = expand_hosts
) -> dict[str, NodeShare]:
    """The share of each node in the output of `scontrol show job -d -o`; of no job, none.

    The words for it are the same from Slurm 22.05 to 26.05 (`src/api/job_info.c`, since 24.11
    `src/scontrol/info_job.c`). Raises `ValueError` with a sentence if one cannot be read.
    """
    ours = text.partition(" Command=")[0]  # what follows is the user's
    shares: dict[str, NodeShare] = {}
    for nodes, cpus, gres in _SHARE.findall(ours):
        # A job may have other resources on a node and no GPU.
        share = NodeShare(_count_ids(cpus), count_gpus(gres) if "gpu" in gres else 0)
        shares |= dict.fromkeys(hosts(nodes), share)
    return shares


def gpus_by_node(shares: Mapping[str, NodeShare], nodes: Sequence[str]) -> dict[str, int]:
    """The GPUs of these nodes; empty if not all of them are known."""
    if not all(node in shares for node in nodes):
        return {}
    return {node: shares[node].gpus for node in nodes}


def _count_ids(ids: str) -> int:
    """`0-3,8` is 5."""
    total = 0
    for part in filter(None, ids.split(",")):
        first, _, last = part.partition("-")
        total += int(last or first) - int(first) + 1
    return total
