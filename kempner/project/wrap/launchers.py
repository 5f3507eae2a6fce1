"""Parses how a batch script starts its ranks: srun, torchrun, accelerate, or Python alone.

The result is the number of ranks per node and the command of each. Anything uncertain is refused: a
job with other ranks than before is worse than an unchanged one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from kempner.cluster.slurm.directives import Directives
from kempner.project.wrap.shell import CannotWrapError, Command, Word

_SHORT = {
    **{"n": "ntasks", "N": "nodes", "c": "cpus-per-task", "w": "nodelist", "G": "gpus", "m":
       "distribution", "t": "time", "p": "partition", "J": "job-name", "o": "output", "e": "error",
       "A": "account", "i": "input", "C": "constraint", "x": "exclude", "D": "chdir", "K":
       "kill-on-bad-exit", "l": "label", "u": "unbuffered", "W": "wait", "Q": "quiet", "v":
       "verbose", "s": "oversubscribe", "O": "overcommit", "k": "no-kill", "r": "relative",
       "d": "dependency", "q": "qos", "X": "disable-status", "I": "immediate"},
}  # fmt: skip
_COUNTS = ("ntasks", "nodes", "ntasks-per-node")
_NEEDLESS = frozenset(
    (
        *("label", "unbuffered", "kill-on-bad-exit", "export", "cpus-per-task", "gpus", "gres"),
        *("gpus-per-node", "gpus-per-task", "mem", "mem-per-cpu", "mem-per-gpu", "wait", "jobid"),
        *("time", "exclusive", "overlap", "exact", "partition", "job-name", "account", "qos"),
        *("output", "error", "no-kill", "quiet", "verbose", "oversubscribe"),
        *("overcommit", "disable-status", "constraint", "open-mode", "immediate"),
    )
)
"""Options of srun that kempner sets itself, or that the job has already."""

_BINDING = frozenset(
    (
        *("cpu-bind", "gpu-bind", "mem-bind", "accel-bind", "hint", "distribution", "tres-bind"),
        *("threads-per-core", "cpu-freq", "network", "switches"),
    )
)
"""Options that are passed on to kempner's srun."""

_FLAGS = frozenset(
    (
        *("label", "unbuffered", "kill-on-bad-exit", "exclusive", "overlap", "exact", "no-kill"),
        *("quiet", "verbose", "oversubscribe", "overcommit", "disable-status", "pty"),
        *("multi-prog", "container-mount-home", "no-container-mount-home", "immediate"),
    )
)
_VALUES = frozenset("-" + letter for letter, name in _SHORT.items() if name not in _FLAGS)


@dataclass(frozen=True)
class Srun:
    """An srun command: `options` by long name, in shell syntax, `kept` ones to pass on, and the
    `length` of its part of the command in words."""

    options: Mapping[str, str]
    kept: tuple[str, ...]
    length: int


def after_options(values: Sequence[str | None]) -> int:
    """The number of words after `srun` that are options and their values."""
    at = 0
    while at < len(values) and (word := values[at] or "").startswith("-"):
        long = word.startswith("--") and "=" not in word and word[2:] not in _FLAGS
        at += 2 if word in _VALUES or long else 1
    return at


def read_srun(words: Sequence[Word], values: Sequence[str | None]) -> Srun:
    options, kept, at = dict[str, str](), list[str](), 1
    while at < len(words) and words[at].source.startswith(("-", '"-', "'-")):
        source = words[at].source
        name, value, taken = _option(source, words[at + 1 :])
        at += 1 + taken
        if name in _COUNTS:
            options[name] = value
        elif name in _BINDING:
            kept.append(f"--{name}={_plain(name, value)}")
        elif name == "export" and "=" in value:
            raise CannotWrapError(
                f"gives its tasks variables (--export={value}): export them in a line before"
            )
        elif name == "het-group":
            raise CannotWrapError(
                "starts a part of a heterogeneous job, which kempner cannot requeue: ask for one "
                "set of resources"
            )
        elif name.startswith("container-"):
            raise CannotWrapError(
                f"has --{name}, and kempner opens containers by [slurm.container] of a "
                "configuration: see its page on sites, then write kempner supervise yourself"
            )
        elif name not in _NEEDLESS:
            raise CannotWrapError(f"gives srun --{name}, of which kempner has no equal: remove it")
    return Srun(options, tuple(kept), at)


def _option(source: str, following: Sequence[Word]) -> tuple[str, str, int]:
    """Long name and value of an option, in shell syntax, and how many of the `following` words are
    its value."""
    if source.startswith("--"):
        name, equals, value = source[2:].partition("=")
        if equals or name in _FLAGS:
            return name, value, 0
    else:
        name, value = _SHORT.get(source[1:2], source.lstrip("-")), source[2:]
        if value or name in _FLAGS:
            return name, value.removeprefix("="), 0
    return name, following[0].source if following else "", 1


def _plain(name: str, value: str) -> str:
    if "$" in value or "`" in value:
        raise CannotWrapError(
            f"gives srun --{name}={value}, which kempner cannot read: write it out"
        )
    return " ".join(shlex.split(value))


_OF_JOB = re.compile(r'"?\$\{?SLURM_(NTASKS|NPROCS|NNODES|JOB_NUM_NODES|NTASKS_PER_NODE)\}?"?')


def tasks(options: Mapping[str, str], asked: Directives) -> tuple[str, str]:
    """The number of tasks per node, and of nodes (empty for all of the job's), that srun uses."""
    given = {name: value for name, value in options.items() if not _OF_JOB.fullmatch(value)}
    for name, value in given.items():
        if not value.isdecimal():
            raise CannotWrapError(
                f"gives srun --{name}={value}, which kempner cannot read: write the number"
            )
    numbers = {name: int(value) for name, value in given.items()}
    of_job = asked.number("nodes")
    nodes = numbers.get("nodes", of_job)
    hosts = "" if nodes is None or nodes == of_job or nodes == (of_job or 1) else str(nodes)
    each = numbers.get("ntasks-per-node")
    total = numbers.get("ntasks")
    if total is None and each is None:
        each, total = asked.number("ntasks-per-node"), asked.number("ntasks")
    if each is None and any(asked.last(f"ntasks-per-{of}") for of in ("gpu", "socket", "core")):
        raise CannotWrapError("starts tasks by GPU, socket or core: give --ntasks-per-node")
    if each is not None:
        return str(each), hosts
    if total in (None, 1):
        return "1", ("1" if total == 1 and (nodes or 1) > 1 else hosts)
    assert total is not None
    if nodes is None or total % nodes:
        raise CannotWrapError(
            f"starts {total} tasks, which kempner cannot divide among "
            f"{'an unknown number of' if nodes is None else nodes} nodes: give the job --nodes and "
            "--ntasks-per-node"
        )
    return str(total // nodes), hosts


def one_process(asked: Directives) -> tuple[str, str]:
    """As `tasks`, for a command without launcher: one process, on the job's first node."""
    nodes = asked.number("nodes")
    if nodes is not None and nodes > 1:
        raise CannotWrapError(
            f"runs on the first of {nodes} nodes alone: start it with srun on all of them first, "
            "or ask for one node"
        )
    several = nodes is None and bool(asked.last("nodes") or (asked.number("ntasks") or 1) > 1)
    return "1", "1" if several else ""


class Kind(IntEnum):
    """The kind of a command; greater ones are more likely to be the training."""

    OTHER = 0
    PYTHON = 1
    LAUNCHER = 2


@dataclass(frozen=True)
class Start:
    """How kempner starts the ranks of a command. `command` are the first words of a rank, in shell
    syntax; they are followed by the script's own words from byte `kept` on. `procs` is the number
    of ranks per node in shell syntax, empty for one per GPU, `hosts` the number of nodes, empty for
    all of the job's; `srun_args` are options for the srun that starts the ranks."""

    command: tuple[str, ...]
    kept: int
    procs: str
    hosts: str = ""
    srun_args: tuple[str, ...] = ()


_SKIPPED = ("exec", "time", "command")
"""Words before a command that can be dropped."""

_CARRIERS = frozenset(
    (
        *("singularity", "apptainer", "conda", "mamba", "micromamba", "uv", "poetry", "pixi"),
        *("pipenv", "hatch", "rye", "env", "nice", "stdbuf", "numactl", "taskset", "timeout"),
        *("nsys", "ncu", "strace", "nohup", "catchsegv", "shifter", "podman-hpc"),
    )
)
"""Commands that run another one, given in their arguments."""

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
"""Launchers whose ranks do not use torch's variables, or are started in another way."""

_NOT_TRAINING = ("pip", "venv", "ipykernel", "compileall", "http.server", "zipfile", "tarfile")
_LAUNCHING = ("torch.distributed.run", "torch.distributed.launch", "torch.distributed.elastic")


def kind_of(command: Command, variables: Mapping[str, str]) -> Kind:
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
    """Complete `start` with the ranks that these words start, once for each of its tasks."""
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
    """The words' values in the shell, None where unknown."""
    return [w.value if w.value is not None else _of_variable(w, variables) for w in words]


def _of_variable(word: Word, variables: Mapping[str, str]) -> str | None:
    found = re.fullmatch(r'"?\$\{?(\w+)\}?"?', word.source)
    value = variables.get(found[1]) if found else None
    return value if value and len(value.split()) == 1 else None


def _base(word: str | None) -> str:
    return (word or "").rpartition("/")[2]


def _core(values: Sequence[str | None]) -> int | None:
    """The index of the actual command, after those that only run it."""
    for at, value in enumerate(values):
        name = _base(value)
        known = name in ("torchrun", "accelerate", *_MPI) or name.endswith(".py")
        if known or re.fullmatch(r"python[\d.]*", name):
            return at
        if at == 0 and name not in _CARRIERS:
            return None
    return None


def _module(rest: Sequence[str | None]) -> str | None:
    for at, word in enumerate(rest):
        if word == "-m":
            return rest[at + 1] if at + 1 < len(rest) else None
        if not (word or "").startswith("-"):
            return None
    return None


def _launcher(values: Sequence[str | None]) -> tuple[str, int] | None:
    """The launcher with which these words begin, and the number of words for it."""
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
    """The options of a launcher by long name, in shell syntax, and its `flags`."""

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
    """The words that replace the launcher before the program."""
    if "no-python" in read.flags:
        return ()
    return ("python", "-m") if read.flags & {"m", "module"} else ("python",)


def _torchrun(
    words: Sequence[Word], values: Sequence[str | None], named: int, asked: Directives
) -> tuple[tuple[str, ...], str, int]:
    """A rank's command, ranks per node, and the number of words parsed."""
    read = _read_options(words, values, named, _TORCHRUN_VALUES, "torchrun")
    procs = read.options.get("nproc-per-node", "1")
    if procs in ("gpu", "auto"):
        procs = str(asked.gpus_per_node or "")
    return _program(read), procs, read.length


def _accelerate(
    words: Sequence[Word], values: Sequence[str | None], named: int, asked: Directives
) -> tuple[tuple[str, ...], str, int]:
    """As `_torchrun`; variables that accelerate would export are set by env(1)."""
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
