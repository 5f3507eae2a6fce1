"""What a batch script starts its ranks with: srun, torchrun, accelerate, or nothing but Python.

Each is taken apart into the ranks that it starts on a node and the command that each of them is.
What it is not certain of it refuses: a job that runs with other ranks than before is worse than one
that is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from kempner.cluster.slurm.directives import Directives
from kempner.project.wrap.shell import CannotWrapError, Command, Word
from kempner.project.wrap.srun import after_options, one_process, read_srun, tasks


class Kind(IntEnum):
    """What a command is; the greater ones are more likely to be the training."""

    OTHER = 0
    PYTHON = 1
    LAUNCHER = 2


@dataclass(frozen=True)
class Start:
    """How kempner is to start what a command starts.

    `command` are the words of a rank, in the shell's words; `kept` is the byte of the script from
    which on they are as they were, after `command`. `procs` are ranks per node, in the shell's
    words, empty for one on each GPU; `hosts` are nodes, empty for all of the job's; `srun_args` are
    options for the srun that starts the ranks.
    """

    command: tuple[str, ...]
    kept: int
    procs: str
    hosts: str = ""
    srun_args: tuple[str, ...] = ()


_SKIPPED = ("exec", "time", "command")
"""Words before a command that need not stay."""

_CARRIERS = frozenset(
    (
        *("singularity", "apptainer", "conda", "mamba", "micromamba", "uv", "poetry", "pixi"),
        *("pipenv", "hatch", "rye", "env", "nice", "stdbuf", "numactl", "taskset", "timeout"),
        *("nsys", "ncu", "strace", "nohup", "catchsegv", "shifter", "podman-hpc"),
    )
)
"""Commands that run another one, which is among their words."""

_UTILITIES = frozenset(
    (
        *("hostname", "nvidia-smi", "rocm-smi", "cp", "rsync", "mkdir", "rm", "ls", "env", "tar"),
        *("printenv", "date", "df", "free", "lscpu", "true", "sleep", "echo", "cat", "unzip"),
        *("ibstat", "nvcc", "ulimit", "touch", "mv", "unsquashfs", "dcgmi", "scontrol", "ip", "id"),
        *("enroot", "ray"),
    )
)
"""Commands that srun starts on the nodes before the training."""

_MPI = ("mpirun", "mpiexec", "orterun", "horovodrun", "deepspeed", "jsrun", "aprun", "ibrun")
"""Launchers whose ranks do not meet by torch's variables, or are started in a way of their own."""

_NOT_TRAINING = ("pip", "venv", "ipykernel", "compileall", "http.server", "zipfile", "tarfile")
_LAUNCHING = ("torch.distributed.run", "torch.distributed.launch", "torch.distributed.elastic")


def kind_of(command: Command, variables: Mapping[str, str]) -> Kind:
    """Whether a command is likely to be the training."""
    words = _values(command.words, variables)
    while words and (words[0] in _SKIPPED or _base(words[0]) == "srun"):
        if _base(words[0]) == "srun":
            begin = after_options(words[1:]) + 1
            inner = _base(words[begin]) if begin < len(words) else ""
            return Kind.OTHER if inner in _UTILITIES else Kind.LAUNCHER
        words = words[1:]
    at = _core(words)
    if at is None:
        return Kind.OTHER
    name, rest = _base(words[at]), words[at + 1 :]
    if name in ("torchrun", *_MPI) or (name == "accelerate" and rest[:1] == ["launch"]):
        return Kind.LAUNCHER
    if name.startswith("python"):
        module = _module(rest)
        if module in _LAUNCHING or (module or "").startswith("accelerate."):
            return Kind.LAUNCHER
        if module in _NOT_TRAINING or any(word in ("-c", "-V", "--version") for word in rest[:3]):
            return Kind.OTHER
        return Kind.PYTHON if rest else Kind.OTHER
    return Kind.PYTHON if name.endswith(".py") else Kind.OTHER


def take_apart(command: Command, asked: Directives, variables: Mapping[str, str]) -> Start:
    """How kempner is to start it. Raises `CannotWrapError`."""
    words, values = list(command.words), _values(command.words, variables)
    while values and values[0] in _SKIPPED:
        words, values = words[1:], values[1:]
    if values and _base(values[0]) == "srun":
        srun = read_srun(words, values)
        procs, hosts = tasks(srun.options, asked)
        words, values = words[srun.length :], values[srun.length :]
        start = Start((), words[0].start if words else 0, procs, hosts, srun.kept)
        return _ranks(start, words, values, asked, by_srun=True)
    _check_mpi(values)
    procs, hosts = one_process(asked)
    start = Start((), words[0].start if words else 0, procs, hosts)
    return _ranks(start, words, values, asked, by_srun=False)


def _ranks(
    start: Start,
    words: Sequence[Word],
    values: Sequence[str | None],
    asked: Directives,
    *,
    by_srun: bool,
) -> Start:
    """The ranks that these words start where `start` starts each of them once."""
    if not words:
        raise CannotWrapError("starts nothing")
    _check_mpi(values)
    at = _core(values)
    if at is not None and (launch := _launcher(values[at:])) is not None:
        if start.procs != "1":
            raise CannotWrapError(
                f"starts {start.procs} of {launch[0]} on a node: have srun start one"
            )
        reader = _accelerate if launch[0] == "accelerate" else _torchrun
        made, procs, length = reader(words[at:], values[at:], launch[1], asked)
        left = words[at + length :]
        if not left:
            raise CannotWrapError("starts nothing")
        before = tuple(word.source for word in words[:at])
        return replace(start, command=(*before, *made), kept=left[0].start, procs=procs)
    if values[0] is None:
        raise CannotWrapError(f"its command is in {words[0].source}: write it out")
    if by_srun:
        return start
    if (gpus := asked.gpus_per_node) not in (0, 1):
        raise CannotWrapError(
            f"starts one process with {gpus or 'several'} GPUs, and kempner one for each GPU: "
            f"start it with torchrun --nproc-per-node={gpus or 'N'} or with srun first, or ask for "
            "one GPU"
        )
    return start


def _check_mpi(values: Sequence[str | None]) -> None:
    at = _core(values)
    name = _base(values[at or 0]) if values else ""
    if name in _MPI:
        raise CannotWrapError(
            f"starts its ranks with {name}: kempner starts them itself, and they meet by RANK, "
            "WORLD_SIZE and MASTER_ADDR; start them with srun or torchrun first"
        )


def _values(words: Sequence[Word], variables: Mapping[str, str]) -> list[str | None]:
    """What the shell makes of words, where that is known."""
    return [w.value if w.value is not None else _of_variable(w, variables) for w in words]


def _of_variable(word: Word, variables: Mapping[str, str]) -> str | None:
    found = re.fullmatch(r'"?\$\{?(\w+)\}?"?', word.source)
    value = variables.get(found[1]) if found else None
    return value if value and len(value.split()) == 1 else None


def _base(word: str | None) -> str:
    return (word or "").rpartition("/")[2]


def _core(values: Sequence[str | None]) -> int | None:
    """The place of the command that is meant, behind those that only carry it."""
    for at, value in enumerate(values):
        name = _base(value)
        known = name in ("torchrun", "accelerate", *_MPI) or name.endswith(".py")
        if known or re.fullmatch(r"python[\d.]*", name):
            return at
        if at == 0 and name not in _CARRIERS:
            return None
    return None


def _module(rest: Sequence[str | None]) -> str | None:
    """The module of `python -m MODULE`, whose options may come before."""
    for at, word in enumerate(rest):
        if word == "-m":
            return rest[at + 1] if at + 1 < len(rest) else None
        if not (word or "").startswith("-"):
            return None
    return None


def _launcher(values: Sequence[str | None]) -> tuple[str, int] | None:
    """Which launcher of ranks these words begin with, and how many words name it."""
    name = _base(values[0])
    if name == "torchrun":
        return "torchrun", 1
    if name == "accelerate" and values[1:2] == ["launch"]:
        return "accelerate", 2
    module = _module(values[1:]) if name.startswith("python") else None
    if module == "torch.distributed.launch" and not {"--use_env", "--use-env"} & set(values):
        raise CannotWrapError(
            "torch.distributed.launch gives the program --local-rank, and kempner LOCAL_RANK: "
            "start it with torchrun first"
        )
    if module in _LAUNCHING:
        return "torchrun", values.index(module) + 1
    if module in ("accelerate.commands.launch", "accelerate.launch"):
        return "accelerate", values.index(module) + 1
    return None


_TORCHRUN_VALUES = frozenset(
    (
        *("nnodes", "nproc-per-node", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf"),
        *("max-restarts", "monitor-interval", "start-method", "event-log-handler", "role"),
        *("log-dir", "redirects", "tee", "local-ranks-filter", "node-rank", "master-addr"),
        *("master-port", "local-addr", "logs-specs", "numa-binding", "signals-to-handle"),
        *("r", "t", "shutdown-timeout"),
    )
)
_ACCELERATE_VALUES = frozenset(
    (
        *("num-processes", "num-machines", "machine-rank", "main-process-ip", "main-process-port"),
        *("mixed-precision", "dynamo-backend", "gpu-ids", "rdzv-backend", "rdzv-conf"),
        *("max-restarts", "monitor-interval", "num-cpu-threads-per-process", "same-network"),
    )
)


@dataclass(frozen=True)
class _Read:
    """The options of a launcher, by their long names, in the shell's words; `flags` have none."""

    options: Mapping[str, str]
    flags: frozenset[str]
    length: int


def _read_options(
    words: Sequence[Word], values: Sequence[str | None], at: int, taking: frozenset[str], name: str
) -> _Read:
    options, flags = dict[str, str](), set[str]()
    known = ("standalone", "m", "module", "no-python", "use-env", "multi-gpu", "same-network")
    while at < len(words):
        source = words[at].source
        if not source.startswith("-"):
            if values[at] is None and source.startswith(("$", '"$')) and at + 1 < len(words):
                raise CannotWrapError(
                    f"options of {name} are in {source}, where kempner cannot read them: write "
                    "them out"
                )
            break
        option, equals, value = source.lstrip("-").partition("=")
        option = option.replace("_", "-")
        at += 1
        if option in known and not equals:
            flags.add(option)
        elif option in taking:
            if not equals:
                value, at = (words[at].source if at < len(words) else ""), at + 1
            options[option] = value
        else:
            raise CannotWrapError(
                f"gives {name} --{option}, of which kempner has no equal: see the page on other "
                "trainers, then write kempner supervise yourself"
            )
    return _Read(options, frozenset(flags), at)


def _program(read: _Read) -> tuple[str, ...]:
    """What takes the launcher's place before the program."""
    if "no-python" in read.flags:
        return ()
    return ("python", "-m") if read.flags & {"m", "module"} else ("python",)


def _torchrun(
    words: Sequence[Word], values: Sequence[str | None], named: int, asked: Directives
) -> tuple[tuple[str, ...], str, int]:
    """A rank's command, ranks per node, and how many words this was."""
    read = _read_options(words, values, named, _TORCHRUN_VALUES, "torchrun")
    procs = read.options.get("nproc-per-node", "1")
    if procs in ("gpu", "auto"):
        procs = str(asked.gpus_per_node or "")
    return _program(read), procs, read.length


def _accelerate(
    words: Sequence[Word], values: Sequence[str | None], named: int, asked: Directives
) -> tuple[tuple[str, ...], str, int]:
    """The same; what accelerate would export for its ranks is given to them by env(1)."""
    read = _read_options(words, values, named, _ACCELERATE_VALUES, "accelerate launch")
    nodes, total = asked.number("nodes") or 1, read.options.get("num-processes", "")
    count = int(total) if total.isdecimal() else 0
    if not count or count % nodes:
        raise CannotWrapError(
            "takes its number of processes from elsewhere: give accelerate launch --num_processes"
        )
    dynamo = read.options.get("dynamo-backend", "no")
    if dynamo.lower() != "no":
        raise CannotWrapError(f"gives accelerate launch --dynamo_backend={dynamo}: give it to "
                              "Accelerator(...) instead")  # fmt: skip
    precision = read.options.get("mixed-precision", "no")
    exported = () if precision == "no" else ("env", f"ACCELERATE_MIXED_PRECISION={precision}")
    return (*exported, *_program(read)), str(count // nodes), read.length
