"""Faults of single nodes are found among others that are well."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from sick_site import Report, Site

from kempner.cluster.slurm.allocation import Allocation
from kempner.config.loading import load
from kempner.insight.doctor.checks.fit import PlannedWorld
from kempner.insight.doctor.examine import Examination, Supervisor, examine
from kempner.insight.doctor.facts.slurm import read_plan
from kempner.run.record.run_dir import RunDirectory


@pytest.fixture
def allocation(site: Site, monkeypatch: pytest.MonkeyPatch) -> Allocation:
    """Five nodes, by an srun that starts their probes here, each in a network of its own."""
    if os.geteuid() != 0:
        pytest.skip("namespaces need root")
    monkeypatch.undo()  # each node has a torch of its own
    monkeypatch.chdir(site.folder)
    monkeypatch.setenv("PATH", f"{site.folder}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", site.torch("usual", "2.13.0"))
    site.slurm(job="JobId=7 JobState=RUNNING Restarts=0 Requeue=1 TimeLimit=1-00:00:00 "
               "EndTime=2027-01-01T00:00:00 NumNodes=5 BatchFlag=1 Partition=gpu\n")  # fmt: skip
    nodes = tuple(f"node{n}" for n in range(1, 6))
    return Allocation("7", nodes, 1, None, 0, batch=True)


def examined(site: Site, allocation: Allocation, *arguments: str) -> Report:
    config = load(Path("c.toml"), arguments)
    world = PlannedWorld(len(allocation.nodes), 1, None, "job 7", in_job=True)
    plan = read_plan(Path("job.sh"))
    patient = Examination(config, RunDirectory(Path("runs/c")), world, plan, allocation)
    findings = [*examine(patient, Supervisor(lambda: None, lambda save: 2 * save + 25))]
    return Report({"findings": [each.to_json() for each in findings]}, 0)


def test_nothing_is_found_on_nodes_that_are_well(site: Site, allocation: Allocation) -> None:
    report = examined(site, allocation)
    assert report.bad() == []
    said = {each["check"]: each["sentence"] for each in report.told["findings"]}
    assert said["nodes"] == "5 nodes answered"
    assert said["shared folders"] == "what a node writes is seen by the others"
    assert "measured on 5 nodes at once" in said["save time"]
    assert [path.name for path in site.folder.iterdir() if path.name.startswith(".")] == []


def test_each_node_that_differs_is_named(site: Site, allocation: Allocation) -> None:
    """One has another clock, one another torch, one other data, and one does not answer."""
    faults = {
        "node2": {"ahead": -100},
        "node3": {"environ": {"PYTHONPATH": site.torch("old", "2.9.1")}},
        "node4": {"hides": str(site.folder / "tokens")},
        "node5": {"silent": "task 4: Exited with exit code 2"},
    }
    site.slurm(faults=json.dumps(faults))
    report = examined(site, allocation)
    bad = {check: (level, sentence) for check, level, sentence in report.bad()}
    assert [*bad] == ["data on nodes", "nodes", "software", "clock"]
    assert {level for level, _ in bad.values()} == {"fail"}
    assert report.nodes("clock") == [["node2"]]
    assert report.nodes("software") == [["node3"]]
    assert report.nodes("data on nodes") == [["node4"]]
    assert report.nodes("nodes") == [["node5"]]
    assert re.search(r"its clock is (9\d|100) s behind", bad["clock"][1])
    assert "torch is 2.9.1, elsewhere 2.13.0" in bad["software"][1]
    assert "tokens cannot be read there" in bad["data on nodes"][1]
    assert "no answer (srun: error: node5: task 4" in bad["nodes"][1]


def test_a_folder_that_is_not_shared_and_a_link_that_is_down(
    site: Site, allocation: Allocation
) -> None:
    (site.folder / "runs").mkdir()
    faults = {"node3": {"hides": str(site.folder / "runs")}, "node4": {"link": "down"}}
    site.slurm(faults=json.dumps(faults))
    report = examined(site, allocation)
    bad = [(check, level) for check, level, _ in report.bad()]
    assert bad == [("shared folders", "fail"), ("interface", "warn"), ("interface", "fail")]
    assert report.nodes("shared folders") == [["node3"]]
    assert report.nodes("interface") == [["node4"], []]
    assert "fix the interface of node4" in report.bad()[-1][2]
    assert f"{site.folder}/runs is not the same folder as" in report.bad()[0][2]
