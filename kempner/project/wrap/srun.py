"""Reads what srun is told in a batch script: how many tasks on how many nodes, bound to what."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kempner.cluster.slurm.directives import Directives
from kempner.project.wrap.shell import CannotWrapError, Word

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
"""Options of srun that kempner gives itself, or that the job has given already."""

_BINDING = frozenset(
    (
        *("cpu-bind", "gpu-bind", "mem-bind", "accel-bind", "hint", "distribution", "tres-bind"),
        *("threads-per-core", "cpu-freq", "network", "switches"),
    )
)
"""Options that go on to the srun that kempner calls."""

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
    """`options` of srun by their long names, in the shell's words; `kept` are to be passed on; its
    part of the command has `length` words."""

    options: Mapping[str, str]
    kept: tuple[str, ...]
    length: int


def after_options(values: Sequence[str | None]) -> int:
    """How many of the words after `srun` are its options and their values."""
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
    """Long name and value of an option, in the shell's words; how many of the `following` words
    are its value."""
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
    """Tasks that srun starts on each node, and nodes where those are not all of the job's."""
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
    """A command of the batch script itself is one process, on the job's first node."""
    nodes = asked.number("nodes")
    if nodes is not None and nodes > 1:
        raise CannotWrapError(
            f"runs on the first of {nodes} nodes alone: start it with srun on all of them first, "
            "or ask for one node"
        )
    several = nodes is None and bool(asked.last("nodes") or (asked.number("ntasks") or 1) > 1)
    return "1", "1" if several else ""
