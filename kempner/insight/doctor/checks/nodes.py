"""Checks of each node: an answer, clock, limits, memory, software, GPUs, network, ports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kempner.cluster.machine import MEMORY, ROOM, SKEW, clock_skew, open_files_needed
from kempner.cluster.network.interfaces import InterfaceNetwork, disagreement
from kempner.insight.doctor.facts.nodes import Survey
from kempner.insight.doctor.finding import (
    CheckOutcome,
    Finding,
    fail,
    finding,
    passed,
    per_node,
    skipped,
    warn,
    worst,
)
from kempner.probe.details import Gpu
from kempner.probe.node import INTERFACE, SHM, ProbeResult
from kempner.run.output.units import count, size_text

_SMALL_SHM = 2**30
"""Bytes of /dev/shm below which loader workers and NCCL are known to run out of it; containers have
64 MiB by default."""

_ODD_SKEW = 2.0  # seconds by which a clock may differ before times in logs mislead

_LITTLE_LOCKED = 64 * 2**20
"""Bytes of locked memory below which InfiniBand cannot work; 8 MiB are the default."""

_UNSURE = 5.0
"""Seconds of error in the controller's clock: Slurm gives whole seconds, and its answer takes
time."""


def check_answers(survey: Survey) -> Finding:
    silent = [n for n in survey.asked if n not in {a.node for a in survey.answers}]
    complaint = _last_line(survey.complaints)
    if not survey.answers:
        complaint = complaint or "srun printed nothing"
        return finding("nodes", fail(f"no node answered: {complaint}"), survey.asked)
    if not silent:
        return finding("nodes", passed(f"{count(len(survey.answers), 'node')} answered"))
    why = f" ({complaint})" if complaint else ""
    return finding(
        "nodes",
        fail(
            f"no answer{why}: see that kempner's Python is there and the node is up, or exclude it"
        ),
        silent,
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower()]
    return (telling or lines or [""])[0]


def check_clocks(survey: Survey, controller_ahead: float | None) -> list[Finding]:
    def judge(answer: ProbeResult) -> CheckOutcome:
        ahead = answer.details.network.clock_ahead
        if ahead is None:
            ahead = clock_skew(answer.time, survey.during)
        return _clock(ahead, "its clock")

    found = per_node("clock", survey.answers, judge)
    if controller_ahead is not None and abs(controller_ahead) > _UNSURE:
        found.append(finding("clock", _clock(controller_ahead, "the clock of Slurm's controller")))
    return found


def _clock(skew: float, whose: str) -> CheckOutcome:
    if abs(skew) <= _ODD_SKEW:
        return passed("the clocks agree")
    way = "ahead" if skew > 0 else "behind"
    sentence = f"{whose} is {abs(skew):.0f} s {way}: have NTP or chrony set it"
    return fail(f"{sentence}; munge refuses a node far off") if abs(skew) > SKEW else warn(sentence)


def check_limits(answers: Sequence[ProbeResult], ranks: int, workers: int) -> list[Finding]:
    """Check open files, locked memory, /dev/shm and temporary files; `workers` is
    `data.num_dataloader_workers`."""
    needed = open_files_needed(ranks)

    def open_files(answer: ProbeResult) -> CheckOutcome:
        most = answer.open_files
        if most is not None and most < needed:
            return fail(
                f"a process may open {most} files (`ulimit -Hn`), and a rank of {ranks} needs "
                f"{needed}: raise nofile in limits.conf, or LimitNOFILE of slurmd"
            )
        return passed(f"{'no limit' if most is None else f'{most:,} allowed'}, {needed:,} needed")

    def temporary(answer: ProbeResult) -> CheckOutcome:
        folder = answer.details.temporary
        free = size_text(answer.disk_free.get(folder, 0))
        if answer.disk_free.get(folder, 0) < ROOM:
            return fail(f"{folder} has {free} left: remove old files, or set TMPDIR")
        return passed(f"{folder} has {free} free")

    return [
        *per_node("open files", answers, open_files),
        *per_node("locked memory", answers, _locked_memory),
        *per_node("/dev/shm", answers, lambda answer: _shm(answer, workers)),
        *per_node("temporary files", answers, temporary),
    ]


def _locked_memory(answer: ProbeResult) -> CheckOutcome:
    most = answer.details.locked_memory
    if most is not None and answer.details.network.infiniband:
        sentence = (
            f"a process may lock {size_text(most)} (`ulimit -l`), and InfiniBand needs memlock "
            "unlimited: set it in limits.conf, or LimitMEMLOCK=infinity of slurmd"
        )
        return fail(sentence) if most < _LITTLE_LOCKED else warn(sentence)
    if most is None:
        return passed("no limit")
    return passed(f"{size_text(most)} may be locked, and there is no InfiniBand that needs more")


def _shm(answer: ProbeResult, workers: int) -> CheckOutcome:
    free, total = answer.disk_free.get(SHM, 0), answer.details.shm_total
    if free < ROOM:
        return fail(
            f"/dev/shm has {size_text(free)} free of {size_text(total)}, and NCCL and loader "
            "workers need more: remove what is left there, or start the container with --shm-size"
        )
    if total < _SMALL_SHM and (workers or answer.details.gpus.gpus):
        return warn(
            f"/dev/shm has only {size_text(total)}: NCCL or loader workers may run out of it; "
            "start the container with --shm-size=8g, or mount a larger one"
        )
    return passed(f"{size_text(free)} free")


def check_memory(answers: Sequence[ProbeResult], staged: float) -> list[Finding]:
    """Check free memory; `staged` is the bytes that the ranks of a node copy for a background
    save."""

    def judge(answer: ProbeResult) -> CheckOutcome:
        free, total = answer.memory.free, answer.memory.total
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

    return per_node("memory", answers, judge)


def check_software(answers: Sequence[ProbeResult]) -> list[Finding]:
    found = per_node("software", answers, _software)
    sound = {a.node: a.details.software for a in answers if not a.details.software.trouble}
    for name in ("python", "kempner", "torch", "cuda"):
        versions = {node: getattr(software, name) or "none" for node, software in sound.items()}
        if len(set(versions.values())) < 2:
            continue
        ((usual, _),) = Counter(versions.values()).most_common(1)
        odd = [node for node, version in versions.items() if version != usual]
        theirs = ", ".join(sorted({versions[node] for node in odd}))
        sentence = (
            f"{name} is {theirs}, elsewhere {usual}: let all nodes use one virtual environment"
        )
        found.append(finding("software", fail(sentence), odd))
    return found


def _software(answer: ProbeResult) -> CheckOutcome:
    software = answer.details.software
    if software.trouble:
        return fail(
            f"torch, or what model.factory names, cannot be imported ({software.trouble}): see "
            "that the virtual environment is whole, and the same everywhere"
        )
    built = f", CUDA {software.cuda}" if software.cuda else ""
    return passed(
        f"Python {software.python}, kempner {software.kempner}, torch {software.torch}{built}"
    )


_LEFT_OVER = 2 * 2**30
"""Bytes in use on an idle GPU above which another process must use it: the driver needs less."""

_MUCH = 0.1  # share of a GPU's memory in use above which a run cannot start


def check_gpus(answers: Sequence[ProbeResult], ours: bool, busy: bool) -> list[Finding]:
    """Check ECC, row remapping, throttling and memory in use. `ours`: the GPUs are the job's, so
    that no other job may use them; `busy`: the run may be using them."""
    check = "GPU health"
    if not any(answer.details.gpus.gpus for answer in answers):
        return [finding(check, skipped("there is no GPU that nvidia-smi can look at"))]
    return per_node(check, answers, lambda a: _judge(a, ours, busy))


def _judge(answer: ProbeResult, ours: bool, busy: bool) -> CheckOutcome:
    gpus = answer.details.gpus.gpus
    ailing = [(gpu, each) for gpu in gpus for each in _health_problems(gpu, ours, busy)]
    if not ailing:
        return passed(f"{len(gpus)} x {gpus[0].name}: nothing wrong" if gpus else "no GPU")
    clauses = "; ".join(f"GPU {gpu.index} {each.sentence}" for gpu, each in ailing)
    return CheckOutcome(worst(each for _, each in ailing), clauses)


def _health_problems(gpu: Gpu, ours: bool, busy: bool) -> Iterator[CheckOutcome]:
    if gpu.ecc:
        yield fail(
            f"has had {gpu.ecc} uncorrected memory errors since the reboot: exclude the node, and "
            "report it"
        )
    if gpu.remap == "failed":
        yield fail("cannot replace broken rows of its memory: exclude the node, and report it")
    if gpu.remap == "pending":
        yield warn(
            "waits for a reset to replace broken rows of its memory: ask for one, or exclude the "
            "node"
        )
    if gpu.throttles:
        yield warn(
            f"is slowed down ({', '.join(gpu.throttles)}): every rank would wait for it; exclude "
            "the node, and report it"
        )
    if not busy and (gpu.memory_used > _LEFT_OVER or gpu.processes):
        much = ours and gpu.memory_used > _MUCH * gpu.memory_total
        pids = f" by {', '.join(map(str, gpu.processes))}" if gpu.processes else ""
        yield (fail if much else warn)(
            f"has {size_text(gpu.memory_used)} in use{pids}: end what an earlier job has left, or "
            "exclude the node"
        )


@dataclass(frozen=True)
class PortFacts:
    """`supervise.control_ports`: the range as written (None: any port), and how many are free
    here."""

    wanted: str | None
    free: int = 0


def check_interfaces(answers: Sequence[ProbeResult]) -> list[Finding]:
    several = len(answers) > 1
    found = per_node("interface", answers, lambda a: _interface(a, several))
    odd = disagreement({answer.node: answer.interface for answer in answers})
    usable = not any(INTERFACE in answer.troubles for answer in answers)
    return [*found, finding("interface", fail(odd))] if odd and usable else found


def _interface(answer: ProbeResult, several: bool) -> CheckOutcome:
    network, bound = answer.details.network, answer.interface
    if trouble := answer.troubles.get(INTERFACE):
        return fail(f"{trouble}: correct the name, or bring the interface up")
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


def check_ports(facts: PortFacts) -> CheckOutcome:
    """Whether the supervisor finds a free port for the agents of its nodes."""
    if facts.wanted is None:
        return passed("supervise.control_ports is not set: any free port will do")
    if not facts.free:
        return fail(
            f'no port of supervise.control_ports="{facts.wanted}" is free on this host: end what '
            "listens there, or set another range"
        )
    return passed(f'{facts.free} of supervise.control_ports="{facts.wanted}" are free')
