"""What each node must offer: an answer, a clock, memory, the same software, GPUs, a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kempner.cluster.machine.limits import MEMORY, ROOM, SKEW, clock_skew, open_files_needed
from kempner.cluster.network.interfaces import InterfaceNetwork, disagreement
from kempner.insight.doctor.facts.gpus import Gpu
from kempner.insight.doctor.facts.node import NodeAnswer
from kempner.insight.doctor.facts.nodes import Survey
from kempner.insight.doctor.finding import (
    CheckOutcome,
    Finding,
    Level,
    fail,
    finding,
    passed,
    per_node,
    skipped,
    warn,
    worst,
)
from kempner.run.output.units import count, size_text

_SMALL_SHM = 2**30
"""Bytes of /dev/shm below which loader workers and NCCL are known to run out of it: containers have
64 MiB unless asked for more."""

_ODD_SKEW = 2.0
"""Seconds by which a clock may differ before times of logs mislead."""

_LITTLE_LOCKED = 64 * 2**20
"""Bytes of locked memory with which nothing can be sent over InfiniBand; 8 MiB are the default."""

_UNSURE = 5.0
"""Seconds by which the controller's clock may seem to differ: it is told in whole seconds, and the
answer takes a while."""


def check_answers(survey: Survey) -> Finding:
    """Whether every node has answered."""
    silent = tuple(n for n in survey.asked if n not in {a.node for a in survey.answers})
    if not silent or not survey.answers:
        if survey.answers:
            return finding("nodes", passed(f"{count(len(survey.answers), 'node')} answered"))
        said = _last_line(survey.complaints) or "srun printed nothing"
        return Finding("nodes", Level.FAIL, f"no node answered: {said}", survey.asked)
    said = _last_line(survey.complaints)
    why = f" ({said})" if said else ""
    sentence = (
        f"no answer{why}: see that kempner's Python is there and the node is up, or exclude it"
    )
    return Finding("nodes", Level.FAIL, sentence, silent)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower()]
    return (telling or lines or [""])[0]


def check_clocks(survey: Survey, controller_ahead: float | None) -> list[Finding]:
    """The nodes' clocks against this one, and Slurm's."""

    def judge(answer: NodeAnswer) -> CheckOutcome:
        ahead = answer.network.clock_ahead
        if ahead is None:
            ahead = clock_skew(answer.time, survey.during)
        return _clock(ahead, "its clock")

    found = per_node("clock", survey.answers, lambda a: a.node, judge)
    if controller_ahead is not None and abs(controller_ahead) > _UNSURE:
        found.append(finding("clock", _clock(controller_ahead, "the clock of Slurm's controller")))
    return found


def _clock(skew: float, whose: str) -> CheckOutcome:
    if abs(skew) <= _ODD_SKEW:
        return passed("the clocks agree")
    way = "ahead" if skew > 0 else "behind"
    sentence = f"{whose} is {abs(skew):.0f} s {way}: have NTP or chrony set it"
    return fail(f"{sentence}; munge refuses a node far off") if abs(skew) > SKEW else warn(sentence)


def check_limits(answers: Sequence[NodeAnswer], ranks: int, workers: int) -> list[Finding]:
    """Open files, locked memory, /dev/shm and temporary files; `workers` is
    data.num_dataloader_workers."""
    needed = open_files_needed(ranks)
    found: list[Finding] = []
    for check, judge in {
        "open files": lambda answer: _open_files(answer, needed, ranks),
        "locked memory": _locked_memory,
        "/dev/shm": lambda answer: _shm(answer, workers),
        "temporary files": _temporary,
    }.items():
        found += per_node(check, answers, lambda a: a.node, judge)
    return found


def _open_files(answer: NodeAnswer, needed: int, ranks: int) -> CheckOutcome:
    most = answer.limits.open_files
    if most is not None and most < needed:
        return fail(
            f"a process may open {most} files (`ulimit -Hn`), and a rank of {ranks} needs "
            f"{needed}: raise nofile in limits.conf, or LimitNOFILE of slurmd"
        )
    return passed(f"{'no limit' if most is None else f'{most:,} allowed'}, {needed:,} needed")


def _locked_memory(answer: NodeAnswer) -> CheckOutcome:
    most = answer.limits.memlock
    if most is not None and answer.network.infiniband:
        sentence = (
            f"a process may lock {size_text(most)} (`ulimit -l`), and InfiniBand needs memlock "
            "unlimited: set it in limits.conf, or LimitMEMLOCK=infinity of slurmd"
        )
        return fail(sentence) if most < _LITTLE_LOCKED else warn(sentence)
    if most is None:
        return passed("no limit")
    return passed(f"{size_text(most)} may be locked, and there is no InfiniBand that needs more")


def _shm(answer: NodeAnswer, workers: int) -> CheckOutcome:
    free, total = answer.limits.shm_free, answer.limits.shm_total
    if free < ROOM:
        return fail(
            f"/dev/shm has {size_text(free)} free of {size_text(total)}, and NCCL and loader "
            "workers need more: remove what is left there, or start the container with --shm-size"
        )
    if total < _SMALL_SHM and (workers or answer.gpus.gpus):
        return warn(
            f"/dev/shm has only {size_text(total)}: NCCL or loader workers may run out of it; "
            "start the container with --shm-size=8g, or mount a larger one"
        )
    return passed(f"{size_text(free)} free")


def _temporary(answer: NodeAnswer) -> CheckOutcome:
    folder, free = answer.limits.temporary
    if free < ROOM:
        return fail(f"{folder} has {size_text(free)} left: remove old files, or set TMPDIR")
    return passed(f"{folder} has {size_text(free)} free")


def check_memory(answers: Sequence[NodeAnswer], staged: float) -> list[Finding]:
    """Free memory; `staged` is how many bytes of a checkpoint the ranks of a node copy for a save
    in the background."""

    def judge(answer: NodeAnswer) -> CheckOutcome:
        free, total = answer.limits.memory_free, answer.limits.memory_total
        numbers = f"{size_text(free)} of {size_text(total)} memory is free"
        if free < MEMORY * total:
            return fail(f"{numbers}: end what an earlier job has left, or exclude the node")
        if free < staged:
            return warn(
                f"{numbers}, and a save in the background copies {size_text(staged)} there: use "
                "more nodes, or set checkpoint.async_save=false"
            )
        return passed(
            f"{numbers}, of which a save takes {size_text(staged)}" if staged else numbers
        )

    return per_node("memory", answers, lambda a: a.node, judge)


def check_software(answers: Sequence[NodeAnswer]) -> list[Finding]:
    """Whether torch can be imported, and all nodes have the same versions."""
    found = per_node("software", answers, lambda a: a.node, _software)
    names = ("python", "kempner", "torch", "cuda")
    for name in names:
        versions = {a.node: getattr(a.software, name) for a in answers if not a.software.trouble}
        if len(set(versions.values())) > 1:
            found.append(_differing(name, versions))
    return found


def _software(answer: NodeAnswer) -> CheckOutcome:
    software = answer.software
    if software.trouble:
        return fail(
            f"torch, or what model.factory names, cannot be imported ({software.trouble}): see "
            "that the virtual environment is whole, and the same everywhere"
        )
    built = f", CUDA {software.cuda}" if software.cuda else ""
    return passed(
        f"Python {software.python}, kempner {software.kempner}, torch {software.torch}{built}"
    )


def _differing(name: str, versions: Mapping[str, str]) -> Finding:
    counts = {version: [*versions.values()].count(version) for version in versions.values()}
    usual = max(counts, key=lambda version: counts[version])
    odd = tuple(node for node, version in versions.items() if version != usual)
    theirs = ", ".join(sorted({versions[node] or "none" for node in odd}))
    return Finding(
        "software",
        Level.FAIL,
        f"{name} is {theirs}, elsewhere {usual or 'none'}: let all nodes use one virtual "
        "environment",
        odd,
    )


_LEFT_OVER = 2 * 2**30
"""Bytes in use on an idle GPU above which another process must be there: the driver uses less."""

_MUCH = 0.1
"""Share of a GPU's memory in use that no run can do without."""


def check_gpus(answers: Sequence[NodeAnswer], ours: bool, busy: bool) -> list[Finding]:
    """ECC, row remapping, throttling and memory in use.

    `ours` is whether the GPUs are the job's own, so that no other job may use them; `busy` is
    whether the run may be using them.
    """
    check = "GPU health"
    if not any(answer.gpus.gpus for answer in answers):
        return [finding(check, skipped("there is no GPU that nvidia-smi can look at"))]
    return per_node(check, answers, lambda a: a.node, lambda a: _judge(a, ours, busy))


def _judge(answer: NodeAnswer, ours: bool, busy: bool) -> CheckOutcome:
    gpus = answer.gpus.gpus
    ailing = [(gpu, each) for gpu in gpus for each in _health_problems(gpu, ours, busy)]
    if not ailing:
        return passed(f"{len(gpus)} x {gpus[0].name}: nothing wrong" if gpus else "no GPU")
    level = worst(Finding("", level, "") for _, (level, _) in ailing)
    clauses = [f"GPU {gpu.index} {words}" for gpu, (_, words) in ailing]
    return CheckOutcome(level, "; ".join(clauses))


def _health_problems(gpu: Gpu, ours: bool, busy: bool) -> Iterator[tuple[Level, str]]:
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


@dataclass(frozen=True)
class PortFacts:
    """supervise.control_ports: the range as written, and how many of it are free here; None for
    any port."""

    wanted: str | None
    free: int = 0


def check_interfaces(answers: Sequence[NodeAnswer]) -> list[Finding]:
    """Whether each node has the interface that its ranks bind to, and all are on one network."""
    several = len(answers) > 1
    found = per_node("interface", answers, lambda a: a.node, lambda a: _interface(a, several))
    odd = disagreement({answer.node: answer.network.interface for answer in answers})
    usable = not any(answer.network.trouble for answer in answers)
    return [*found, finding("interface", fail(odd))] if odd and usable else found


def _interface(answer: NodeAnswer, several: bool) -> CheckOutcome:
    network = answer.network
    bound = network.interface
    if network.trouble:
        return fail(f"{network.trouble}: correct the name, or bring the interface up")
    if network.unreachable:
        return fail(
            f"{network.unreachable}: look for a firewall or a broken link, or set "
            "distributed.interface"
        )
    if network.warning:
        return warn(f"{network.warning}; set distributed.interface if another one is faster")
    if several and bound is not None and bound.network is InterfaceNetwork.LOOPBACK:
        return fail(
            f"{bound.name} leads to no other node: set distributed.interface to one that does, or "
            "leave it out"
        )
    if bound is None:
        return skipped("no interface is chosen: Gloo binds to the host's name")
    return passed(f"{bound.name} is up and has an address")


def check_ports(facts: PortFacts, in_job: bool) -> CheckOutcome:
    """Whether the supervisor finds free ports to listen on: one for the ranks, and in a Slurm job
    another one for the agents of its nodes."""
    if facts.wanted is None:
        return passed("supervise.control_ports is not set: any free port will do")
    if not facts.free:
        return fail(
            f'no port of supervise.control_ports="{facts.wanted}" is free on this host: end what '
            "listens there, or set another range"
        )
    if in_job and facts.free == 1:
        return warn(
            f'one port of supervise.control_ports="{facts.wanted}" is free on this host, and the '
            "agents of the nodes need a second one: set a larger range"
        )
    return passed(f'{facts.free} of supervise.control_ports="{facts.wanted}" are free')
