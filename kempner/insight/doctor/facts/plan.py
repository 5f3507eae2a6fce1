"""What a batch script asks Slurm for, as far as it concerns a run."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from kempner.cluster.slurm.directives import read_words
from kempner.cluster.slurm.resources import count_gpus

_TORCHRUN = re.compile(r"^[^#]*--launcher[= ]torchrun\b", re.MULTILINE)
"""In the line of a script that starts the supervisor."""

DEFAULT_WARNING = 60.0
"""Seconds before the end at which `--signal` without a time comes: sbatch(1)."""


@dataclass(frozen=True)
class EarlySignal:
    """A `--signal`: which one, how many seconds before the end, whether to the batch script."""

    signal: str
    seconds: float
    to_script: bool


@dataclass(frozen=True)
class RequestedNodes:
    """How many nodes a job asks for, and how much on each; None where its script does not say.

    `torchrun` is whether a task starts the ranks of its node, and is none itself.
    """

    count: int | None = None
    tasks: int | None = None
    gpus: int | None = None
    torchrun: bool = False

    @property
    def ranks(self) -> int | None:
        """The number of ranks on each node."""
        return self.gpus if self.torchrun or self.tasks is None else self.tasks


@dataclass(frozen=True)
class JobPlan:
    """What a job asks for; None where its script does not say. `limit` is in seconds.

    `source` names the script. `requeue` is None where the cluster's JobRequeue decides.
    """

    source: str
    nodes: RequestedNodes = RequestedNodes()
    limit: float | None = None
    warning: EarlySignal | None = None
    requeue: bool | None = None
    partition: str = ""


def read_plan(script: Path, more: Sequence[str] = ()) -> JobPlan:
    """The plan of a batch script; `more` are options of the command line, which win.

    Raises `OSError`, and `ValueError` with a sentence.
    """
    return parse_plan(script.read_text(errors="replace"), str(script), more)


def parse_plan(text: str, source: str, more: Sequence[str] = ()) -> JobPlan:
    """The same of a script's text. Raises `ValueError` with a sentence."""
    try:
        words = [*read_words(text), *more]
        found, _ = _parser().parse_known_args(words)
        ntasks = None if found.ntasks is None else int(found.ntasks)
        nodes = None if found.nodes is None else int(found.nodes.partition("-")[0])
        per_node = None if found.ntasks_per_node is None else int(found.ntasks_per_node)
        if per_node is None and ntasks is not None and nodes:
            per_node = ntasks // nodes
        return JobPlan(
            source=source,
            nodes=RequestedNodes(nodes, per_node, _gpus(found), _TORCHRUN.search(text) is not None),
            limit=None if found.time is None else parse_limit(found.time),
            warning=None if found.signal is None else parse_signal(found.signal),
            requeue=found.requeue,
            partition=found.partition or "",
        )
    except ValueError as error:
        raise ValueError(f"{source} cannot be understood: {error}") from error


def parse_signal(text: str) -> EarlySignal:
    """`B:SIGTERM@120`, `USR1@60`, `R:10`: sbatch(1). Raises `ValueError`."""
    found = re.fullmatch(r"(?:([RB]+):)?(?:SIG)?([A-Z0-9]+)(?:@(\d+))?", text, re.IGNORECASE)
    if found is None:
        raise ValueError(f"--signal={text} is no signal")
    seconds = DEFAULT_WARNING if found[3] is None else float(found[3])
    return EarlySignal(found[2].upper(), seconds, to_script="B" in (found[1] or "").upper())


def parse_limit(text: str) -> float | None:
    """Seconds of a time limit in any of the forms of sbatch(1); None for none.

    Raises `ValueError`.
    """
    if text.upper() in ("UNLIMITED", "INFINITE", "-1", "0"):
        return None
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if found is None:
        raise ValueError(f"--time={text} is no time limit")
    days, first, second, third = (None if part is None else int(part) for part in found.groups())
    assert first is not None
    if days is not None:  # days-hours[:minutes[:seconds]]
        return float(((days * 24 + first) * 60 + (second or 0)) * 60 + (third or 0))
    if third is not None:  # hours:minutes:seconds
        return float((first * 60 + (second or 0)) * 60 + third)
    return float(first * 60 + (second or 0))  # minutes[:seconds]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _parser() -> argparse.ArgumentParser:
    """As sbatch, which lets long options be abbreviated."""
    parser = _Parser(add_help=False)
    parser.add_argument("--nodes", "-N")
    parser.add_argument("--ntasks", "-n")
    parser.add_argument("--ntasks-per-node")
    parser.add_argument("--gpus-per-node")
    parser.add_argument("--gres")
    parser.add_argument("--time", "-t")
    parser.add_argument("--signal")
    parser.add_argument("--requeue", dest="requeue", action="store_true", default=None)
    parser.add_argument("--no-requeue", dest="requeue", action="store_false")
    parser.add_argument("--partition", "-p")
    # Not to be taken for abbreviations of others.
    parser.add_argument("--time-min")
    parser.add_argument("--gpus")
    parser.add_argument("--gres-flags")
    parser.add_argument("--nodelist")
    parser.add_argument("--nodefile")
    return parser


def _gpus(found: argparse.Namespace) -> int | None:
    if found.gpus_per_node is not None:
        return count_gpus(found.gpus_per_node)
    if found.gres is not None and "gpu" in found.gres:
        return count_gpus(found.gres)
    return None
