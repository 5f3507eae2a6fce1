"""Configuration of the site: the Slurm job, the network, hooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kempner.config.section import Key, NonNegativeInt, PositiveFloat, PositiveInt, Section, Text


class HooksSection(Section):
    """Commands for /bin/sh that are run at events; the facts are in variables such as
    KEMPNER_EVENT, KEMPNER_REASON and KEMPNER_NODE. A failing hook never ends the run."""

    before_start: Annotated[Text | None, Key(example="/opt/site/bin/node-check --quick")] = None
    """Run on every node before each start of the ranks, such as a node check of the site. A node on
    which it fails is suspect."""
    node_suspect: Annotated[
        Text | None, Key(example="echo $KEMPNER_NODE: $KEMPNER_REASON >> suspects.txt")
    ] = None
    """Run after a node has become suspect."""
    give_up: Annotated[
        Text | None, Key(example="echo $KEMPNER_REASON | mail -s kempner me@example.org")
    ] = None
    """Run after kempner gave up on the run."""
    not_requeued: Annotated[
        Text | None, Key(example="sbatch scripts/slurm/multinode.sh train.toml")
    ] = None
    """Run after a Slurm job was not requeued, though the run could continue."""
    completed: Annotated[Text | None, Key(example="sbatch evaluate.sh")] = None
    """Run after the last step."""
    timeout: Annotated[PositiveFloat, Key("seconds", 120.0)] = 60.0
    """Seconds after which a hook is killed, and counts as failed."""


_OURS = {
    "--nodes": "slurm.hosts", "--nodelist": "sbatch --nodelist", "--exclude": "sbatch --exclude",
    **dict.fromkeys(("--ntasks", "--ntasks-per-node", "--ntasks-per-gpu"), "slurm.procs"),
    "--cpus-per-task": "sbatch --cpus-per-task", "--jobid": "kempner supervise --jobid",
    "--job-name": "sbatch --job-name", "--output": "sbatch --output", "--error": "sbatch --error",
    "--kill-on-bad-exit": "", "--no-kill": "", "--wait": "", "--export": "", "--label": "",
    "--pty": "", "--multi-prog": "", "--het-group": "",
}  # fmt: skip
"""Options of srun that kempner sets itself, and what to use instead; empty if nothing."""

_SHORT = {
    "-N": "--nodes", "-w": "--nodelist", "-x": "--exclude", "-n": "--ntasks", "-c":
    "--cpus-per-task", "-J": "--job-name", "-K": "--kill-on-bad-exit", "-k": "--no-kill", "-W":
    "--wait", "-o": "--output", "-e": "--error", "-l": "--label",
}  # fmt: skip


class ContainerSection(Section):
    """The container of the ranks: an image for srun's plugin pyxis, or a command that starts it."""

    image: Annotated[Text | None, Key(example="/shared/images/train.sqsh")] = None
    """srun --container-image: an image for pyxis and enroot, such as "nvcr.io#nvidia/pytorch:25.09"
    or a .sqsh file."""
    mounts: Annotated[list[Text], Key(example=["/shared:/shared"])] = []  # noqa: RUF012 - pydantic copies it
    """srun --container-mounts: folders of the node to mount, as in ["/shared:/shared"]. They must
    include the project's folder."""
    mount_home: bool | None = None
    """srun --container-mount-home or --no-container-mount-home; the site's default if not set."""
    workdir: Annotated[Text | None, Key(example="/shared/project")] = None
    """srun --container-workdir; the folder in which kempner was started by default."""
    prefix: Annotated[list[Text], Key(example=["apptainer", "exec", "--nv", "train.sif"])] = []  # noqa: RUF012 - pydantic copies it
    """A command before that of each rank, instead of an image, such as ["apptainer", "exec",
    "--nv", "image.sif"]. It must keep the environment, the process ids and the network."""

    @model_validator(mode="after")
    def _is_one_kind(self) -> Self:
        if self.image is not None and self.prefix:
            raise ValueError("image and prefix are two kinds of containers; remove one")
        if self.image is None:
            for key in ("mounts", "mount_home", "workdir"):
                if getattr(self, key) not in (None, []):
                    raise ValueError(f"{key} has no effect without image; remove it")
        return self


class SlurmSection(Section):
    """How to use a Slurm job; defaults come from Slurm."""

    launcher: Annotated[
        Literal["auto", "local", "srun", "torchrun"],
        Key(
            values={
                "auto": "srun inside of a Slurm job, local elsewhere",
                "local": "ranks are children of the supervisor, on this machine",
                "srun": "a Slurm step with an agent on each node, which starts the ranks",
                "torchrun": "a Slurm step with one torchrun on each node",
            }
        ),
    ] = "auto"
    """Launcher of `kempner supervise` without --launcher."""
    procs: Annotated[PositiveInt | None, Key("ranks", 4)] = None
    """Ranks per node; by default one per GPU, or one per task if there are no GPUs."""
    hosts: Annotated[PositiveInt | None, Key("nodes", 8)] = None
    """Number of nodes to use; by default all of the job's."""
    cpus: Annotated[PositiveInt | None, Key("CPUs", 32)] = None
    """CPUs per node, shared by its ranks; as allocated by default."""
    memory_mb: Annotated[PositiveInt | None, Key("MiB", 512_000)] = None
    """MiB of memory per node; as allocated by default."""
    gpus_per_node: Annotated[NonNegativeInt | None, Key("GPUs", 4)] = None
    """GPUs per node; as allocated by default."""
    resubmit: bool = False
    """Submit the batch script again if Slurm refuses to requeue the job. Needs Slurm's accounting
    (sacct), from which the submit options are read."""
    srun_args: Annotated[list[Text], Key(example=["--cpu-bind=cores"])] = []  # noqa: RUF012 - pydantic copies it
    """More options for the srun that starts the ranks, as in ["--cpu-bind=cores",
    "--network=single_node_vni"]; they override kempner's own."""
    container: ContainerSection = ContainerSection()
    """The container in which the ranks run; none by default. The supervisor stays outside."""
    python: Annotated[Text | None, Key(example="/opt/conda/bin/python")] = None
    """The Python of the ranks, with kempner installed: its path where they run; by default the
    supervisor's."""
    setup: Annotated[list[Text], Key(example=["uv", "sync"])] = []  # noqa: RUF012 - pydantic copies it
    """A command that runs once, on one node and in the ranks' environment, before they start, such
    as ["uv", "sync"]. If it fails, nothing is started."""

    @model_validator(mode="after")
    def _leaves_ours_alone(self) -> Self:
        if self.srun_args and not self.srun_args[0].startswith("-"):
            raise ValueError(f'srun_args begins with "{self.srun_args[0]}", which is no option')
        for word in self.srun_args:
            name = word.partition("=")[0]
            name = name if word.startswith("--") else _SHORT.get(word[:2], word)
            if name in _OURS:
                instead = f"; use {_OURS[name]}" if _OURS[name] else ""
                raise ValueError(f'srun_args has "{word}", which kempner sets itself{instead}')
        return self


class NcclSection(Section):
    """NCCL's environment variables; one that is already exported takes precedence."""

    ib_disable: bool | None = None
    """NCCL_IB_DISABLE: keep NCCL off InfiniBand."""
    net_gdr_level: Annotated[Annotated[int, Field(ge=0, le=5)] | None, Key("level", 2)] = None
    """NCCL_NET_GDR_LEVEL: how far apart GPU and adapter may be for direct transfers."""
    ib_gid_index: Annotated[NonNegativeInt | None, Key("index", 3)] = None
    """NCCL_IB_GID_INDEX: 3 is usual for RoCE v2; InfiniBand itself needs none."""
    nvls_enable: bool | None = None
    """NCCL_NVLS_ENABLE: reduce inside of NVSwitch; off saves memory on each GPU."""
    buffsize: Annotated[PositiveInt | None, Key("bytes", 8_388_608)] = None
    """NCCL_BUFFSIZE: bytes of the buffers between two GPUs; a power of two."""
    debug: Annotated[
        Literal["VERSION", "WARN", "INFO", "TRACE"] | None,
        Key(
            values={
                "VERSION": "its version, at the start",
                "WARN": "errors, and what led to them",
                "INFO": "also how it set itself up: interfaces, rings, channels",
                "TRACE": "also every call; only in builds that have it",
            }
        ),
    ] = None
    """NCCL_DEBUG: how much NCCL logs."""

    def environment(self) -> dict[str, str]:
        return {
            f"NCCL_{name.upper()}": value if isinstance(value, str) else str(int(value))
            for name, value in self
            if value is not None
        }


class DistributedSection(Section):
    """How the ranks reach each other."""

    interface: Annotated[Text | None, Key(example="ib0")] = None
    """Network interface for Gloo and NCCL. Default: loopback on one node; on several nodes the
    InfiniBand or other fabric interface of each, or with a warning the one that leads to rank 0."""
    nccl: NcclSection = NcclSection()
    """NCCL settings; NCCL's own defaults where not set."""
    timeout: Annotated[PositiveFloat, Key("seconds", 3600.0)] = 1800.0
    """Seconds after which a collective that waits for a peer fails."""
    avoid_record_streams: bool | None = None
    """TORCH_NCCL_AVOID_RECORD_STREAMS: collectives hold their tensors themselves, which needs less
    memory. torch's default if not set."""
    cuda_device_max_connections: Annotated[PositiveInt | None, Key("queues", 1)] = None
    """CUDA_DEVICE_MAX_CONNECTIONS: queues between a process and its GPU; 1 keeps the order of
    kernels, which some overlap of tensor parallelism needs."""
    expandable_segments: bool | None = None
    """expandable_segments in PYTORCH_CUDA_ALLOC_CONF: less fragmentation. Other exported settings
    stay."""

    def environment(self, exported: Mapping[str, str]) -> dict[str, str]:
        wanted = self.nccl.environment()
        if self.avoid_record_streams is not None:
            wanted["TORCH_NCCL_AVOID_RECORD_STREAMS"] = str(int(self.avoid_record_streams))
        if self.cuda_device_max_connections is not None:
            wanted["CUDA_DEVICE_MAX_CONNECTIONS"] = str(self.cuda_device_max_connections)
        added = {name: value for name, value in wanted.items() if name not in exported}
        allocator = exported.get(_ALLOCATOR, "")
        if self.expandable_segments is not None and _SEGMENTS not in allocator:
            own = f"{_SEGMENTS}:{self.expandable_segments}"
            added[_ALLOCATOR] = f"{allocator},{own}" if allocator else own
        return added


_ALLOCATOR, _SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments"
