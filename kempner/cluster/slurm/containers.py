"""Options by which srun opens a container (the plugin pyxis), and whether it knows them."""

from __future__ import annotations

import re
from collections.abc import Sequence

IMAGE = "--container-image"
"""Slurm's own `--container`, for OCI bundles, is another option."""


def container_options(
    image: str, mounts: Sequence[str], mount_home: bool | None, workdir: str
) -> tuple[str, ...]:
    """srun's options for an image. They are for a step, never for `#SBATCH`: in a container the
    batch script would find neither Slurm's commands nor its supervisor."""
    home = {None: (), True: ("--container-mount-home",), False: ("--no-container-mount-home",)}
    return (
        f"{IMAGE}={image}",
        *((f"--container-mounts={','.join(mounts)}",) if mounts else ()),
        *home[mount_home],
        f"--container-workdir={workdir}",
    )


def knows_option(help_text: str, option: str) -> bool:
    """Whether the output of `srun --help` lists an option; a plugin's come last."""
    return re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", help_text) is not None


def binding_option(options: Sequence[str]) -> str:
    """The first option that places or binds tasks, each of which must then be a rank; empty if
    there is none."""
    names = (option.partition("=")[0] for option in options)
    return next((name for name in names if name in _BINDING or name[:2] == "-m"), "")


_BINDING = frozenset(
    {
        "--cpu-bind",
        "--distribution",
        "--gpu-bind",
        "--gpus-per-task",
        "--mem-bind",
        "--ntasks-per-core",
        "--ntasks-per-socket",
        "--tres-bind",
        "--tres-per-task",
    }
)
