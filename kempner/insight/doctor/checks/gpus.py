"""The health of the GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kempner.insight.doctor.facts.gpus import Gpu
from kempner.insight.doctor.facts.node import NodeAnswer
from kempner.insight.doctor.finding import (
    Finding,
    Level,
    Outcome,
    finding,
    passed,
    per_node,
    skipped,
    worst,
)
from kempner.run.output.units import size_text

_LEFT_OVER = 2 * 2**30
"""Bytes in use on a GPU that nobody trains on, above which somebody is still there: the driver's
own are less."""

_MUCH = 0.1
"""Share of a GPU's memory in use that no run can do without."""


def check_gpus(answers: Sequence[NodeAnswer], ours: bool, busy: bool) -> list[Finding]:
    """ECC, row remapping, throttling and memory in use.

    `ours` is whether the GPUs are the job's own, so that nobody else may be there; `busy` is
    whether the run may be using them.
    """
    check = "GPU health"
    if not any(answer.gpus.gpus for answer in answers):
        return [finding(check, skipped("there is no GPU that nvidia-smi can look at"))]
    return per_node(check, answers, lambda a: a.node, lambda a: _judge(a, ours, busy))


def _judge(answer: NodeAnswer, ours: bool, busy: bool) -> Outcome:
    gpus = answer.gpus.gpus
    ailing = [(gpu, each) for gpu in gpus for each in _ailments(gpu, ours, busy)]
    if not ailing:
        return passed(f"{len(gpus)} x {gpus[0].name}: nothing wrong" if gpus else "no GPU")
    level = worst(Finding("", level, "") for _, (level, _) in ailing)
    clauses = [f"GPU {gpu.index} {words}" for gpu, (_, words) in ailing]
    return Outcome(level, "; ".join(clauses))


def _ailments(gpu: Gpu, ours: bool, busy: bool) -> Iterator[tuple[Level, str]]:
    if gpu.ecc:
        yield (
            Level.FAIL,
            f"has had {gpu.ecc} uncorrected memory errors since the reboot: exclude the node, and "
            "report it",
        )
    if gpu.remap == "failed":
        yield (
            Level.FAIL,
            "cannot replace broken rows of its memory: exclude the node, and report it",
        )
    if gpu.remap == "pending":
        yield (
            Level.WARN,
            "waits for a reset to replace broken rows of its memory: ask for one, or exclude the "
            "node",
        )
    if gpu.throttles:
        yield (
            Level.WARN,
            f"is slowed down ({', '.join(gpu.throttles)}): every rank would wait for it; exclude "
            "the node, and report it",
        )
    if not busy and (gpu.memory_used > _LEFT_OVER or gpu.processes):
        much = ours and gpu.memory_used > _MUCH * gpu.memory_total
        pids = f" by {', '.join(map(str, gpu.processes))}" if gpu.processes else ""
        yield (
            Level.FAIL if much else Level.WARN,
            f"has {size_text(gpu.memory_used)} in use{pids}: end what an earlier job has left, or "
            "exclude the node",
        )
