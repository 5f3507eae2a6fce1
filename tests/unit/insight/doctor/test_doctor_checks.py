"""Judgements that no planted fault shows: tables."""

from __future__ import annotations

from collections.abc import Mapping
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
from kempner.insight.doctor.facts.gpus import Gpu, GpuSurvey
from kempner.insight.doctor.facts.node import (
    FolderFacts,
    Limits,
    NetworkFacts,
    NodeAnswer,
    Software,
    WriteRate,
    answer_text,
    read_answers,
)
from kempner.insight.doctor.facts.nodes import Survey
from kempner.insight.doctor.facts.plan import EarlySignal, JobPlan
from kempner.insight.doctor.facts.slurm import Partition, SlurmFacts
from kempner.insight.doctor.facts.storage import Disk, RunState
from kempner.insight.doctor.finding import Finding

MIB, GIB = 2**20, 2**30
IB0 = Interface("ib0", 32, True, "10.10.0.11/24")
LO = Interface("lo", 772, True, "127.0.0.1/8")
LIMITS = Limits(65536, None, 8 * GIB, 8 * GIB, 64 * GIB, 60 * GIB, ("/tmp", 9 * GIB))
WELL = NodeAnswer(
    node="node1",
    time=1000.0,
    limits=LIMITS,
    network=NetworkFacts(IB0, infiniband=True),
    folders=FolderFacts({}, {}, {}),
    gpus=GpuSurvey(),
    software=Software("3.11", "0.1", "2.13.0", "12.8"),
)
"""A node that nothing is wrong with."""


def limited(**changes: Any) -> NodeAnswer:
    return replace(WELL, limits=replace(LIMITS, **changes))


def bad(findings: list[Finding]) -> dict[str, str]:
    """The levels of what is not well, by check."""
    return {f.check: f.level.value for f in findings if f.level.value in ("warn", "fail")}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, {}),
        ({"open_files": None}, {}),
        ({"open_files": 511}, {"open files": "fail"}),
        ({"open_files": 512}, {}),
        ({"memlock": 8 * MIB}, {"locked memory": "fail"}),
        ({"memlock": 8 * GIB}, {"locked memory": "warn"}),
        ({"shm_free": 31 * MIB}, {"/dev/shm": "fail"}),
        ({"shm_total": 64 * MIB, "shm_free": 64 * MIB}, {"/dev/shm": "warn"}),
        ({"temporary": ("/tmp", MIB)}, {"temporary files": "fail"}),
    ],
)
def test_limits(changes: Mapping[str, Any], found: dict[str, str]) -> None:
    assert bad(check_limits([limited(**changes)], ranks=64, workers=2)) == found


def test_limits_that_matter_only_to_those_who_need_them() -> None:
    no_fabric = replace(limited(memlock=MIB), network=NetworkFacts(None))
    small = limited(shm_total=64 * MIB, shm_free=64 * MIB)
    assert bad(check_limits([no_fabric, small], ranks=8, workers=0)) == {}


@pytest.mark.parametrize(
    ("free", "staged", "found"),
    [(60, 10, {}), (60, 61, {"memory": "warn"}), (1, 0, {"memory": "fail"})],
)
def test_memory(free: int, staged: int, found: dict[str, str]) -> None:
    assert bad(check_memory([limited(memory_free=free * GIB)], staged * GIB)) == found


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
    other = replace(WELL.software, cuda="11.8")
    nodes = [replace(WELL, node=f"node{n}") for n in range(3)]
    nodes.append(replace(WELL, node="node3", software=other))
    (finding,) = [f for f in check_software(nodes) if f.level.value == "fail"]
    assert (finding.nodes, finding.sentence[:26]) == (("node3",), "cuda is 11.8, elsewhere 12")


@pytest.mark.parametrize(
    ("network", "found"),
    [
        (NetworkFacts(IB0), {}),
        (NetworkFacts(LO), {"interface": "fail"}),
        (NetworkFacts(IB0, unreachable="10.10.0.9 cannot be reached"), {"interface": "fail"}),
        (NetworkFacts(None, trouble="ib9 does not exist"), {"interface": "fail"}),
        (NetworkFacts(IB0, warning="no fabric"), {"interface": "warn"}),
    ],
)
def test_interfaces_of_two_nodes(network: NetworkFacts, found: dict[str, str]) -> None:
    nodes = [replace(WELL, node=node, network=network) for node in ("node1", "node2")]
    assert bad(check_interfaces(nodes)) == found


@pytest.mark.parametrize(
    ("free", "in_job", "level"),
    [(0, False, "fail"), (1, False, "pass"), (1, True, "warn"), (2, True, "pass")],
)
def test_ports(free: int, in_job: bool, level: str) -> None:
    assert check_ports(PortFacts("20000-20001", free), in_job).level == level


def test_gpus_of_the_job_that_somebody_still_uses() -> None:
    used = Gpu(0, "H100", 80 * GIB, 70 * GIB, processes=(7,))
    nodes = [replace(WELL, gpus=GpuSurvey((used,), "550"))]
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
    node = replace(WELL, gpus=four, software=replace(WELL.software, devices=4))
    assert bad(check_ranks(job, [node], hidden=False)) == {}
    few = replace(job, per_node=2, gpus=None)
    assert bad(check_ranks(few, [node], hidden=False)) == {"ranks and GPUs": "warn"}


def writes(*rates: float) -> list[NodeAnswer]:
    folders = [replace(WELL.folders, write=WriteRate(int(rate), 1.0)) for rate in rates]
    return [replace(WELL, folders=each) for each in folders]


def test_a_save_is_as_fast_as_all_nodes_together() -> None:
    assert predict_save(600, writes(100, 200), 2, measured_on_all=True).seconds == 2.0
    assert predict_save(600, writes(100), 3, measured_on_all=False).seconds == 2.0
    assert predict_save(600, [WELL], 1, measured_on_all=True).seconds is None
    assert predict_save(None, writes(100), 1, measured_on_all=True).seconds is None


def test_a_folder_that_takes_nothing() -> None:
    save = predict_save(600, [WELL], 1, measured_on_all=True)
    assert check_write([WELL], save).level == "skipped"
    refused = replace(WELL.folders, write=WriteRate(0, 0.1, "Disk quota exceeded"))
    found = check_write([*writes(100), replace(WELL, folders=refused)], save)
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
    empty = replace(WELL, folders=replace(WELL.folders, caches={"/home/hub": "is not there"}))
    assert bad(check_caches([empty], ["HF_HUB_OFFLINE"], True)) == {"offline caches": "fail"}
    assert bad(check_caches([empty], ["HF_HUB_OFFLINE"], False)) == {"offline caches": "warn"}
    assert check_caches([empty], [], True) == []


def test_answers_arrive_whole_and_nothing_else_does() -> None:
    said = [replace(WELL, node=f"n{k}") for k in range(3)]
    told = "".join(answer_text(answer) for answer in said)
    told += "srun: a word\n" + in_lines("n8", b"{}")
    assert sorted(read_answers(told), key=lambda answer: answer.node) == said


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
