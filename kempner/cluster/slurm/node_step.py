"""Runs a short task on each of a job's nodes, in a step of its own; and srun's options for
containers (of the pyxis plugin) and binding.

srun passes lines of up to 1,024 bytes on whole, but mixes the pieces of longer ones with other
tasks' output. So `in_lines` splits an answer, and `whole_answers` puts it together."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kempner.cluster.slurm.command import probe_environment

NO_GPUS = ("--gres=none",)
"""A step without GPUs: the job's number of GPUs does not fit every step."""


@dataclass(frozen=True)
class NodeStepOutput:
    """The output of the tasks until the timeout, and the error output of tasks and srun."""

    out: str = ""
    complaints: str = ""


def _srun(nodes: Sequence[str], allocation: str | None, resources: Sequence[str]) -> list[str]:
    return [
        *("srun", "--overlap", *resources),
        *([] if allocation is None else [f"--jobid={allocation}"]),
        "--job-name=kempner-health",
        f"--nodes={len(nodes)}",
        f"--nodelist={','.join(nodes)}",
        f"--ntasks={len(nodes)}",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--mpi=none",
        "--export=ALL",
    ]


def run_on_nodes(
    nodes: Sequence[str],
    allocation: str | None,
    task: Sequence[str],
    within: float,
    resources: Sequence[str] = NO_GPUS,
) -> NodeStepOutput:
    """Run `task` on each of `nodes` at once, for at most `within` seconds.

    `allocation` is the job to run in, None for this process's; `resources` are further srun
    options. The output is empty if there is no srun. Raises `OSError` if it cannot be started."""
    if shutil.which("srun") is None:
        return NodeStepOutput()
    asked = subprocess.Popen(
        [*_srun(nodes, allocation, resources), *task],
        env=probe_environment(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        return NodeStepOutput(*asked.communicate(timeout=within))
    except subprocess.TimeoutExpired:
        asked.kill()
        return NodeStepOutput(*asked.communicate())
    except BaseException:  # this process is being interrupted
        asked.terminate()
        raise


_PIECE = 700
"""Bytes of an answer per line, after the node and the numbers."""

_LINE = re.compile(r"(\S+) (\d+)/(\d+) ([\w+/=]+)", re.ASCII)


def in_lines(node: str, answer: bytes) -> str:
    """An answer of any length as short lines, from a task on `node`."""
    packed = b64encode(zlib.compress(answer)).decode()
    pieces = [packed[at : at + _PIECE] for at in range(0, len(packed), _PIECE)]
    many = len(pieces)
    return "".join(f"{node} {number}/{many} {piece}\n" for number, piece in enumerate(pieces, 1))


def whole_answers(lines: Iterable[str]) -> list[bytes]:
    """The complete answers in the lines of all tasks, which may come in any order; other lines are
    ignored."""
    found: dict[tuple[str, int], dict[int, str]] = {}
    for line in lines:
        if piece := _LINE.fullmatch(line):
            found.setdefault((piece[1], int(piece[3])), {})[int(piece[2])] = piece[4]
    whole = [
        "".join(pieces[number] for number in sorted(pieces))
        for (_, many), pieces in found.items()
        if len(pieces) == many
    ]
    return [answer for packed in whole if (answer := _unpack(packed)) is not None]


def _unpack(packed: str) -> bytes | None:
    try:
        return zlib.decompress(b64decode(packed))
    except (ValueError, zlib.error):
        return None


IMAGE = "--container-image"
"""The option of pyxis; Slurm's own `--container` is for OCI bundles."""


def container_options(
    image: str, mounts: Sequence[str], mount_home: bool | None, workdir: str
) -> tuple[str, ...]:
    """srun's options for a container image. Only for steps, not for `#SBATCH`: in a container the
    batch script would find neither Slurm's commands nor its supervisor."""
    home = {None: (), True: ("--container-mount-home",), False: ("--no-container-mount-home",)}
    return (
        f"{IMAGE}={image}",
        *((f"--container-mounts={','.join(mounts)}",) if mounts else ()),
        *home[mount_home],
        f"--container-workdir={workdir}",
    )


def knows_option(help_text: str, option: str) -> bool:
    """Whether the output of `srun --help` lists an option, including those of plugins."""
    return re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", help_text) is not None


def binding_option(options: Sequence[str]) -> str:
    """The first option that places or binds tasks, so that each task must be a rank; empty if there
    is none."""
    names = (option.partition("=")[0] for option in options)
    return next((name for name in names if name in _BINDING or name[:2] == "-m"), "")


def without_binding(options: Sequence[str]) -> list[str]:
    kept, value = list[str](), False
    for option in options:
        if binding_option([option]):
            value = option == "-m" or (option.startswith("--") and "=" not in option)
        elif value and not option.startswith("-"):
            value = False
        else:
            kept.append(option)
            value = False
    return kept


_BINDING = {
    "--cpu-bind", "--distribution", "--gpu-bind", "--gpus-per-task", "--mem-bind",
    "--ntasks-per-core", "--ntasks-per-socket", "--tres-bind", "--tres-per-task",
}  # fmt: skip
