"""The batch script and the sbatch command of a submission."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

SCRIPT = """#!/bin/bash
#SBATCH --signal=B:SIGTERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
trap '' TERM  # a warning must not end the job before the supervisor is there
cd "${SLURM_SUBMIT_DIR}"
exec %s -P -m kempner supervise --launcher srun "$@"
"""


@dataclass(frozen=True)
class Resources:
    """What a job asks for, in submitit's words; None is left to Slurm.

    `tasks_per_node` are ranks, by default one for each GPU.
    """

    nodes: int = 1
    tasks_per_node: int | None = None
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    mem_gb: float | None = None
    timeout_min: int | None = None

    def wrong(self) -> str:
        """What makes no sense, in a few words; empty if nothing."""
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "gpus_per_node" else 1
            if value is not None and (isinstance(value, bool) or not value >= least):
                return f"{field.name}={value} must be at least {least}"
        return ""

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node."""
        return self.tasks_per_node or self.gpus_per_node or 1

    def options(self) -> list[str]:
        """As sbatch takes them."""
        given = {
            "nodes": self.nodes,
            "ntasks-per-node": self.ranks_per_node,
            "gpus-per-node": self.gpus_per_node or None,
            "cpus-per-task": self.cpus_per_task,
            "mem": None if self.mem_gb is None else f"{round(1024 * self.mem_gb)}M",
            "time": self.timeout_min,
        }
        return _options(given)


def script(python: str) -> str:
    """The batch script: what scripts/slurm/multinode.sh does, whatever the resources."""
    return SCRIPT % shlex.quote(python)


def sbatch(
    resources: Resources,
    slurm: Mapping[str, object],
    name: str,
    output: Path,
    file: Path,
    words: Sequence[str],
) -> list[str]:
    """The command that submits `file` with arguments `words`. Options in `slurm` win."""
    ours = [f"--job-name={name}", f"--output={str(output).replace('%', '%%')}"]
    options = [*ours, *resources.options(), *_options(slurm)]
    return ["sbatch", "--parsable", *options, str(file), *words]


def _options(given: Mapping[str, object]) -> list[str]:
    found = []
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            found.append(option)
        elif value is not None and value is not False:
            found.append(f"{option}={value}")
    return found
