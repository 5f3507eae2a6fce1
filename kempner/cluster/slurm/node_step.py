"""Runs one short task on each of a job's nodes, in a step beside what runs there.

srun passes lines of up to 1,024 bytes on whole; pieces of longer ones come between those of other
tasks. Options by which srun opens a container are those of the plugin pyxis.
"""

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
"""None of the job's GPUs: their number for the whole job does not fit every step."""


@dataclass(frozen=True)
class NodeStepOutput:
    """What the tasks printed in time, and the error output of them and of srun."""

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
    """Run `task` once on each of the `nodes`, all at once, and wait for `within` seconds.
    `allocation` is the job to do it in, None for the one around this process; `resources` are
    further options of srun. The output is empty where there is no srun. Raises `OSError` if it
    cannot start."""
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
    except BaseException:  # this process is told to leave: end the tasks, too
        asked.terminate()
        raise


_PIECE = 700
"""Bytes of an answer on one line; node and numbers come before them."""

_LINE = re.compile(r"(\S+) (\d+)/(\d+) ([\w+/=]+)", re.ASCII)


def in_lines(node: str, answer: bytes) -> str:
    """An answer of any length, from a task on this node."""
    packed = b64encode(zlib.compress(answer)).decode()
    pieces = [packed[at : at + _PIECE] for at in range(0, len(packed), _PIECE)]
    many = len(pieces)
    return "".join(f"{node} {number}/{many} {piece}\n" for number, piece in enumerate(pieces, 1))


def whole_answers(lines: Iterable[str]) -> list[bytes]:
    """The answers among the lines of all tasks, which may come in any order; what is not whole, or
    is something else, is left out."""
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
