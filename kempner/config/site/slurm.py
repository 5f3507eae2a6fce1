"""Configuration of a Slurm job: how many ranks, what srun is told, the container they run in."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import model_validator

from kempner.config.section import Key, NonNegativeInt, PositiveInt, Section, Text

_OURS = {
    "--nodes": "slurm.hosts",
    "--nodelist": "sbatch --nodelist",
    "--exclude": "sbatch --exclude",
    "--ntasks": "slurm.procs",
    "--ntasks-per-node": "slurm.procs",
    "--ntasks-per-gpu": "slurm.procs",
    "--cpus-per-task": "sbatch --cpus-per-task",
    "--jobid": "kempner supervise --jobid",
    "--job-name": "sbatch --job-name",
    "--kill-on-bad-exit": "",
    "--no-kill": "",
    "--wait": "",
    "--export": "",
    "--output": "sbatch --output",
    "--error": "sbatch --error",
    "--label": "",
    "--pty": "",
    "--multi-prog": "",
    "--het-group": "",
}
"""Options of srun that kempner gives itself, and what to use instead of them; empty if nothing."""

_SHORT = {
    "-N": "--nodes",
    "-w": "--nodelist",
    "-x": "--exclude",
    "-n": "--ntasks",
    "-c": "--cpus-per-task",
    "-J": "--job-name",
    "-K": "--kill-on-bad-exit",
    "-k": "--no-kill",
    "-W": "--wait",
    "-o": "--output",
    "-e": "--error",
    "-l": "--label",
}


class ContainerSection(Section):
    """The container of the ranks: an image that srun's plugin pyxis opens, or a command before
    theirs."""

    image: Annotated[Text | None, Key(example="/shared/images/train.sqsh")] = None
    """srun --container-image: an image for pyxis and enroot, such as "nvcr.io#nvidia/pytorch:25.09"
    or a .sqsh file."""
    mounts: Annotated[list[Text], Key(example=["/shared:/shared"])] = []  # noqa: RUF012 - pydantic copies it
    """srun --container-mounts: what of the node is seen inside, as in ["/shared:/shared"]. The
    project's folder must be among it."""
    mount_home: bool | None = None
    """srun --container-mount-home or --no-container-mount-home; as the site has it by default."""
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
    """How to use a Slurm job; the defaults are what Slurm says about it."""

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
    "--network=single_node_vni"]; they win over kempner's own."""
    container: ContainerSection = ContainerSection()
    """The container in which the ranks run; none by default. The supervisor stays outside."""
    python: Annotated[Text | None, Key(example="/opt/conda/bin/python")] = None
    """The Python of the ranks, with kempner installed, as it is called where they run; by default
    the supervisor's."""
    setup: Annotated[list[Text], Key(example=["uv", "sync"])] = []  # noqa: RUF012 - pydantic copies it
    """A command that runs once, on one node and where the ranks will run, before they start, such
    as ["uv", "sync"]. If it fails nothing is started."""

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
