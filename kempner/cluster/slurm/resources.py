"""CPUs, memory and GPUs of this node in the job, each with its source.

In this order: the configuration, Slurm's environment variables (which of them are set depends on
the options of the submission), and the fields of `scontrol show job` and `scontrol show node`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from kempner.cluster.slurm.hostlist import expand_counts

CONFIGURED_GPUS = "slurm.gpus_per_node"
"""The source of a configured number of GPUs."""

_NO_GPUS = ("", "(null)", "N/A", "none")
_SOCKETS = re.compile(r"\([^)]*\)")
_GPU = re.compile(r"(?:gres[:/])?gpu(?:[:=]|$)")
_NAME = r"(?:[A-Za-z]|(?:\d+c\.)?\d+g\.\d+gb)[\w./+-]*"
"""The name of a resource or its type; those of MIG begin with a number."""
_UNITS = {"": 1, "K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}


@dataclass(frozen=True)
class Amount:
    value: int | None
    source: str

    def __str__(self) -> str:
        return f"{'unknown' if self.value is None else self.value} ({self.source})"


@dataclass(frozen=True)
class NodeResources:
    cpus: Amount
    memory_mb: Amount
    gpus: Amount


@dataclass(frozen=True)
class WantedResources:
    """The configured resources; None where nothing is configured."""

    cpus: int | None = None
    memory_mb: int | None = None
    gpus: int | None = None


def count_gpus(text: str) -> int:
    """The number of GPUs in any spelling of Slurm: `4`, `gpu:4`, `gres:gpu:4`, `gpu:h100:4`,
    `h100:4`, `gres/gpu=4`, `gpu:h100:4(S:0-1)`, sums such as `gpu:a100:2,gpu:v100:2`, `(null)`. A
    part of a GPU (MIG) counts as one: `gres:gpu:1g.10gb:7`, `gpu:3g.40gb:2(IDX:0,1)`. If some
    summands are called `gpu`, the others do not count. Raises `ValueError` with a sentence."""
    if text.strip() in _NO_GPUS:
        return 0
    parts = [part.strip() for part in _SOCKETS.sub("", text).split(",")]
    named = [part for part in parts if _GPU.match(part)]
    if not named and any(part.startswith("gres") for part in parts):
        return 0
    return sum(_count(part, text) for part in named or parts)


def parse_memory(text: str) -> int:
    """MiB of `4000`, `4000M`, `4G`, `1T` or `512K`, rounded down. Raises `ValueError`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(f"{text!r} is not a Slurm amount of memory")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def detect(
    environ: Mapping[str, str],
    *,
    configured: WantedResources | None = None,
    job: Mapping[str, str] | None = None,
    node: Mapping[str, str] | None = None,
) -> NodeResources:
    """The resources of this node in the job, as far as known. `job` and `node` are the fields of
    `scontrol show job -o` and `scontrol show node -o`. Raises `ValueError` with a sentence if a
    number cannot be parsed."""
    wanted, job, node = configured or WantedResources(), job or {}, node or {}
    cpus = _first(chain([("slurm.cpus", wanted.cpus)], _cpus(environ, job)))
    gpus = _first(chain([(CONFIGURED_GPUS, wanted.gpus)], _gpus(environ, job, node)))
    found = _memory(environ, cpus.value, gpus.value, job, node)
    memory = _first(chain([("slurm.memory_mb", wanted.memory_mb)], found))
    if memory.value == 0:
        memory = Amount(_whole(node), f"{memory.source} = 0: the whole node")
    return NodeResources(cpus, memory, gpus)


_Found = Iterator[tuple[str, int | None]]


def _cpus(environ: Mapping[str, str], job: Mapping[str, str]) -> _Found:
    yield _variable(environ, "SLURM_CPUS_ON_NODE", int)
    yield _variable(environ, "SLURM_JOB_CPUS_PER_NODE", _here(environ))
    if "NumCPUs" in job and "NumNodes" in job:
        yield "scontrol show job: NumCPUs / NumNodes", int(job["NumCPUs"]) // int(job["NumNodes"])


def _gpus(environ: Mapping[str, str], job: Mapping[str, str], node: Mapping[str, str]) -> _Found:
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        yield _variable(environ, name, count_gpus)
    if "SLURM_GPUS_PER_TASK" in environ and "SLURM_TASKS_PER_NODE" in environ:
        tasks = _here(environ)(environ["SLURM_TASKS_PER_NODE"])
        per_task = count_gpus(environ["SLURM_GPUS_PER_TASK"])
        yield "SLURM_GPUS_PER_TASK x tasks on this node", per_task * tasks
    if "TresPerNode" in job:
        yield "scontrol show job: TresPerNode", _gpus_among(job["TresPerNode"])
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        visible = [device for device in environ.get(name, "").split(",") if device]
        yield name, len(visible) or None
    if "Gres" in node and not job:  # the node may have more than the job was given
        yield "scontrol show node: Gres", _gpus_among(node["Gres"])


def inherited(environ: Mapping[str, str], job: Mapping[str, str]) -> set[str]:
    """The variables in `environ` that describe another job than `job` (fields of `scontrol show
    job`).

    sbatch and salloc pass on the environment of the calling shell, which may be in another job or a
    step of one. Slurm overwrites only the variables of options given for this job."""
    found = {
        name for name, fits in _FITS.items() if name in environ and not fits(environ[name], job)
    }
    if "SLURM_STEP_NODELIST" in environ:
        found |= {name for name in environ if name.startswith(_OF_A_TASK)}
    return found


_OF_A_TASK = (
    "SLURM_STEP", "SLURM_SRUN_COMM_", "SLURM_LABELIO", "SLURM_DIST", "SLURM_CPU_FREQ_REQ",
)  # fmt: skip
"""Prefixes of variables that srun sets in a task, and also reads as its own options."""


def _asks_for_gpus(field: str) -> Callable[[str, Mapping[str, str]], bool]:
    return lambda value, job: _gpus_among(job.get(field, "")) == count_gpus(value)


def _has(field: str) -> Callable[[str, Mapping[str, str]], bool]:
    return lambda value, job: field in job


def _fits_tasks(value: str, job: Mapping[str, str]) -> bool:
    return job.get("NtasksPerN:B:S:C", value).partition(":")[0] == value


def _fits_cpus(value: str, job: Mapping[str, str]) -> bool:
    """Slurm sets an inherited variable to 1 if no number was requested."""
    asked = value != "1" or "cpu" in job.get("TresPerTask", "")
    return asked and job.get("CPUs/Task", value) == value


def _fits_memory(value: str, job: Mapping[str, str]) -> bool:
    return "MinMemoryNode" in job and (value == "0" or parse_memory(job["MinMemoryNode"]) > 0)


_FITS: Mapping[str, Callable[[str, Mapping[str, str]], bool]] = {
    "SLURM_ARRAY_JOB_ID": _has("ArrayJobId"),
    "SLURM_ARRAY_TASK_ID": _has("ArrayJobId"),
    "SLURM_HET_SIZE": _has("HetJobId"),
    "SLURM_RESTART_COUNT": lambda value, job: int(job.get("Restarts", value)) > 0,
    "SLURM_NTASKS_PER_NODE": _fits_tasks,
    "SLURM_CPUS_PER_TASK": _fits_cpus,
    "SLURM_CPUS_PER_GPU": _has("CpusPerTres"),
    "SLURM_GPUS_PER_NODE": _asks_for_gpus("TresPerNode"),
    "SLURM_GPUS_PER_SOCKET": _has("TresPerSocket"),
    "SLURM_GPUS_PER_TASK": _asks_for_gpus("TresPerTask"),
    "SLURM_GPU_BIND": _has("TresBind"),
    "SLURM_TRES_BIND": _has("TresBind"),
    "SLURM_MEM_PER_NODE": _fits_memory,
    "SLURM_MEM_PER_CPU": _has("MinMemoryCPU"),
    "SLURM_MEM_PER_GPU": _has("MemPerTres"),
}
"""For each variable, whether its value fits the fields of a job."""

SIGNIFICANT = frozenset(_FITS) - {"SLURM_CPUS_PER_TASK", "SLURM_RESTART_COUNT"}
"""The variables that change the ranks' resources, or the job id in Slurm's commands."""


def _gpus_among(resources: str) -> int:
    """The number of GPUs in a field that lists all resources by name."""
    return count_gpus(resources) if "gpu" in resources else 0


def _memory(
    environ: Mapping[str, str],
    cpus: int | None,
    gpus: int | None,
    job: Mapping[str, str],
    node: Mapping[str, str],
) -> _Found:
    """In each of them 0 means the whole node."""
    yield _variable(environ, "SLURM_MEM_PER_NODE", parse_memory)
    for name, many in (("SLURM_MEM_PER_CPU", cpus), ("SLURM_MEM_PER_GPU", gpus)):
        source, each = _variable(environ, name, parse_memory)
        yield f"{source} x {many}", None if each is None or many is None else each * many
    if "MinMemoryNode" in job:
        yield "scontrol show job: MinMemoryNode", parse_memory(job["MinMemoryNode"])
    if "MinMemoryCPU" in job and cpus is not None:
        each = parse_memory(job["MinMemoryCPU"])
        yield f"scontrol show job: MinMemoryCPU x {cpus}", each * cpus
    yield "scontrol show node: RealMemory", _whole(node)


def _whole(node: Mapping[str, str]) -> int | None:
    return int(node["RealMemory"]) if "RealMemory" in node else None


def _first(found: Iterable[tuple[str, int | None]]) -> Amount:
    for source, value in found:
        if value is not None:
            return Amount(value, source)
    return Amount(None, "not set by Slurm or the configuration")


def _variable(
    environ: Mapping[str, str], name: str, parse: Callable[[str], int]
) -> tuple[str, int | None]:
    return name, parse(environ[name]) if environ.get(name) else None


def _here(environ: Mapping[str, str]) -> Callable[[str], int]:
    """A parser that picks this node's count from a list of counts per node."""
    node = int(environ.get("SLURM_NODEID") or "0")

    def read(text: str) -> int:
        counts = expand_counts(text)
        return counts[node] if node < len(counts) else counts[-1]

    return read


def _count(part: str, text: str) -> int:
    """`h100:4` is 4, and `gpu` alone is 1."""
    found = re.fullmatch(rf"(?:(?:gres/)?{_NAME}[:=])*(\d+)", part)
    if found is None and not re.fullmatch(rf"(?:gres[:/])?gpu(?::{_NAME})?", part):
        raise ValueError(f"{text!r} is not a Slurm number of GPUs")
    return int(found[1]) if found else 1
