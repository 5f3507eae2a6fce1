"""Judgements that no planted fault shows: tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kempner.cluster.network.interfaces import Interface
from kempner.cluster.slurm.node_step import in_lines
from kempner.insight.doctor.checks.fit import (
    JobFacts,
    PlannedWorld,
    check_ranks,
    check_requeue,
    check_slurm,
    check_time,
    check_window,
    check_write,
    predict_save,
)
from kempner.insight.doctor.checks.nodes import (
    PortFacts,
    check_answers,
    check_clocks,
    check_gpus,
    check_interfaces,
    check_limits,
    check_memory,
    check_ports,
    check_software,
)
from kempner.insight.doctor.checks.storage import check_caches, check_room, check_run, check_shared
from kempner.insight.doctor.facts.nodes import Survey
from kempner.insight.doctor.facts.slurm import EarlySignal, JobPlan, Partition, SlurmFacts
from kempner.insight.doctor.facts.storage import Disk, RunState
from kempner.insight.doctor.finding import Finding
from kempner.probe.details import Gpu, GpuSurvey, Software, WriteRate
from kempner.probe.node import (
    INTERFACE,
    NetworkDetails,
    ProbeDetails,
    ProbedMemory,
    ProbeResult,
    answer_lines,
    read_results,
)

MIB, GIB = 2**20, 2**30
IB0 = Interface("ib0", 32, True, "10.10.0.11/24")
LO = Interface("lo", 772, True, "127.0.0.1/8")
DETAILS = ProbeDetails(
    temporary="/tmp",
    shm_total=8 * GIB,
    network=NetworkDetails(infiniband=True),
    software=Software("3.11", "0.1", "2.13.0", "12.8"),
)
WELL = ProbeResult(
    node="node1",
    time=1000.0,
    memory=ProbedMemory(60 * GIB, 64 * GIB),
    disk_free={"/tmp": 9 * GIB, "/dev/shm": 8 * GIB},
    open_files=65536,
    interface=IB0,
    troubles={},
    details=DETAILS,
)
"""A node that nothing is wrong with."""


def detailed(**changes: Any) -> ProbeResult:
    return replace(WELL, details=replace(DETAILS, **changes))


def small_shm(total: int) -> ProbeResult:
    return replace(detailed(shm_total=total), disk_free={**WELL.disk_free, "/dev/shm": total})


def bad(findings: list[Finding]) -> dict[str, str]:
    """The levels of what is not well, by check."""
    return {f.check: f.level.value for f in findings if f.level.value in ("warn", "fail")}


@pytest.mark.parametrize(
    ("node", "found"),
    [
        (WELL, {}),
        (replace(WELL, open_files=None), {}),
        (replace(WELL, open_files=511), {"open files": "fail"}),
        (replace(WELL, open_files=512), {}),
        (detailed(locked_memory=8 * MIB), {"locked memory": "fail"}),
        (detailed(locked_memory=8 * GIB), {"locked memory": "warn"}),
        (small_shm(31 * MIB), {"/dev/shm": "fail"}),
        (small_shm(64 * MIB), {"/dev/shm": "warn"}),
        (replace(WELL, disk_free={"/dev/shm": GIB, "/tmp": MIB}), {"temporary files": "fail"}),
        (replace(WELL, disk_free={}), {"/dev/shm": "fail", "temporary files": "fail"}),
    ],
)
def test_limits(node: ProbeResult, found: dict[str, str]) -> None:
    assert bad(check_limits([node], ranks=64, workers=2)) == found


def test_limits_that_matter_only_to_those_who_need_them() -> None:
    no_fabric = detailed(locked_memory=MIB, network=NetworkDetails())
    assert bad(check_limits([no_fabric, small_shm(64 * MIB)], ranks=8, workers=0)) == {}


@pytest.mark.parametrize(
    ("free", "staged", "found"),
    [(60, 10, {}), (60, 61, {"memory": "warn"}), (1, 0, {"memory": "fail"})],
)
def test_memory(free: int, staged: int, found: dict[str, str]) -> None:
    node = replace(WELL, memory=ProbedMemory(free * GIB, 64 * GIB))
    assert bad(check_memory([node], staged * GIB)) == found


@pytest.mark.parametrize(
    ("time", "found"),
    [(999.0, {}), (1004.0, {}), (1006.0, {"clock": "warn"}), (900.0, {"clock": "fail"})],
)
def test_clocks(time: float, found: dict[str, str]) -> None:
    survey = Survey(("node1",), (replace(WELL, time=time),), (1000.0, 1003.0), {}, {})
    assert bad(check_clocks(survey, None)) == found


def test_the_controllers_clock_is_told_in_seconds() -> None:
    survey = Survey((), (), (0.0, 0.0), {}, {})
    assert bad(check_clocks(survey, 3.0)) == {}
    assert bad(check_clocks(survey, -30.0)) == {"clock": "warn"}


def test_the_version_that_most_have_is_the_usual_one() -> None:
    other = replace(DETAILS.software, cuda="11.8")
    nodes = [replace(WELL, node=f"node{n}") for n in range(3)]
    nodes.append(replace(detailed(software=other), node="node3"))
    (finding,) = [f for f in check_software(nodes) if f.level.value == "fail"]
    assert (finding.nodes, finding.sentence[:26]) == (("node3",), "cuda is 11.8, elsewhere 12")


@pytest.mark.parametrize(
    ("seen", "found"),
    [
        (WELL, {}),
        (replace(WELL, interface=LO), {"interface": "fail"}),
        (
            detailed(network=NetworkDetails(unreachable="10.10.0.9 cannot be reached")),
            {"interface": "fail"},
        ),
        (
            replace(WELL, interface=None, troubles={INTERFACE: "ib9 does not exist"}),
            {"interface": "fail"},
        ),
        (detailed(network=NetworkDetails("no fabric")), {"interface": "warn"}),
    ],
)
def test_interfaces_of_two_nodes(seen: ProbeResult, found: dict[str, str]) -> None:
    nodes = [replace(seen, node=node) for node in ("node1", "node2")]
    assert bad(check_interfaces(nodes)) == found


@pytest.mark.parametrize(("free", "level"), [(0, "fail"), (1, "pass"), (2, "pass")])
def test_ports(free: int, level: str) -> None:
    assert check_ports(PortFacts("20000-20001", free)).level == level


def test_gpus_of_the_job_that_somebody_still_uses() -> None:
    used = Gpu(0, "H100", 80 * GIB, 70 * GIB, processes=(7,))
    nodes = [detailed(gpus=GpuSurvey((used,), "550"))]
    assert bad(check_gpus(nodes, ours=True, busy=False)) == {"GPU health": "fail"}
    assert bad(check_gpus(nodes, ours=False, busy=False)) == {"GPU health": "warn"}
    assert bad(check_gpus(nodes, ours=True, busy=True)) == {}


def test_gpus_that_the_job_has_and_no_node_shows() -> None:
    job = PlannedWorld(1, 4, 4, "job 7", in_job=True)
    assert bad(check_ranks(job, [WELL], hidden=False)) == {"ranks and GPUs": "fail"}
    assert bad(check_ranks(job, [WELL], hidden=True)) == {}
    login = replace(job, in_job=False)  # a login node has none
    assert bad(check_ranks(login, [WELL], hidden=False)) == {}
    four = GpuSurvey(tuple(Gpu(n, "H100") for n in range(4)), "550")
    node = detailed(gpus=four, software=replace(DETAILS.software, devices=4))
    assert bad(check_ranks(job, [node], hidden=False)) == {}
    few = replace(job, per_node=2, gpus=None)
    assert bad(check_ranks(few, [node], hidden=False)) == {"ranks and GPUs": "warn"}


def writes(*rates: float) -> list[ProbeResult]:
    return [detailed(write=WriteRate(int(rate), 1.0)) for rate in rates]


def test_a_save_is_as_fast_as_all_nodes_together() -> None:
    assert predict_save(600, writes(100, 200), 2, measured_on_all=True).seconds == 2.0
    assert predict_save(600, writes(100), 3, measured_on_all=False).seconds == 2.0
    assert predict_save(600, [WELL], 1, measured_on_all=True).seconds is None
    assert predict_save(None, writes(100), 1, measured_on_all=True).seconds is None


def test_a_folder_that_takes_nothing() -> None:
    save = predict_save(600, [WELL], 1, measured_on_all=True)
    assert check_write([WELL], save).level == "skipped"
    refused = detailed(write=WriteRate(0, 0.1, "Disk quota exceeded"))
    found = check_write([*writes(100), refused], save)
    assert (found.level.value, "Disk quota exceeded" in found.sentence) == ("fail", True)


@pytest.mark.parametrize(
    ("warning", "limit", "level", "line"),
    [
        (145, 86400.0, "pass", ""),
        (144, 86400.0, "warn", "@150`"),
        (145, None, "pass", ""),
        (145, 289.0, "fail", "a stop with its saves takes 145 s, and the job has 289 s"),
        (300, 300.0, "fail", "@150`"),
    ],
)
def test_the_warning_covers_two_saves(
    warning: int, limit: float | None, level: str, line: str
) -> None:
    plan = JobPlan("job.sh", warning=EarlySignal("TERM", warning, to_script=True))
    save = predict_save(6000, writes(100), 1, measured_on_all=True)
    found = check_window(plan, limit, save, lambda seconds: 2 * seconds + 25)
    assert (found.level.value, line in found.sentence) == (level, True)


@pytest.mark.parametrize(
    ("job", "resubmit", "level"),
    [
        (JobFacts(True, None), False, "pass"),
        (JobFacts(False, None), False, "warn"),
        (JobFacts(False, None), True, "pass"),
        (JobFacts(None, None), False, "skipped"),
        (JobFacts(False, None, batch=False), False, "skipped"),
    ],
)
def test_requeue(job: JobFacts, resubmit: bool, level: str) -> None:
    assert check_requeue(job, None, resubmit).level == level


@pytest.mark.parametrize(
    ("slurm", "level"),
    [
        (SlurmFacts(no_partition="there is no gpus"), "fail"),
        (SlurmFacts(), "skipped"),
        (None, "skipped"),
        (SlurmFacts(partition=Partition("gpu", None, None)), "pass"),
        (SlurmFacts(partition=Partition("gpu", None, 3600.0)), "fail"),
    ],
)
def test_partitions(slurm: SlurmFacts | None, level: str) -> None:
    assert check_time(slurm, 7200.0).level == level


def test_what_cannot_be_told_of_a_run_or_a_disk() -> None:
    assert check_run(RunState("runs/a", running=None)).level == "warn"
    assert check_room(Disk("a", "/", trouble="Stale file handle"), 1, 3).level == "fail"


def test_caches_matter_offline_and_most_to_a_model_of_ones_own() -> None:
    empty = detailed(caches={"/home/hub": "is not there"})
    assert bad(check_caches([empty], ["HF_HUB_OFFLINE"], True)) == {"offline caches": "fail"}
    assert bad(check_caches([empty], ["HF_HUB_OFFLINE"], False)) == {"offline caches": "warn"}
    assert check_caches([empty], [], True) == []


def test_answers_arrive_whole_and_nothing_else_does() -> None:
    said = [replace(WELL, node=f"n{k}") for k in range(3)]
    told = "".join(answer_lines(answer) for answer in said)
    told += "srun: a word\n" + in_lines("n8", b"{}")
    assert sorted(read_results(told.splitlines()), key=lambda answer: answer.node) == said


def test_slurm_matters_only_to_a_job() -> None:
    assert check_slurm(None, used=False).level == "skipped"
    assert check_slurm(None, used=True).level == "fail"
    assert check_slurm(SlurmFacts(), used=True).level == "pass"


@pytest.mark.parametrize(
    ("complaints", "words"),
    [("srun: job 7 queued\nsrun: error: no such node\n", "no such node"), ("", "printed nothing")],
)
def test_no_node_answers(complaints: str, words: str) -> None:
    found = check_answers(Survey(("node1", "node2"), (), (0.0, 0.0), {}, {}, complaints))
    assert (found.level.value, found.nodes) == ("fail", ("node1", "node2"))
    assert words in found.sentence


def test_what_a_node_writes_and_nobody_sees() -> None:
    survey = Survey(("node1",), (WELL,), (0.0, 0.0), {"node1": ("/runs",)}, {})
    (finding,) = check_shared(survey)
    assert finding.level == "fail"
    assert finding.sentence.startswith("/runs does not show elsewhere what the node writes")
