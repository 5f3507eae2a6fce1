"""Slurm's compact notations: hosts as `node[1-3,07]`, and counts per node as `2(x3),1`."""

from __future__ import annotations

import itertools
import platform
import re
from collections.abc import Iterable, Iterator, Mapping

_OUTSIDE_BRACKETS = re.compile(r",(?![^\[]*\])")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hosts(text: str) -> list[str]:
    """The host names of a list, in its order, as `scontrol show hostnames`. Supports ranges,
    leading zeros, suffixes and several brackets in a name (`r[1-2]n[01-16]-ib`; the last bracket
    varies fastest). Raises `ValueError` with a sentence for anything else."""
    names: list[str] = []
    for pattern in _OUTSIDE_BRACKETS.split(text.strip()):
        # Every second piece was in brackets.
        pieces = _BRACKETS.split(pattern.strip())
        if not pattern.strip() or any(c in "[]" for piece in pieces[::2] for c in piece):
            raise ValueError(f"{text!r} is not a Slurm host list")
        choices = [
            list(_numbers(piece, text)) if place % 2 else [piece]
            for place, piece in enumerate(pieces)
        ]
        names += map("".join, itertools.product(*choices))
    return names


def expand_counts(text: str) -> list[int]:
    """One number per node: `2(x3),1` is [2, 2, 2, 1]. Raises `ValueError` with a sentence."""
    counts: list[int] = []
    for part in text.split(","):
        found = _COUNT.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"{text!r} is not a Slurm list of counts per node")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def node_name(environ: Mapping[str, str]) -> str:
    """The name of this node: Slurm's in a task, else the host name."""
    return environ.get("SLURMD_NODENAME") or platform.node()


def node_of(host: str, nodes: Iterable[str]) -> str:
    """The name in `nodes` that matches a host name with or without its domain; else the host
    name."""
    short = host.partition(".")[0]
    return next((node for node in nodes if node in (host, short)), host)


def _numbers(ranges: str, text: str) -> Iterator[str]:
    for part in ranges.split(","):
        found = _RANGE.fullmatch(part)
        if found is None or (found[2] is not None and int(found[2]) < int(found[1])):
            raise ValueError(f"{text!r} is not a Slurm host list: {part!r} is not a range")
        for number in range(int(found[1]), int(found[2] or found[1]) + 1):
            yield f"{number:0{len(found[1])}d}"
